// A ds_config, and the bytes that a rank keeps under it on device, host and disk.
//
// What a config means comes from Python: where each category rests for each stage and
// offload (`plans`), what a parameter costs (`costs`), which keys there are (`known`).
// The page divides what is sharded by the ranks, and no more.

const PLACES = { device: "device", cpu: "host", nvme: "disk" };
const STATES = ["parameters", "gradients", "optimizer"];
const ON = { none: "device", cpu: "host", nvme: "disk" };
const CONTROLS = {
  n_params: ["model", [8, 12, FINE], (n) => `${billions(n)} parameters`],
  world_size: ["on", [0, 10, TWOS], (n) => n === 1 ? "1 rank" : `${short(n)} ranks`],
};

const STYLE = `
  .sides { display: grid; grid-template-columns: 1fr 1fr; gap: 14px 24px; }
  @container (max-width: 520px) { .sides { grid-template-columns: 1fr; } }
  .choices { display: grid; grid-template-columns: 1fr 1fr; gap: 10px 14px;
    margin-bottom: 14px; }
  textarea, select { width: 100%; }
  textarea { font-family: ui-monospace, monospace; font-size: 12.5px; min-height: 265px;
    white-space: pre; overflow: auto; display: block; }
  .chart.old .bar { opacity: 0.4; }
  ul { margin: 10px 0 0; padding-left: 1.2em; }
  li { overflow-wrap: anywhere; }
  li.wrong { font-weight: 600; }
  .keyed .bar div { opacity: 0.25; }
  .keyed .bar .glow { opacity: 1; outline: 3px solid CanvasText; outline-offset: -3px; }
  .words { min-height: 1lh; }
`;

const isObject = (x) => x !== null && typeof x === "object" && !Array.isArray(x);
const isCount = (x) => Number.isInteger(x) && x > 0;

/** The config of a text; an error if it is none. */
function parse(text) {
  const config = JSON.parse(text);
  if (!isObject(config)) throw new Error("a config is an object in braces");
  return config;
}

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
function batch(config, names, ranks) {
  const [totalName, microName] = names;
  let [total, micro, steps] = names.map((name) => config[name] ?? null);
  const bad = names.find((name) => (config[name] ?? null) !== null && !isCount(config[name]));
  if (bad) return [false, `${bad} must be a whole number, at least 1`];
  if (total === null && micro === null)
    return [false, `the size of a batch is not known: give ${totalName} or ${microName}`];
  if (total === null) total = micro * (steps ??= 1) * ranks;
  else if (micro === null) micro = total / (steps ??= 1) / ranks;
  else steps ??= total / micro / ranks;
  const product = `${micro} * ${steps} * ${ranks}`;
  if (!isCount(micro) || !isCount(steps) || micro * steps * ranks !== total)
    return [false, `${totalName} = ${total} does not divide: micro-batch * accumulation * ` +
      `ranks would be ${product}`];
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

/** Where each category rests under what was chosen. */
function planOf(plans, { stage, offload_optimizer, offload_param }) {
  const plan = plans[`${stage}/${offload_optimizer}/${offload_param}`];
  if (!plan || typeof stage !== "number")
    throw new Error("stage is 0 to 3, and a device none, cpu or nvme");
  return plan;
}

const zeroOf = (config) => (config.zero_optimization ??= {});

/** How a select changes the config, by its name. */
const EDITS = {
  stage: (config, value) => { zeroOf(config).stage = value; },
  precision: (config, value) => {
    delete config.fp16;
    delete config.bf16;
    if (value !== "fp32") config[value] = { enabled: true };
  },
  offload_optimizer: (config, on) => offload(zeroOf(config), "offload_optimizer", on),
  offload_param: (config, on) => offload(zeroOf(config), "offload_param", on),
};

function offload(zero, block, on) {
  zero[block] = { ...(isObject(zero[block]) ? zero[block] : {}), device: on };
  if (on === "nvme") zero[block].nvme_path ??= "files";
  else delete zero[block].nvme_path;
}

/** Selects that change the text by changing what it means. */
function selects(model, refused) {
  const edit = (name, value) => {
    try {
      const config = parse(model.get("text"));
      EDITS[name](config, value);
      put(model, "text", JSON.stringify(config, null, 2));
    } catch {
      refused();
    }
  };
  const same = (names) => names.map((name) => [name, String(name)]);
  const all = Object.entries({
    stage: ["Stage", same([0, 1, 2, 3])],
    precision: ["Precision", same(["fp32", "bf16", "fp16"])],
    offload_optimizer: ["Optimizer on", Object.entries(ON)],
    offload_param: ["Parameters on", Object.entries(ON)],
  }).map(([name, [title, options]]) => {
    const { box, show } = choice(title, options, (value) => edit(name, value));
    return [name, box, show];
  });
  const box = make("div", { class: "choices" }, ...all.map(([, label]) => label));
  const show = (chosen) => all.forEach(([name, , one]) => one(chosen[name]));
  return { box, show };
}

/** Bytes of each category that a rank keeps in each place. */
function numbers(get) {
  const chosen = choices(parse(get("text")));
  const plan = planOf(get("plans"), chosen);
  const cost = get("costs")[`${chosen.precision}/${chosen.optimizer}`];
  const bytes = (name) =>
    (get("n_params") / (plan[name][1] ? get("world_size") : 1)) * cost[name];
  return Object.entries(PLACES).map(([place, title]) =>
    [title, ...STATES.map((name) => plan[name][0] === place ? bytes(name) : 0)]);
}

/** The path of the key that stands first in a line of the text; null if there is none. */
function keyAt(text, line) {
  let [at, last] = [0, ""];
  const above = [];
  for (const [found, key] of text.matchAll(/"([^"]*)"\s*:|[{}\n]/g)) {
    if (found === "\n" && at++ === line) return null;
    if (found === "{") above.push(last);
    else if (found === "}") above.pop();
    else if (key) {
      last = key;
      if (at === line) return [...above.slice(1), key];
    }
  }
  return null;
}

