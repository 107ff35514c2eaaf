// The memory explorer's chart: bytes of states and activations per GPU, for the four stages.
//
// Of states it takes from Python where each rests under a plan (`plans`) and what a
// parameter costs (`costs`); of activations the formula of chapter 9, for a GPT of about
// that size.

const STAGES = ["Data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"];
const SHARDS = [
  "nothing is sharded",
  "shards the optimizer state",
  "shards gradients too",
  "shards everything",
];
const STATES = ["parameters", "gradients", "optimizer"];
const PARTS = [...STATES, "activations", "buffers"];

const CHART_STYLE = `
  .capacity { position: relative; height: 20px; font-size: 13px; }
  .capacity span { position: absolute; transform: translateX(-50%);
    white-space: nowrap; }
  .row { margin: 0 -8px; padding: 5px 8px 10px; cursor: pointer; border-radius: 6px; }
  .row:has(input:checked) { background: color-mix(in srgb, currentColor 7%, transparent); }
  .head { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 8px; }
  .head input { margin: 0; align-self: center; }
  .head .stage { font-weight: 600; }
  .soft { color: color-mix(in srgb, currentColor 78%, transparent); }
  .head .total { margin-left: auto; font-weight: 600; }
  .verdict { min-width: 15.5em; }
  .small .track::after { display: none; }
  .mark { position: absolute; top: -4px; border: 6px solid transparent; border-top: 9px solid
    CanvasText; filter: drop-shadow(0 0 1px Canvas); }
  [hidden] { display: none; }
  .small .capacity span { right: 0; transform: none; }
  .sign { font-weight: 700; }
  .yes .sign { color: light-dark(#14704a, #55d19c); }
  .no .sign { color: light-dark(#b03d12, #ff9a6b); }
  .track { position: relative; height: 24px; margin-top: 4px; display: flex;
    background: color-mix(in srgb, currentColor 7%, transparent); }
  .track::after { content: ""; position: absolute; top: -3px; bottom: -3px;
    left: var(--capacity); width: 2px;
    background: repeating-linear-gradient(CanvasText 0 4px, Canvas 4px 7px);
    forced-color-adjust: none; }
  @media (forced-colors: active) { .track { outline: 1px solid; } }
  .track .bar { overflow: hidden; width: 100%; height: auto; }
  .bar div { overflow: hidden; text-align: center; font-size: 12.5px;
    line-height: 24px; white-space: nowrap; }
  .bar span { padding: 1px 4px; position: relative; z-index: 1; }  /* over the line */
  pre { font-size: 12.5px; overflow-x: auto; user-select: all; }
  @container (max-width: 560px) {
    .what { display: none; }
    .verdict { flex-basis: 100%; }
  }
`;

function gpus(count) {
  return count === 1 ? "1 GPU" : `${count.toLocaleString("en-US")} GPUs`;
}

/** Of each state: its bytes per parameter, whether it is sharded, and where it rests. What a
 *  stage cannot offload stays on the device. */
function states(get, stage) {
  const on = ["offload_optimizer", "offload_param"].map((name) => get(name) ? "cpu" : "none");
  const plan = get("plans")[[stage, ...on].join("/")];
  const cost = get("costs")[`${get("precision")}/${get("optimizer")}`];
  return STATES.map((name) => [cost[name], plan[name][1], plan[name][0] === "device"]);
}

/** Fewest GPUs on which the stage's state fits in `room`; Infinity if it never does. */
function fewest(rows, n, room) {
  const [whole, split] = [false, true].map((which) => n * rows.reduce((sum, [cost, sharded, here]) =>
    sum + (here && sharded === which ? cost : 0), 0));
  if (room <= 0) return Infinity;
  if (whole + split <= room) return 1;
  return whole >= room ? Infinity : Math.ceil(split / (room - whole));
}

