// The memory explorer: bytes of model state per GPU, for the four stages.
//
// One module serves two hosts. In Jupyter it is an anywidget, and `model` is the
// widget's; in a static page `model` is a stand-in over the state stored in the page.
// It computes nothing but bytes = n_params · (whole + split / world_size), with the
// coefficients that Python derived from minizero.memory.estimate.

const STAGES = ["Data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"];
const SHARDS = [
  "nothing is sharded",
  "shards the optimizer state",
  "shards gradients too",
  "shards everything",
];
const NAMES = ["parameters", "gradients", "optimizer"];
const PRESETS = [1.5e9, 7e9, 13e9, 70e9, 175e9];
const OPTIMIZERS = { adam: "Adam", momentum: "SGD, momentum", sgd: "SGD" };
const [LOWEST, HIGHEST] = [1e8, 1e12];

const STYLE = `
  :host { all: initial; display: block; container-type: inline-size;
    color-scheme: inherit; color: inherit; font: inherit; }
  * { box-sizing: border-box; }
  .box { font-size: 14px; line-height: 1.45; padding: 14px 16px;
    border: 1px solid color-mix(in srgb, currentColor 28%, transparent);
    border-radius: 8px; }
  .controls { display: grid; grid-template-columns: 1fr 1fr; gap: 14px 28px; }
  .wide { grid-column: 1 / -1; display: flex; flex-wrap: wrap; gap: 10px 28px;
    align-items: start; }
  label { display: block; }
  .name { display: block; font-weight: 600; margin-bottom: 3px; }
  .line { display: flex; align-items: center; gap: 8px; }
  .tick { display: inline-flex; align-items: center; gap: 6px; margin-right: 14px; }
  input, select, button { font: inherit; color: inherit; accent-color: #2f86c8; }
  input[type="range"] { appearance: none; width: 100%; height: 18px; margin: 6px 0;
    background: linear-gradient(color-mix(in srgb, currentColor 35%, transparent) 0 0)
      center / 100% 4px no-repeat; }
  input::-webkit-slider-thumb { appearance: none; width: 18px; height: 18px;
    border-radius: 50%; background: #2f86c8; }
  input::-moz-range-thumb { width: 18px; height: 18px; border: 0;
    border-radius: 50%; background: #2f86c8; }
  input[type="text"] { width: 6em; }
  input[type="text"], select, button {
    background: color-mix(in srgb, currentColor 6%, transparent); padding: 3px 8px;
    border: 1px solid color-mix(in srgb, currentColor 45%, transparent);
    border-radius: 5px; min-height: 30px; }
  option { background: Canvas; color: CanvasText; }
  button { cursor: pointer; padding: 3px 7px; }
  button[aria-pressed="true"] { border-color: currentColor; font-weight: 600;
    background: color-mix(in srgb, currentColor 16%, transparent); }
  :focus-visible { outline: 2px solid #2f86c8; outline-offset: 2px; }
  [aria-invalid="true"] { border: 2px solid #cf5a2b; }
  .error:empty { display: none; }
  .presets { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 8px; }
  fieldset { border: 0; margin: 0; padding: 0; min-width: 0; }
  legend { padding: 0; }
  .chart { margin-top: 16px; padding-top: 12px;
    border-top: 1px solid color-mix(in srgb, currentColor 18%, transparent); }
  .key { display: flex; flex-wrap: wrap; gap: 4px 18px; }
  .swatch { display: inline-block; width: 14px; height: 14px; margin-right: 6px;
    vertical-align: -2px; }
  .capacity { position: relative; height: 20px; margin-top: 6px; font-size: 13px; }
  .capacity span { position: absolute; transform: translateX(-50%);
    white-space: nowrap; }
  .row { display: block; margin: 0 -8px; padding: 5px 8px 10px; cursor: pointer;
    border-radius: 6px; }
  .row:has(input:checked) { background: color-mix(in srgb, currentColor 7%, transparent); }
  .head { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 8px; }
  .head input { margin: 0; align-self: center; }
  .head .stage { font-weight: 600; }
  .soft { color: color-mix(in srgb, currentColor 78%, transparent); }
  .head .total { margin-left: auto; font-weight: 600; }
  .verdict { min-width: 15.5em; }
  .sign { font-weight: 700; }
  .yes .sign { color: #1f8f62; }
  .no .sign { color: #cf5a2b; }
  .track { position: relative; height: 24px; margin-top: 4px; display: flex;
    background: color-mix(in srgb, currentColor 7%, transparent); }
  .track::after { content: ""; position: absolute; top: -3px; bottom: -3px;
    left: var(--capacity); width: 2px;
    background: repeating-linear-gradient(currentColor 0 4px, Canvas 4px 7px); }
  .bar { display: flex; overflow: hidden; width: 100%; }
  .torn { clip-path: polygon(0 0, 100% 0, calc(100% - 6px) 25%, 100% 50%,
    calc(100% - 6px) 75%, 100% 100%, 0 100%); }
  .bar div { flex: none; overflow: hidden; text-align: center; font-size: 12.5px;
    line-height: 24px; white-space: nowrap; }
  .bar div, .swatch { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .bar span { padding: 1px 4px; }
  .note { margin: 10px 0 0; }
  @container (max-width: 560px) {
    .box { padding: 12px; }
    .controls { grid-template-columns: 1fr; }
    .what { display: none; }
    .verdict { flex-basis: 100%; }
  }
`;

