// The memory explorer: its controls. What they change is drawn by memory_chart.js.

const PRESETS = [1.5e9, 7e9, 13e9, 70e9, 175e9];
const same = (...names) => names.map((name) => [name, name]);
const OPTIMIZERS = [["adam", "Adam"], ["momentum", "SGD, momentum"], ["sgd", "SGD"]];
const [LOWEST, HIGHEST] = [1e8, 1e12];
const NAMES = ["n_params", "world_size", "stage", "precision", "optimizer",
  "offload_optimizer", "offload_param", "device_memory", "sequence", "micro_batch",
  "recomputation"];
const twos = (from, to) => Array.from({ length: to - from + 1 },
  (_, i) => [2 ** (from + i), (2 ** (from + i)).toLocaleString("en-US")]);

const STYLE = `
  .controls { grid-template-columns: 1fr 1fr; gap: 14px 28px; }
  .wide { display: flex; flex-wrap: wrap; gap: 10px 28px;
    align-items: start; }
  .more { grid-column: 1 / -1; }
  .more > summary { margin-bottom: 4px; }
  .line { display: flex; align-items: center; gap: 8px; }
  .tick { display: inline-flex; align-items: center; gap: 6px; margin-right: 14px; }
  input[type="text"] { width: 6em; }
  .presets { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 8px; }
  button { padding: 3px 7px; }
  button[aria-pressed="true"] { border-color: currentColor; font-weight: 600;
    background: color-mix(in srgb, currentColor 16%, transparent); }
  .error:empty { display: none; }
  fieldset { border: 0; margin: 0; padding: 0; min-width: 0; }
  legend { padding: 0; }
  @container (min-width: 561px) { .more[open] > summary { display: none; } }
  @container (max-width: 560px) {
    .box { padding: 12px; }
    .controls { grid-template-columns: 1fr; }
  }
`;

/** "7B", "7.5e9", "350 M" or "7,000,000,000" as a number; NaN for anything else, such
 *  as "7,5B": a comma stands between thousands. */
function parse(text) {
  const found = /^((?:[1-9]\d{0,2}(?:,\d{3})+|\d*)(?:\.\d+)?(?:e\d+)?)([MBT]?)$/i
    .exec(text.replace(/[\s_]/g, ""));
  if (!found) return NaN;
  const unit = { "": 1, M: 1e6, B: 1e9, T: 1e12 }[found[2].toUpperCase()];
  return Number(found[1].replaceAll(",", "")) * unit;
}

/** A number to type, to choose from a few, or to slide. */
function size(model) {
  const name = "n_params";
  const error = make("span", { class: "error", role: "alert" });
  const judge = (fine) => {
    field.setAttribute("aria-invalid", String(!fine));
    error.textContent = fine ? "" : "Write a number from 0.1B to 1T, decimals after a point, such as 7.5B.";
  };
  const field = make("input", {
    type: "text", "aria-label": "Parameters, as a number",
    onchange: () => {
      const n = parse(field.value);
      judge(n >= LOWEST && n <= HIGHEST);
      if (!error.textContent) put(model, name, n);
    },
  });
  const slider = range(model, name, "Parameters", [8, 12, FINE], billions);
  const presets = PRESETS.map((n) => make("button",
    { type: "button", onclick: () => put(model, name, n) }, billions(n)));
  const { setting } = model.get("published");
  presets.push(make("button", { type: "button", onclick: () => {
    for (const [of, value] of Object.entries(setting)) put(model, of, value);
  } }, `${billions(setting.n_params)} on ${setting.world_size}: the paper`));
  const box = make("div", {}, make("span", { class: "name" }, "Parameters"),
    make("div", { class: "line" }, field, slider.box), error,
    make("div", { class: "presets" }, ...presets));
  const update = () => {
    slider.update();
    field.value = billions(model.get(name));
    judge(true);
    presets.forEach((button, i) =>
      button.setAttribute("aria-pressed", String((PRESETS[i] ?? setting.n_params) === model.get(name))));
  };
  return { box, update };
}

function ranks(model) {
  const name = "world_size";
  const shown = make("output");
  const slider = range(model, name, "GPUs", [0, 10, TWOS], gpus);
  const box = make("div", {}, make("span", { class: "name" }, shown), slider.box);
  const update = () => {
    slider.update();
    shown.textContent = `On ${gpus(model.get(name))}`;
  };
  return { box, update };
}

function tick(model, name, text) {
  const input = make("input",
    { type: "checkbox", onchange: () => put(model, name, input.checked) });
  const box = make("label", { class: "tick" }, input, text);
  return { box, update: () => { input.checked = model.get(name); } };
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const memories = model.get("device_memories").map((gb) => [gb, `${gb} GB`]);
  const choices = Object.entries({
    precision: ["Precision", same("bf16", "fp32")],
    optimizer: ["Optimizer", OPTIMIZERS],
    device_memory: ["Memory of a GPU", memories],
    sequence: ["Sequence", twos(7, 17)],
    micro_batch: ["Micro-batch", twos(0, 8)],
    recomputation: ["Recomputation", same("none", "selective", "full")],
  }).map(([name, [title, options]]) => {
    const { box, show } = choice(title, options, (value) => put(model, name, value));
    return { box, update: () => show(get(name)) };
  });
  const ticks = [
    tick(model, "offload_optimizer", "optimizer state"),
    tick(model, "offload_param", "parameters"),
  ];
  const first = [size(model), ranks(model)];
  const chart = memoryChart(model);
  const boxes = (parts) => parts.map((part) => part.box);
  const more = make("details", { class: "more" },
    make("summary", {}, "Precision, optimizer, batch, offload"),
    make("div", { class: "wide" }, ...boxes(choices), make("fieldset", {},
      make("legend", { class: "name" }, "Offload to the host"), ...boxes(ticks))));
  // On a phone the bars come first, unless what is folded is what the chapter is about.
  more.open = innerWidth > 600 || get("recomputation") !== "full" || get("offload_optimizer");
  const controls = make("div", { class: "controls" }, ...boxes(first), more);
  const all = [...first, ...choices, ...ticks, chart];
  return mount({ model, el }, {
    title: "Memory of a GPU in training",
    names: NAMES,
    style: STYLE + CHART_STYLE,
    content: [controls, chart.box],
    update: () => all.forEach((part) => part.update()),
    table: { head: HEAD, say: amount, rows: () => numbers(get) },
    // The chart alone: a half-written number in the text field stays as it is.
    resize: chart.update,
  });
}

export default { render, numbers };