/** The bytes that would be others without a key: "place/category". */
function decided(get, path) {
  const config = parse(get("text"));
  const last = path.at(-1);
  delete path.slice(0, -1).reduce((part, name) => part[name], config)[last];
  const without = numbers((name) => name === "text" ? JSON.stringify(config) : get(name));
  return numbers(get).flatMap(([place, ...bytes], i) => STATES.filter((_, j) =>
    bytes[j] && bytes[j] !== without[i][j + 1]).map((state) => `${place}/${state}`));
}

/** A bar for each place, in proportion to the fullest. */
function places(palette) {
  const rows = Object.keys(PLACES).map(() => row(palette, amount));
  Object.keys(PLACES).forEach((place, i) => { rows[i].box.dataset.place = place; });
  const box = make("div", { class: "chart" }, key(palette),
    make("div", { class: "bars" }, ...rows.map((one) => one.box)));
  const update = (all) => {
    const totals = all.map(([, ...bytes]) => bytes.reduce((a, b) => a + b));
    all.forEach(([title, ...bytes], i) => rows[i].update(title,
      STATES.map((name, j) => [name, bytes[j]]), Math.max(...totals), amount(totals[i])));
  };
  /** Make the bars of these bytes stand out; of none, all are as they were. */
  const glow = (names) => {
    box.classList.toggle("keyed", names.length > 0);
    Object.values(PLACES).forEach((place, i) => {
      const there = JSON.parse(rows[i].box.dataset.parts).filter(([, bytes]) => bytes);
      [...rows[i].box.querySelectorAll(".bar div")].forEach((one, j) =>
        one.classList.toggle("glow", names.includes(`${place}/${there[j][0]}`)));
    });
  };
  return { box, update, glow };
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const sizes = sliders(model, CONTROLS);
  const area = make("textarea", { spellcheck: "false", "aria-label": "The config, as JSON",
    oninput: () => put(model, "text", area.value) });
  const hint = "Point at a key, or put the cursor on it, to see which bytes it decides.";
  const words = make("p", { class: "words", role: "status" }, hint);
  const lineAt = ({ offsetY }) => Math.floor((offsetY - 3 + area.scrollTop)
    / parseFloat(getComputedStyle(area).lineHeight));
  const caret = () => area.value.slice(0, area.selectionStart).split("\n").length - 1;
  const explain = (line) => {
    let [path, names] = [keyAt(area.value, line), []];
    try {
      names = path ? decided(get, path) : [];
    } catch { path = null; }
    chart.glow(names);
    words.textContent = !path ? hint : `${path.join(".")} decides ${names.length
      ? `these bytes: ${names.join(", ")}` : "no bytes here"}.`;
  };
  area.addEventListener("pointermove", (event) => explain(lineAt(event)));
  area.addEventListener("pointerleave", () => explain(-1));
  for (const kind of ["click", "keyup"]) area.addEventListener(kind, () => explain(caret()));
  const controls = selects(model, () => update());
  const chart = places(get("palette"));
  const said = make("ul");
  const say = (sentences) => said.replaceChildren(...sentences.map(([fine, text]) =>
    make("li", fine ? {} : { class: "wrong" }, text)));
  const judge = (fine) => {
    area.setAttribute("aria-invalid", String(!fine));
    chart.box.classList.toggle("old", !fine);
  };
  const draw = (config) => {
    const chosen = choices(config);
    const plan = planOf(get("plans"), chosen);
    controls.show(chosen);
    chart.update(numbers(get));
    say([
      batch(config, get("sizes"), get("world_size")),
      ...strangers(config, get("known")).map((text) => [false, text]),
      ...Object.entries(plan.idle).map(([block, why]) =>
        [false, `zero_optimization.${block} has no effect: ${why}`]),
    ]);
  };
  const update = () => {
    sizes.update();
    if (area.value !== get("text")) area.value = get("text");
    try {
      draw(parse(get("text")));
      judge(true);
    } catch (error) {
      judge(false);
      say([[false, `The config cannot be read: ${error.message}.`]]);
    }
  };
  const sides = make("div", { class: "controls sides" },
    make("label", {}, make("span", { class: "name" }, "ds_config.json"), area),
    make("div", {}, controls.box, sizes.box));
  const rows = () => area.getAttribute("aria-invalid") === "true" ? [] : numbers(get);
  return mount({ model, el }, {
    title: "A config and its bytes",
    names: ["text", ...Object.keys(CONTROLS)],
    style: STYLE,
    content: [sides, words, chart.box, make("div", { role: "status" }, said)],
    update,
    table: { head: ["place", ...STATES], rows, say: amount },
  });
}

export default { render, numbers };