/** An element with attributes and children; "on..." attributes are listeners. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** At most four digits, two of them decimals: 112, 38.5, 26.25. */
function short(number) {
  return Number(number.toPrecision(4)).toLocaleString("en-US", {
    maximumFractionDigits: 2,
  });
}

function gigabytes(bytes) {
  return bytes > 0 && bytes < 1e8 ? `${short(bytes / 1e6)} MB` : `${short(bytes / 1e9)} GB`;
}

function billions(n) {
  return n < 1e12 ? `${short(n / 1e9)}B` : `${short(n / 1e12)}T`;
}

/** "7B", "7.5e9" or "350 M" as a number; NaN for anything else. */
function parse(text) {
  const found = /^(\d*\.?\d+(?:e\d+)?)([MBT]?)$/i.exec(text.replace(/[\s,_]/g, ""));
  if (!found) return NaN;
  const unit = { "": 1, M: 1e6, B: 1e9, T: 1e12 }[found[2].toUpperCase()];
  return Number(found[1]) * unit;
}

/** [whole, split] bytes a parameter of each category and of the host, for a stage.
 *  What a stage cannot offload stays on the device. */
function coefficients(get, stage) {
  const base = `${stage}/${get("precision")}/${get("optimizer")}`;
  const [o, p] = [Number(get("offload_optimizer")), Number(get("offload_param"))];
  const table = get("coefficients");
  return table[`${base}/${o}${p}`] ?? table[`${base}/${o}0`] ?? table[`${base}/00`];
}

function bytes([whole, split], n, gpus) {
  return n * (whole + split / gpus);
}

/** Fewest GPUs on which the stage's device state fits; Infinity if it never does. */
function fewest(rows, n, capacity) {
  const [whole, split] = rows.reduce(([a, b], [c, d]) => [a + c, b + d], [0, 0]);
  if (n * (whole + split) <= capacity) return 1;
  if (n * whole >= capacity) return Infinity;
  return Math.ceil((n * split) / (capacity - n * whole));
}

function gpusText(count) {
  return count === 1 ? "1 GPU" : `${count.toLocaleString("en-US")} GPUs`;
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const set = (name, value) => {
    model.set(name, value);
    model.save_changes();
  };
  const host = make("div", { class: "memory-explorer" });
  const root = host.attachShadow({ mode: "open" });
  const { box, update, redraw } = build(get, set);
  root.append(make("style", {}, STYLE), box);
  // Jupyter's own theme does not tell the browser that it is dark.
  const theme = document.body.dataset.jpThemeLight;
  if (theme) host.style.colorScheme = theme === "false" ? "dark" : "light";
  el.append(host);

  const names = ["n_params", "world_size", "stage", "precision", "optimizer",
    "offload_optimizer", "offload_param", "device_memory"];
  const changed = names.map((name) => `change:${name}`).join(" ");
  model.on(changed, update);
  // The chart alone: a half-written number in the text field stays as it is.
  const resized = new ResizeObserver(redraw);
  resized.observe(host);
  update();
  return () => {
    model.off(changed, update);
    resized.disconnect();
  };
}

