// Measured runs beside what is predicted of them, with the error.

const HEAD = ["run", "measured", "predicted", "error"];
const STYLE = `
  .runs { display: grid; gap: 10px; }
  .runs .bars { grid-template-columns: 5.5em 1fr 4em; gap: 3px 10px; margin: 0; }
  .runs .bar { height: 14px; }
  .runs > div > p { margin: 0 0 2px; display: flex; justify-content: space-between;
    gap: 0 12px; }
  .runs .after { white-space: nowrap; }
`;

/** By run of the machine and model: tokens a second and GPU, measured and predicted. */
const numbers = (get) => get("runs")[get("machine")][get("model")] ?? [];

const signed = (error) => `${error < 0 ? "−" : "+"}${Math.abs(100 * error).toFixed(1)} %`;
const tokens = (x) => Math.round(x).toLocaleString("en-US");

/** A machine or a model is chosen; where it has no run with the other of the two, that
 *  becomes the first with which it has. */
function choose(model, name, value) {
  const runs = model.get("runs");
  const at = { machine: model.get("machine"), model: model.get("model"), [name]: value };
  if (!runs[at.machine][at.model]) {
    if (name === "machine") [at.model] = Object.keys(runs[value]);
    else at.machine = Object.keys(runs).find((machine) => runs[machine][value]);
  }
  Object.entries(at).forEach(([which, one]) => put(model, which, one));
}

/** A select of some values. */
function select(model, name, title, values) {
  const input = make("select", { onchange: () => choose(model, name, input.value) },
    ...values.map((value) => make("option", {}, value)));
  return {
    box: make("label", {}, make("span", { class: "name" }, title), input),
    update: () => { input.value = model.get(name); },
  };
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const machines = Object.entries(get("runs"));
  const models = machines.map(([, found]) => Object.keys(found));
  const selects = [select(model, "machine", "machine", machines.map(([name]) => name)),
    select(model, "model", "model", [...new Set(models.flat())])];
  const list = make("div", { class: "runs" });
  const words = make("p", { class: "words", role: "status" });
  const update = () => {
    selects.forEach((one) => one.update());
    const all = numbers(get);
    const longest = Math.max(...all.flatMap(([, ...both]) => both));
    list.replaceChildren(...all.map(([name, ...both]) => {
      const pair = Object.keys(get("palette")).map((part, i) => {
        const one = row(get("palette"), tokens);
        one.update(part, [[part, both[i]]], longest, tokens(both[i]));
        return one.box;
      });
      return make("div", {}, make("p", {}, make("span", {}, name),
        make("span", { class: "after" }, signed(both[1] / both[0] - 1))),
      make("div", { class: "bars" }, ...pair));
    }));
    const errors = all.map(([, measured, predicted]) => Math.abs(predicted / measured - 1));
    const mean = errors.reduce((a, b) => a + b, 0) / errors.length;
    words.textContent = all.length
      ? `${get("model")} on ${get("machine")}: ${all.length} runs, the mean error of the ` +
        `prediction is ${short(100 * mean)} %.`
      : `No run of ${get("model")} on ${get("machine")} was measured.`;
  };
  const chart = make("div", { class: "chart" }, key(get("palette")), list, words);
  return mount({ model, el }, {
    title: "Measured and predicted tokens a second and GPU",
    names: ["machine", "model"],
    style: STYLE,
    content: [make("div", { class: "controls" }, ...selects.map((one) => one.box)), chart],
    update,
    table: { head: HEAD, say: (x, i) => i < 2 ? tokens(x) : signed(x),
      rows: () => numbers(get).map(([name, a, b]) => [name, a, b, b / a - 1]) },
  });
}

export default { render, numbers };
