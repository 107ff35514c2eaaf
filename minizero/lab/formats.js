// A weight, an update, and what each floating-point format keeps of their sum.

const STYLE = `
  :host { all: initial; display: block; color-scheme: inherit; color: inherit;
    font: inherit; }
  * { box-sizing: border-box; }
  .box { font-size: 14px; line-height: 1.45; padding: 14px 16px; overflow-x: auto;
    border: 1px solid color-mix(in srgb, currentColor 28%, transparent);
    border-radius: 8px; }
  .controls { display: flex; flex-wrap: wrap; gap: 10px 28px; }
  label { flex: 1 1 200px; font-weight: 600; }
  input { display: block; width: 100%; accent-color: #2f86c8; margin: 6px 0; }
  :focus-visible { outline: 2px solid #2f86c8; outline-offset: 2px; }
  table { border-collapse: collapse; width: 100%; margin-top: 8px;
    font-variant-numeric: tabular-nums; }
  th, td { text-align: right; padding: 4px 8px; font-weight: 400; }
  th:first-child, td:first-child { text-align: left; }
  thead th { font-weight: 600;
    border-bottom: 1px solid color-mix(in srgb, currentColor 45%, transparent); }
  .lost td:last-child { font-weight: 700; }
`;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** The nearest number of the format; of two, the even one. */
function round(x, { digits, lowest, largest }) {
  if (x === 0) return 0;
  const power = Math.max(Math.floor(Math.log2(x)), lowest);
  const quantum = 2 ** (power - digits);
  const whole = Math.floor(x / quantum);
  const rest = x / quantum - whole;
  const up = rest > 0.5 || (rest === 0.5 && whole % 2 === 1);
  const near = (whole + up) * quantum;
  return near > largest ? Infinity : near;
}

function number(x) {
  if (x === Infinity) return "too large";
  return x === 0 ? "0" : String(Number(x.toPrecision(8)));
}

function render({ model, el }) {
  const body = make("tbody");
  const names = { weight: ["weight", -20, 18], update: ["update", -30, 16] };
  const labels = {}, inputs = {};
  for (const [name, [text, min, max]] of Object.entries(names)) {
    labels[name] = make("span");
    inputs[name] = make("input", {
      type: "range", min, max, step: 0.25, "aria-label": `${text}, power of two`,
      oninput: () => {
        model.set(name, Number(inputs[name].value));
        model.save_changes();
      },
    });
  }
  const update = () => {
    for (const name of Object.keys(names)) {
      inputs[name].value = model.get(name);
      const value = 2 ** model.get(name);
      labels[name].textContent =
        `${name} 2^${model.get(name)} = ${Number(value.toPrecision(4))}`;
    }
    const [w, u] = [2 ** model.get("weight"), 2 ** model.get("update")];
    body.replaceChildren(...model.get("formats").map((format) => {
      const before = round(w, format);
      const after = round(before + u, format);
      const kept = (after - before) / u;
      const share = Number.isFinite(kept) ? `${Math.round(100 * kept)} %` : "–";
      return make("tr", kept === 0 ? { class: "lost" } : {},
        ...[format.name, number(before), number(after), kept === 0 ? "lost" : share]
          .map((text) => make("td", {}, text)));
    }));
  };
  const head = ["format", "weight", "weight + update", "kept of the update"];
  const box = make("div", { class: "box" },
    make("div", { class: "controls" },
      ...Object.keys(names).map((n) => make("label", {}, labels[n], inputs[n]))),
    make("table", {},
      make("thead", {}, make("tr", {}, ...head.map((t) => make("th", {}, t)))),
      body));
  const host = make("div", { class: "format-explorer" });
  const root = host.attachShadow({ mode: "open" });
  root.append(make("style", {}, STYLE), box);
  const theme = document.body.dataset.jpThemeLight;
  if (theme) host.style.colorScheme = theme === "false" ? "dark" : "light";
  el.append(host);
  model.on("change:weight change:update", update);
  update();
  return () => model.off("change:weight change:update", update);
}

export default { render };
