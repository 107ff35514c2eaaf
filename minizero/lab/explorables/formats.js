// A weight, an update, and what each floating-point format keeps of their sum.

const POWERS = { ...STEPS, step: 0.25 };
const power = (k) => `2^${k} = ${Number((2 ** k).toPrecision(4))}`;
const CONTROLS = {
  weight: ["weight", [-20, 18, POWERS], power],
  update: ["update", [-30, 16, POWERS], power],
};
const HEAD = ["format", "weight", "weight + update", "kept of the update"];

const STYLE = `
  .wide { overflow-x: auto; margin-top: 8px; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  th, td { text-align: right; padding: 4px 8px; font-weight: 400; }
  th:first-child, td:first-child { text-align: left; }
  thead th { font-weight: 600;
    border-bottom: 1px solid color-mix(in srgb, currentColor 45%, transparent); }
  .lost td:last-child { font-weight: 700; }
`;

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
  const controls = sliders(model, CONTROLS);
  const body = make("tbody");
  const update = () => {
    controls.update();
    const [w, u] = [2 ** model.get("weight"), 2 ** model.get("update")];
    body.replaceChildren(...model.get("formats").map((format) => {
      const before = round(w, format);
      const after = round(before + u, format);
      const kept = (after - before) / u;
      const share = Number.isFinite(kept) ? `${Math.round(100 * kept)} %` : "–";
      const cells = [format.name, number(before), number(after),
        kept === 0 ? "lost" : share];
      return make("tr", { "data-kept": kept, class: kept === 0 ? "lost" : "" },
        ...cells.map((text) => make("td", {}, text)));
    }));
  };
  const table = make("table", {},
    make("thead", {}, make("tr", {}, ...HEAD.map((t) => make("th", {}, t)))), body);
  return mount({ model, el }, "A sum in each format", Object.keys(CONTROLS), STYLE,
    [controls.box, make("div", { class: "wide" }, table)], update);
}

export default { render };
