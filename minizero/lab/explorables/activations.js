// What a transformer keeps for backward, by mode of checkpointing, in 16 bit.
// 32 s b h bytes a layer with fused attention, and 5 a s s b of scores without.

const CONTROLS = {
  layers: ["layers", [0, 8, TWOS], short],
  hidden: ["hidden size", [8, 16, TWOS], short],
  heads: ["heads", [0, 8, TWOS], short],
  sequence: ["tokens of a sequence", [7, 17, TWOS], short],
  micro_batch: ["sequences of a micro-batch", [0, 8, TWOS], short],
};
const HEAD = ["checkpointing", "kept by all layers", "one layer, computed again"];

/** By mode: bytes of what all layers keep, and of what one makes again. */
function numbers(get) {
  const [layers, h, a, s, b] = Object.keys(CONTROLS).map(get);
  const scores = 5 * a * s * s * b;
  const sbh = s * b * h;
  const kept = { none: 32 * sbh, selective: 22 * sbh, full: 2 * sbh };
  const modes = Object.entries(kept).map(
    ([mode, bytes]) => [mode, layers * bytes, kept.none - bytes]);
  return [["none, scores kept", layers * (kept.none + scores), 0], ...modes];
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const controls = sliders(model, CONTROLS);
  const rows = numbers(get).map(() => row(get("palette"), amount));
  const words = make("p", { class: "words", role: "status" });
  const update = () => {
    controls.update();
    const all = numbers(get);
    const peaks = all.map(([, kept, again]) => kept + again);
    all.forEach(([mode, kept, again], i) => rows[i].update(mode,
      [[HEAD[1], kept], [HEAD[2], again]], Math.max(...peaks), amount(peaks[i])));
    const scores = 5 * get("heads") * get("sequence") / get("hidden");
    words.textContent = `The scores of attention would be ` +
      `${short(100 * scores / (32 + scores))} % of a layer; a fused kernel never keeps ` +
      `them. Full keeps the layers' inputs, ${short(peaks[1] / peaks[3])} times less at ` +
      `the peak.`;
  };
  const chart = make("div", { class: "chart" }, key(get("palette")),
    make("div", { class: "bars" }, ...rows.map(({ box }) => box)), words);
  return mount({ model, el }, {
    title: "Activations by mode of checkpointing",
    names: Object.keys(CONTROLS),
    content: [controls.box, chart],
    update,
    table: { head: HEAD, rows: () => numbers(get), say: amount },
  });
}

export default { render, numbers };
