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

function render({ model, el }) {
  const get = (name) => model.get(name);
  const controls = sliders(model, CONTROLS);
  const whole = () => times(get).reduce((a, b) => a + b) * 3;
  const say = (seconds) => `${Math.round(100 * seconds / whole())} %`;
  const rows = ["at once", "overlapped"].map((name) => [name, row(get("palette"), say)]);
  const words = make("p", { class: "words", role: "status" });
  const update = () => {
    controls.update();
    const [compute, move] = times(get);
    for (const [name, { update: draw }] of rows) {
      const wait = (moved, computed) =>
        name === "at once" ? moved : Math.max(0, moved - computed);
      const parts = [["forward", compute], ["waiting", wait(move, compute)],
        ["backward", 2 * compute], ["waiting", wait(2 * move, 2 * compute)]];
      const took = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
      draw(name, parts, whole(), say(took));
    }
    const least = get("tokens") * move / compute;
    const gain = (compute + move) / Math.max(compute, move);
    words.textContent = `Communication hides from ${short(Math.round(least))} tokens a ` +
      `rank on. Here overlap makes the block ${gain.toFixed(2)} times as fast.`;
  };
  const chart = make("div", { class: "chart" }, key(get("palette")),
    make("div", { class: "bars" }, ...rows.map(([, { box }]) => box)), words);
  return mount({ model, el }, "Time of a block", Object.keys(CONTROLS), "",
    [controls.box, chart], update);
}

export default { render };
