// A ds_config, and the bytes that a rank keeps under it on device, host and disk.
//
// What a config means comes from Python: where each category rests for each stage and
// offload (`plans`), what a parameter costs (`costs`), which keys there are (`known`).
// The page divides what is sharded by the ranks, and no more.

const PLACES = { device: "device", cpu: "host", nvme: "disk" };
const NAMES = ["parameters", "gradients", "optimizer"];
const ON = { none: "device", cpu: "host", nvme: "disk" };

const STYLE = `
  :host { all: initial; display: block; container-type: inline-size;
    color-scheme: inherit; color: inherit; font: inherit; }
  * { box-sizing: border-box; }
  .box { font-size: 14px; line-height: 1.45; padding: 14px 16px;
    border: 1px solid color-mix(in srgb, currentColor 28%, transparent);
    border-radius: 8px; }
  .sides { display: grid; grid-template-columns: 1fr 1fr; gap: 14px 24px; }
  @container (max-width: 520px) { .sides { grid-template-columns: 1fr; } }
  label { display: block; font-weight: 600; }
  .choices { display: grid; grid-template-columns: 1fr 1fr; gap: 10px 14px; }
  .choices .wide { grid-column: 1 / -1; }
  textarea, select { font: inherit; color: inherit; font-weight: 400; width: 100%;
    background: color-mix(in srgb, currentColor 6%, transparent); padding: 4px 8px;
    border: 1px solid color-mix(in srgb, currentColor 45%, transparent);
    border-radius: 5px; margin-top: 3px; }
  textarea { font-family: ui-monospace, monospace; font-size: 12.5px; min-height: 265px;
    white-space: pre; overflow: auto; display: block; }
  [aria-invalid="true"] { border: 2px solid #cf5a2b; }
  option { background: Canvas; color: CanvasText; }
  input { display: block; width: 100%; accent-color: #2f86c8; margin: 6px 0; }
  :focus-visible { outline: 2px solid #2f86c8; outline-offset: 2px; }
  .chart { margin-top: 14px; padding-top: 12px;
    border-top: 1px solid color-mix(in srgb, currentColor 18%, transparent); }
  .chart.old { opacity: 0.4; }
  .key { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-bottom: 6px; }
  .swatch { display: inline-block; width: 14px; height: 14px; margin-right: 6px;
    vertical-align: -2px; }
  .row { display: grid; grid-template-columns: 4em 1fr 6em; align-items: center;
    gap: 8px; margin: 5px 0; }
  .bar { display: flex; height: 22px; }
  .total { text-align: right; font-weight: 600; font-variant-numeric: tabular-nums; }
  ul { margin: 10px 0 0; padding-left: 1.2em; }
  li.wrong { font-weight: 600; }
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

/** Bytes in decimal units and four digits at most, as Python's `amount`. */
function amount(bytes) {
  const units = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]];
  const [unit, size] = units.find(([, s]) => bytes >= s) ?? ["B", 1];
  const digits = Math.max(0, 4 - String(Math.trunc(bytes / size)).length);
  const shown = (bytes / size).toLocaleString("en-US",
    { maximumFractionDigits: Math.min(digits, 2) });
  return `${shown} ${unit}`;
}

const isObject = (x) => x !== null && typeof x === "object" && !Array.isArray(x);
const whole = (x) => Number.isInteger(x) && x > 0;

/** Sentences on keys that there are not, in every section that is an object. */
function strangers(config, keys, place = "") {
  return Object.entries(config).flatMap(([name, value]) => {
    if (!keys[place].includes(name))
      return [`${place || "the config"} has no key "${name}"`];
    const where = place ? `${place}.${name}` : name;
    return isObject(value) && where in keys ? strangers(value, keys, where) : [];
  });
}

/** The three sizes in a sentence, and whether they fit. */
function batch(config, [totalName, microName, stepsName], ranks) {
  let [total, micro, steps] = [totalName, microName, stepsName].map((n) => config[n] ?? null);
  for (const [name, size] of [[totalName, total], [microName, micro], [stepsName, steps]])
    if (size !== null && !whole(size)) return [false, `${name} must be a whole number, at least 1`];
  if (total === null && micro === null)
    return [false, `the size of a batch is not known: give ${totalName} or ${microName}`];
  if (total === null) total = micro * (steps ??= 1) * ranks;
  else if (micro === null) micro = total / (steps ??= 1) / ranks;
  else steps ??= total / micro / ranks;
  const product = `${micro} * ${steps} * ${ranks}`;
  if (!whole(micro) || !whole(steps) || micro * steps * ranks !== total)
    return [false, `${totalName} = ${total} does not divide: micro-batch * accumulation * ` +
      `ranks would be ${micro} * ${steps} * ${ranks}`];
  return [true, `A step takes ${total} samples: ${product} (micro-batch * accumulation * ranks).`];
}

/** What the memory depends on, of a config that was parsed. */
function choices(config) {
  const zero = isObject(config.zero_optimization) ? config.zero_optimization : {};
  const place = (block) => String(zero[block]?.device ?? "none").toLowerCase();
  const half = ["fp16", "bf16"].find((name) => config[name]?.enabled === true);
  const sgd = String(config.optimizer?.type ?? "").toLowerCase() === "sgd";
  const moving = (config.optimizer?.params?.momentum ?? 0) > 0;
  return {
    stage: zero.stage ?? 0,
    offload_optimizer: place("offload_optimizer"),
    offload_param: place("offload_param"),
    precision: half ?? "fp32",
    optimizer: sgd ? (moving ? "momentum" : "sgd") : "adam",
  };
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const set = (name, value) => {
    model.set(name, value);
    model.save_changes();
  };
  const parse = () => {
    const config = JSON.parse(get("text"));
    if (!isObject(config)) throw new Error("a config is an object in braces");
    return config;
  };
  /** Change the text by changing what it means. */
  const edit = (change) => {
    try {
      const config = parse();
      change(config);
      set("text", JSON.stringify(config, null, 2));
    } catch {
      update();
    }
  };
  const zeroOf = (config) => (config.zero_optimization ??= {});
  const select = (title, options, change) => {
    const input = make("select", { onchange: () => edit((c) => change(c, input.value)) },
      ...options.map(([value, text]) => make("option", { value }, text)));
    return { input, label: make("label", {}, title, input) };
  };
  const places = Object.entries(ON);
  const offload = (block) => (config, on) => {
    const old = zeroOf(config)[block];
    zeroOf(config)[block] = { ...(isObject(old) ? old : {}), device: on };
    if (on === "nvme") zeroOf(config)[block].nvme_path ??= "files";
    else delete zeroOf(config)[block].nvme_path;
  };
  const controls = {
    stage: select("Stage", [0, 1, 2, 3].map((s) => [s, String(s)]),
      (config, value) => { zeroOf(config).stage = Number(value); }),
    precision: select("Precision", ["fp32", "bf16", "fp16"].map((p) => [p, p]),
      (config, value) => {
        delete config.fp16;
        delete config.bf16;
        if (value !== "fp32") config[value] = { enabled: true };
      }),
    offload_optimizer: select("Optimizer on", places, offload("offload_optimizer")),
    offload_param: select("Parameters on", places, offload("offload_param")),
  };
  const area = make("textarea", { spellcheck: "false", "aria-label": "The config, as JSON",
    oninput: () => set("text", area.value) });
  const slider = (min, max, step, name, from) => {
    const input = make("input", { type: "range", min, max, step,
      oninput: () => set(name, from(input.value)) });
    const shown = make("span");
    return { input, shown, label: make("label", { class: "wide" }, shown, input) };
  };
  const size = slider(8, 12, 0.01, "n_params", (x) => Number((10 ** x).toPrecision(3)));
  const ranks = slider(0, 10, 1, "world_size", (x) => 2 ** x);
  const stripe = "color-mix(in srgb, black 32%, transparent)";
  const fills = Object.fromEntries(NAMES.map((name) => {
    const { colour, striped } = get("palette")[name];
    const stripes = `repeating-linear-gradient(135deg, ${stripe} 0 1px, transparent 1px 7px), `;
    return [name, `background: ${striped ? stripes : ""}${colour};`];
  }));
  const rows = Object.fromEntries(Object.entries(PLACES).map(([place, title]) => {
    const bar = make("div", { class: "bar", role: "img" });
    const total = make("span", { class: "total" });
    const box = make("div", { class: "row", "data-place": place },
      make("span", {}, title), bar, total);
    return [place, { box, bar, total }];
  }));
  const chart = make("div", { class: "chart" },
    make("div", { class: "key" }, ...NAMES.map((name) => make("span", {},
      make("span", { class: "swatch", style: fills[name] }), name))),
    ...Object.values(rows).map((row) => row.box));
  const said = make("ul", { role: "status" });
  const host = make("div", { class: "config-explorer" });
  const root = host.attachShadow({ mode: "open" });
  root.append(make("style", {}, STYLE),
    make("div", { class: "box", role: "group", "aria-label": "Config explorer" },
      make("div", { class: "sides" },
        make("label", {}, "ds_config.json", area),
        make("div", { class: "choices" }, ...Object.values(controls).map((c) => c.label),
          size.label, ranks.label)),
      chart, said));
  const theme = document.body.dataset.jpThemeLight;
  if (theme) host.style.colorScheme = theme === "false" ? "dark" : "light";
  el.append(host);

  const say = (sentences) => said.replaceChildren(...sentences.map(([fine, text]) =>
    make("li", fine ? {} : { class: "wrong" }, text)));

  const update = () => {
    const [n, N] = [get("n_params"), get("world_size")];
    size.input.value = Math.log10(n);
    size.shown.textContent = `${Number((n / 1e9).toPrecision(3))}B parameters`;
    ranks.input.value = Math.log2(N);
    ranks.shown.textContent = N === 1 ? "1 rank" : `${N} ranks`;
    if (area.value !== get("text")) area.value = get("text");
    let config, chosen, plan;
    try {
      config = parse();
      chosen = choices(config);
      plan = get("plans")[`${chosen.stage}/${chosen.offload_optimizer}/${chosen.offload_param}`];
      if (!plan || typeof chosen.stage !== "number") throw new Error("stage is 0 to 3, and a device none, cpu or nvme");
    } catch (error) {
      area.setAttribute("aria-invalid", "true");
      chart.classList.add("old");
      say([[false, `The config cannot be read: ${error.message}.`]]);
      return;
    }
    area.setAttribute("aria-invalid", "false");
    chart.classList.remove("old");
    for (const [name, { input }] of Object.entries(controls)) input.value = chosen[name];
    const cost = get("costs")[`${chosen.precision}/${chosen.optimizer}`];
    const parts = Object.fromEntries(Object.keys(PLACES).map((place) => [place, {}]));
    for (const name of NAMES) {
      const [place, sharded] = plan[name];
      parts[place][name] = (n / (sharded ? N : 1)) * cost[name];
    }
    const sum = (part) => Object.values(part).reduce((a, b) => a + b, 0);
    const longest = Math.max(...Object.values(parts).map(sum));
    for (const [place, { box, bar, total }] of Object.entries(rows)) {
      const held = Object.entries(parts[place]);
      bar.replaceChildren(...held.map(([name, b]) => make("div",
        { style: `${fills[name]} width: ${(100 * b) / longest}%`, title: `${name} ${amount(b)}` })));
      const words = held.map(([name, b]) => `${name} ${amount(b)}`).join(", ");
      bar.setAttribute("aria-label", words || "nothing");
      box.dataset.bytes = JSON.stringify(NAMES.map((name) => parts[place][name] ?? 0));
      total.textContent = amount(sum(parts[place]));
    }
    say([
      batch(config, get("sizes"), N),
      ...strangers(config, get("known")).map((text) => [false, text]),
      ...Object.entries(plan.idle).map(([block, why]) =>
        [false, `zero_optimization.${block} has no effect: ${why}`]),
    ]);
  };
  const names = "change:text change:n_params change:world_size";
  model.on(names, update);
  update();
  return () => model.off(names, update);
}

export default { render };
