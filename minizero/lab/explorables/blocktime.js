// Forward and backward of one block, at once and overlapped.
// Times are in units of what one parameter needs, so the block's size is nowhere.

const CONTROLS = {
  tokens: ["tokens a rank", [8, 17, TWOS], short],
  bandwidth: ["a rank sends", [0, 3, TENS], (x) => `${short(x)} GB/s`],
  speed: ["speed of a rank", [1, 3.3, TENS], (x) => `${short(x)} TFLOP/s`],
  ranks: ["ranks", [1, 10, TWOS], short],
};

/** Seconds a parameter: of computing forward, and of one gather. */
function times(get) {
  const [tokens, bandwidth, speed, ranks] = Object.keys(CONTROLS).map(get);
  return [2 * tokens / (speed * 1e12), 2 * (ranks - 1) / ranks / (bandwidth * 1e9)];
}

/** Seconds a parameter: forward, waiting, backward, waiting. */
function numbers(get) {
  const [compute, move] = times(get);
  const wait = Math.max(0, move - compute);
  return [["at once", compute, move, 2 * compute, 2 * move],
    ["overlapped", compute, wait, 2 * compute, 2 * wait]];
}

const PARTS = ["forward", "waiting", "backward", "waiting"];

function render({ model, el }) {
  const get = (name) => model.get(name);
  const controls = sliders(model, CONTROLS);
  const whole = () => times(get).reduce((a, b) => a + b) * 3;
  const say = (seconds) => `${Math.round(100 * seconds / whole())} %`;
  const rows = [row(get("palette"), say), row(get("palette"), say)];
  const words = make("p", { class: "words", role: "status" });
  const update = () => {
    controls.update();
    const [compute, move] = times(get);
    numbers(get).forEach(([name, ...seconds], i) => rows[i].update(name,
      PARTS.map((part, j) => [part, seconds[j]]), whole(),
      say(seconds.reduce((a, b) => a + b))));
    const least = get("tokens") * move / compute;
    const gain = (compute + move) / Math.max(compute, move);
    words.textContent = `Communication hides from ${short(Math.round(least))} tokens a ` +
      `rank on. Here overlap makes the block ${gain.toFixed(2)} times as fast.`;
  };
  const chart = make("div", { class: "chart" }, key(get("palette")),
    make("div", { class: "bars" }, ...rows.map(({ box }) => box)), words);
  return mount({ model, el }, {
    title: "Time of a block",
    names: Object.keys(CONTROLS),
    content: [controls.box, chart],
    update,
    table: { head: ["", ...PARTS], rows: () => numbers(get), say },
  });
}

export default { render, numbers };
