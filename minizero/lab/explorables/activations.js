// What a transformer keeps for backward, by mode of checkpointing, in 16 bit.
// s b h (34 + 5 a s / h) bytes a layer: Korthikanti et al. 2022, sections 4 and 5.

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
  const whole = 34 * s * b * h + scores;
  const kept = { none: whole, selective: 34 * s * b * h, full: 2 * s * b * h };
  return Object.entries(kept).map(([mode, bytes]) => [mode, layers * bytes, whole - bytes]);
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
    words.textContent = `Attention's scores are ${short(100 * scores / (34 + scores))} % ` +
      `of a layer: selective spares them, and so does a fused kernel, which never keeps ` +
      `them. Full keeps the layers' inputs, ${short(peaks[0] / peaks[2])} times less at ` +
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