/** The controls and the chart; functions that bring both, or the chart, up to date. */
function build(get, set) {
  const error = make("span", { class: "error", role: "alert" });
  const field = make("input", {
    type: "text", inputmode: "text", "aria-label": "Parameters, as a number",
    onchange: () => {
      const n = parse(field.value);
      const fine = n >= LOWEST && n <= HIGHEST;
      field.setAttribute("aria-invalid", String(!fine));
      error.textContent = fine ? "" : "Write a number from 0.1B to 1T, such as 7.5B.";
      if (fine) set("n_params", n);
    },
  });
  const size = make("input", {
    type: "range", min: 8, max: 12, step: 0.01, "aria-label": "Parameters",
    oninput: () => set("n_params", Number((10 ** size.value).toPrecision(3))),
  });
  const presets = PRESETS.map((n) =>
    make("button", { type: "button", onclick: () => set("n_params", n) }, billions(n)));
  const gpus = make("input", {
    type: "range", min: 0, max: 10, step: 1, "aria-label": "GPUs",
    oninput: () => set("world_size", 2 ** gpus.value),
  });
  const gpusShown = make("output");
  const choice = (name, title, options, read = String) => {
    const entries = Object.entries(options).map(([value, text]) =>
      make("option", { value }, text));
    const select = make("select",
      { onchange: () => set(name, read(select.value)) }, ...entries);
    return { select, label: make("label", {}, make("span", { class: "name" }, title), select) };
  };
  const precision = choice("precision", "Precision", { bf16: "bf16", fp32: "fp32" });
  const optimizer = choice("optimizer", "Optimizer", OPTIMIZERS);
  const memory = choice("device_memory", "Memory of a GPU",
    Object.fromEntries(get("device_memories").map((gb) => [gb, `${gb} GB`])), Number);
  const tick = (name, text) => {
    const input = make("input", {
      type: "checkbox", onchange: () => set(name, input.checked),
    });
    return { input, label: make("label", { class: "tick" }, input, text) };
  };
  const offloadOptimizer = tick("offload_optimizer", "optimizer state");
  const offloadParam = tick("offload_param", "parameters");
  const chart = buildChart(get, set);
  const title = (text) => make("span", { class: "name" }, text);
  const box = make("div", { class: "box", role: "group", "aria-label": "Memory explorer" },
    make("div", { class: "controls" },
      make("div", {}, title("Parameters"),
        make("div", { class: "line" }, field, size), error,
        make("div", { class: "presets" }, ...presets)),
      make("div", {},
        make("span", { class: "name" }, gpusShown), gpus),
      make("div", { class: "wide" }, precision.label, optimizer.label, memory.label,
        make("fieldset", {},
          make("legend", { class: "name" }, "Offload to the host"),
          offloadOptimizer.label, offloadParam.label))),
    chart.box);

  const update = () => {
    const n = get("n_params");
    field.value = billions(n);
    field.setAttribute("aria-invalid", "false");
    error.textContent = "";
    size.value = Math.log10(n);
    size.setAttribute("aria-valuetext", billions(n));
    presets.forEach((button, i) =>
      button.setAttribute("aria-pressed", String(PRESETS[i] === n)));
    gpus.value = Math.log2(get("world_size"));
    gpus.setAttribute("aria-valuetext", gpusText(get("world_size")));
    gpusShown.textContent = `On ${gpusText(get("world_size"))}`;
    precision.select.value = get("precision");
    optimizer.select.value = get("optimizer");
    memory.select.value = String(get("device_memory"));
    offloadOptimizer.input.checked = get("offload_optimizer");
    offloadParam.input.checked = get("offload_param");
    chart.update();
  };
  return { box, update, redraw: chart.update };
}

/** What a category is filled with: its colour, and stripes where Python asks for them. */
function fill(get, name) {
  const { colour, ink, striped } = get("palette")[name];
  const stripe = "color-mix(in srgb, black 32%, transparent)";
  const stripes = `repeating-linear-gradient(135deg, ${stripe} 0 1px, transparent 1px 7px)`;
  return {
    bar: `background: ${striped ? `${stripes}, ` : ""}${colour}; color: ${ink};`,
    text: `background: ${colour};`,
  };
}