/** Bytes at the peak: what all layers keep, and one layer that is recomputed. */
function activations(get) {
  const layers = layersOf(get("n_params"));
  const [length, wide] = [get("sequence"), 128 * layers];
  const all = 32; // bytes for each of s b h, with fused attention
  const kept = { none: all, selective: 22, full: 2 }[get("recomputation")];
  return length * get("micro_batch") * wide * (layers * kept + all - kept)
    * (get("precision") === "bf16" ? 1 : 2);
}

/** Bytes of what is put together at once: two blocks' parameters where they are sharded,
 *  and where gradients are, a block's before and while they are reduced. */
function buffers(get, stage) {
  const [n, size] = [get("n_params"), get("precision") === "bf16" ? 2 : 4];
  return n / layersOf(n) * 2 * size * Math.max(0, stage - 1);
}

/** The bytes that the paper gives for a stage, if this is its example. */
const published = (get, stage) =>
  Object.entries(get("published").setting).every(([name, value]) => get(name) === value)
    ? get("published").bytes[stage] : 0;

/** Bytes of each category and of the host, and whether a stage fits. */
function state(get, stage) {
  const [n, capacity] = [get("n_params"), get("device_memory") * 1e9];
  const rows = states(get, stage);
  const bytes = rows.map(([cost, sharded]) => n * cost / (sharded ? get("world_size") : 1));
  const rest = [activations(get), buffers(get, stage)];
  const parts = [...bytes.map((b, i) => rows[i][2] ? b : 0), ...rest];
  const total = parts.reduce((a, b) => a + b);
  const least = fewest(rows, n, capacity - rest[0] - rest[1]);
  const host = bytes.reduce((sum, b, i) => sum + (rows[i][2] ? 0 : b), 0);
  return { parts, total, least, host, fits: total <= capacity };
}

const HEAD = ["stage", ...PARTS, "on the host"];

/** Bytes of each category a GPU, and on its host, for each stage. */
function numbers(get) {
  return STAGES.map((name, stage) => {
    const { parts, host } = state(get, stage);
    return [name, ...parts, host];
  });
}

function memoryChart(model) {
  const get = (name) => model.get(name);
  const tag = make("span");
  const rows = STAGES.map((name, stage) => stageRow(model, name, stage));
  const note = make("p", { class: "words", role: "status" });
  const text = make("pre");
  const config = make("details", {}, make("summary", {}, "ds_config.json of this plan"), text);
  const box = make("div", { class: "chart" }, key(get("palette")),
    make("div", { class: "capacity" }, tag),
    make("div", { role: "radiogroup", "aria-label": "Stage" }, ...rows.map((r) => r.box)),
    note, config);
  const update = () => {
    const capacity = get("device_memory") * 1e9;
    const all = STAGES.map((_, stage) => state(get, stage));
    const longest = Math.max(...all.map(({ total }) => total));
    // The axis holds the longest bar, so that bars compare; the line of the capacity
    // moves, and lies beyond the right where every bar is far below it.
    const small = longest < capacity / 4;
    const scale = small ? longest * 1.2 : Math.max(longest, capacity * 1.2);
    box.classList.toggle("small", small);
    tag.style.left = small ? "" : `${(100 * capacity) / scale}%`;
    tag.textContent = `${get("device_memory")} GB${small ? " →" : ""}`;
    rows.forEach((row, stage) => row.update(all[stage], scale, capacity));
    text.textContent = JSON.stringify(configOf(get), null, 2);
    note.textContent = sentence(get, all[get("stage")]);
  };
  return { box, update };
}

/** The selected stage in words. */
function sentence(get, { parts, total, host, fits, least }) {
  const held = PARTS.map((name, i) => `${name} ${amount(parts[i])}`).join(", ");
  const off = host > 0 ? ` On the host, per GPU: ${amount(host)}.` : "";
  const need = least === Infinity ? "It fits on no number of GPUs."
    : `The fewest GPUs on which it fits: ${least.toLocaleString("en-US")}.`;
  return `${STAGES[get("stage")]} on ${gpus(get("world_size"))}: ${amount(total)} on ` +
    `each (${held}), which ${fits ? "fits" : "does not fit"} in ` +
    `${get("device_memory")} GB.${off} ${need} The logits come on top: 12 bytes for each token and ` +
    `word of the vocabulary.${published(get, 0) ? " The ZeRO paper (Rajbhandari et al. 2020, " +
      "Fig. 1) gives parameters, gradients and optimizer state alone, as the marks: activations " +
      "and buffers are what training needs beyond them." : ""}`;
}

