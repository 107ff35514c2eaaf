// One unit in one step of ZeRO-3, in bf16: computing, and what is sent for it.

const CONTROLS = {
  tokens: ["tokens of a micro-batch", [8, 18, TWOS], short],
  bandwidth: ["bandwidth of a rank", [0, 3, TENS], (x) => `${short(x)} GB/s`],
  latency: ["latency of a call", [0, 3, TENS], (x) => `${short(x)} µs`],
  unit: ["parameters of the unit", [-1, 3.5, TENS], (x) => `${short(x)} million`],
  compute: ["speed of a rank", [1, 3.2, TENS], (x) => `${short(x)} TFLOP/s`],
};

/** Seconds: of computing the unit, and of what ZeRO-2 and ZeRO-3 send for it. */
function times(get) {
  const n = get("unit") * 1e6;
  const call = 2 * n / (get("bandwidth") * 1e9) + get("latency") / 1e6;
  return [6 * n * get("tokens") / (get("compute") * 1e12), 2 * call, 3 * call];
}

const numbers = (get) => {
  const seconds = times(get);
  return Object.keys(get("palette")).map((name, i) => [name, seconds[i]]);
};

function render({ model, el }) {
  const get = (name) => model.get(name);
  const controls = sliders(model, CONTROLS);
  const palette = get("palette");
  const say = (seconds) => `${short(1e3 * seconds)} ms`;
  const percent = (share) => `${Math.round(100 * share)} %`;
  const rows = Object.keys(palette).map((name) => [name, row(palette, say)]);
  const words = make("p", { class: "words", role: "status" });
  const update = () => {
    controls.update();
    const all = times(get);
    rows.forEach(([name, { update: draw }], i) =>
      draw(name, [[name, all[i]]], Math.max(...all), say(all[i])));
    const [work, ...sent] = all;
    const [apart2, apart3] = sent.map((t) => percent(t / (t + work)));
    const [hidden2, hidden3] = sent.map((t) => percent(Math.max(0, 1 - work / t)));
    words.textContent = `Waiting, one after the other: ZeRO-2 ${apart2} of the step, ` +
      `ZeRO-3 ${apart3}. Overlapped as well as can be: ${hidden2} and ${hidden3}.`;
  };
  const chart = make("div", { class: "chart" },
    make("div", { class: "bars" }, ...rows.map(([, { box }]) => box)), words);
  return mount({ model, el }, {
    title: "Cost of a step",
    names: Object.keys(CONTROLS),
    content: [controls.box, chart],
    update,
    table: { head: ["what", "time"], rows: () => numbers(get), say },
  });
}

export default { render, numbers };
