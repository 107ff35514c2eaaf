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
  th:first-child { text-align: left; }
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

/** The weight as it is stored, and the sum. */
function stored(get, format) {
  const before = round(2 ** get("weight"), format);
  return [before, round(before + 2 ** get("update"), format)];
}

/** The share that each format keeps of the update. */
function numbers(get) {
  return get("formats").map((format) => {
    const [before, after] = stored(get, format);
    return [format.name, (after - before) / 2 ** get("update")];
  });
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const controls = sliders(model, CONTROLS);
  const body = make("tbody");
  const update = () => {
    controls.update();
    const shares = numbers(get);
    body.replaceChildren(...get("formats").map((format, i) => {
      const [before, after] = stored(get, format);
      const kept = shares[i][1];
      const share = Number.isFinite(kept) ? `${Math.round(100 * kept)} %` : "–";
      const cells = [format.name, number(before), number(after),
        kept === 0 ? "lost" : share];
      return make("tr", { "data-kept": kept, class: kept === 0 ? "lost" : "" },
        make("th", { scope: "row" }, cells[0]),
        ...cells.slice(1).map((text) => make("td", {}, text)));
    }));
  };
  const table = make("table", {},
    make("thead", {}, make("tr", {}, ...HEAD.map((t) => make("th", { scope: "col" }, t)))), body);
  return mount({ model, el }, {
    title: "A sum in each format",
    names: Object.keys(CONTROLS),
    style: STYLE,
    content: [controls.box,
      make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Formats" },
        table)],
    update,
  });
}

export default { render, numbers };