/** The chosen plan as DeepSpeed's config. */
function configOf(get) {
  const [stage, moving] = [get("stage"), get("optimizer") === "momentum"];
  const adam = get("optimizer") === "adam";
  const zero = { stage };
  if (get("offload_optimizer") && stage >= 1) zero.offload_optimizer = { device: "cpu" };
  if (get("offload_param") && stage >= 3) zero.offload_param = { device: "cpu" };
  return {
    train_micro_batch_size_per_gpu: get("micro_batch"),
    bf16: { enabled: get("precision") === "bf16" },
    optimizer: { type: adam ? "AdamW" : "SGD",
      params: { lr: 0.0003, ...(moving ? { momentum: 0.9 } : {}) } },
    zero_optimization: zero,
  };
}

function stageRow(model, name, stage) {
  const radio = make("input", {
    type: "radio", name: "stage", onchange: () => put(model, "stage", stage),
  });
  const total = make("span", { class: "total" });
  const sign = make("span", { class: "sign", "aria-hidden": "true" });
  const words = make("span");
  const verdict = make("span", { class: "verdict" }, sign, " ", words);
  const bar = make("div", { class: "bar" });
  const mark = make("span", { class: "mark" });
  const paper = make("span", { class: "soft" });
  const what = make("span", { class: "soft what" }, SHARDS[stage]);
  const track = make("div", { class: "track", role: "img" }, bar, mark);
  const box = make("label", { class: "row" },
    make("div", { class: "head" }, radio, make("span", { class: "stage" }, name),
      what, paper, total, verdict),
    track);
  const update = (state, scale, capacity) => {
    radio.checked = model.get("stage") === stage;
    total.textContent = amount(state.total);
    verdict.className = `verdict ${state.fits ? "yes" : "no"}`;
    sign.textContent = state.fits ? "✓" : "✗";
    words.textContent = judgement(state);
    const said = published((name) => model.get(name), stage);
    mark.hidden = paper.hidden = !said;
    what.hidden = said > 0;
    mark.style.left = `calc(${(100 * said) / scale}% - 6px)`;
    paper.textContent = said ? `▾ the paper: ${amount(said)}` : "";
    track.style.setProperty("--capacity", `calc(${(100 * capacity) / scale}% - 1px)`);
    track.setAttribute("aria-label",
      PARTS.map((part, i) => `${part} ${amount(state.parts[i])}`).join(", "));
    bar.replaceChildren(...segments(state, scale, track.clientWidth, model.get("palette")));
    box.dataset.bytes = JSON.stringify([...state.parts, state.host]);
    box.dataset.least = state.least;
  };
  return { box, update };
}

function judgement({ fits, least }) {
  if (fits) return least === 1 ? "fits, even on 1 GPU" : `fits, from ${gpus(least)} up`;
  return least === Infinity ? "fits on no number of GPUs"
    : `does not fit; ${gpus(least)} would do`;
}

/** The parts of a bar as far as they show, each with its bytes where there is room. */
function segments({ parts }, scale, width, palette) {
  let left = scale;
  return parts.map((part, i) => {
    const shown = Math.min(part, left);
    left -= shown;
    const text = amount(part);
    const room = (width * shown) / scale > 7.5 * text.length + 8;
    const look = palette[PARTS[i]];
    const style = `background: ${fill(look)}; color: ${look.ink}; ` +
      `width: ${(100 * shown) / scale}%`;
    // Without stripes behind the digits.
    const behind = { style: `background: ${look.colour}` };
    return make("div", { style }, ...(room ? [make("span", behind, text)] : []));
  });
}