function buildChart(get, set) {
  const fills = Object.fromEntries(NAMES.map((name) => [name, fill(get, name)]));
  const key = NAMES.map((name) =>
    make("span", {}, make("span", { class: "swatch", style: fills[name].bar }), name));
  const tag = make("span");
  const rows = STAGES.map((name, stage) => buildRow(get, set, fills, name, stage));
  const note = make("p", { class: "note", role: "status" });
  const box = make("div", { class: "chart" },
    make("div", { class: "key" }, ...key),
    make("div", { class: "capacity" }, tag),
    make("div", { role: "radiogroup", "aria-label": "Stage" }, ...rows.map((r) => r.box)),
    note);

  const update = () => {
    const [n, gpus] = [get("n_params"), get("world_size")];
    const capacity = get("device_memory") * 1e9;
    const states = STAGES.map((_, stage) => {
      const table = coefficients(get, stage);
      const parts = NAMES.map((name) => bytes(table[name], n, gpus));
      const total = parts.reduce((a, b) => a + b);
      const least = fewest(NAMES.map((name) => table[name]), n, capacity);
      return { parts, total, least, host: bytes(table.host, n, gpus), fits: total <= capacity };
    });
    const longest = Math.max(...states.map((state) => state.total));
    // A bar far beyond the capacity is torn off, or the others would vanish.
    const scale = Math.min(Math.max(longest, capacity * 1.2), capacity * 3);
    tag.style.left = `${(100 * capacity) / scale}%`;
    tag.textContent = `${get("device_memory")} GB`;
    rows.forEach((row, stage) => row.update(states[stage], scale, capacity));
    note.textContent = sentence(get, states[get("stage")], gpus);
  };
  return { box, update };
}

/** The selected stage in words. */
function sentence(get, { parts, total, host, fits, least }, gpus) {
  const held = NAMES.map((name, i) => `${name} ${gigabytes(parts[i])}`).join(", ");
  const off = host > 0 ? ` On the host, per GPU: ${gigabytes(host)}.` : "";
  const need = least === Infinity ? "It fits on no number of GPUs."
    : `The fewest GPUs on which it fits: ${least.toLocaleString("en-US")}.`;
  return `${STAGES[get("stage")]} on ${gpusText(gpus)}: ${gigabytes(total)} on each ` +
    `(${held}), which ${fits ? "fits" : "does not fit"} in ` +
    `${get("device_memory")} GB.${off} ${need} Activations and buffers come on top.`;
}

function buildRow(get, set, fills, name, stage) {
  const radio = make("input", {
    type: "radio", name: "stage", onchange: () => set("stage", stage),
  });
  const total = make("span", { class: "total" });
  const sign = make("span", { class: "sign", "aria-hidden": "true" });
  const words = make("span");
  const verdict = make("span", { class: "verdict" }, sign, " ", words);
  const bar = make("div", { class: "bar" });
  const track = make("div", { class: "track", role: "img" }, bar);
  const box = make("label", { class: "row" },
    make("div", { class: "head" }, radio, make("span", { class: "stage" }, name),
      make("span", { class: "soft what" }, SHARDS[stage]), total, verdict),
    track);

  const update = (state, scale, capacity) => {
    radio.checked = get("stage") === stage;
    total.textContent = gigabytes(state.total);
    verdict.className = `verdict ${state.fits ? "yes" : "no"}`;
    sign.textContent = state.fits ? "✓" : "✗";
    words.textContent = verdictText(state);
    track.style.setProperty("--capacity", `calc(${(100 * capacity) / scale}% - 1px)`);
    track.setAttribute("aria-label",
      NAMES.map((part, i) => `${part} ${gigabytes(state.parts[i])}`).join(", "));
    bar.className = state.total > scale ? "bar torn" : "bar";
    bar.replaceChildren(...segments(state, scale, track.clientWidth, fills));
    box.dataset.bytes = JSON.stringify([...state.parts, state.host]);
    box.dataset.least = state.least;
  };
  return { box, update };
}

function verdictText({ fits, least }) {
  if (fits) return least === 1 ? "fits, even on 1 GPU" : `fits, from ${gpusText(least)} up`;
  return least === Infinity ? "fits on no number of GPUs"
    : `does not fit; ${gpusText(least)} would do`;
}

/** The parts of a bar as far as they show, each with its bytes where there is room. */
function segments({ parts }, scale, width, fills) {
  let left = scale;
  return parts.map((part, i) => {
    const shown = Math.min(part, left);
    left -= shown;
    const text = gigabytes(part);
    const room = (width * shown) / scale > 7.5 * text.length + 8;
    const { bar, text: behind } = fills[NAMES[i]];
    return make("div", { style: `${bar} width: ${(100 * shown) / scale}%` },
      ...(room ? [make("span", { style: behind }, text)] : []));
  });
}

export default { render };
