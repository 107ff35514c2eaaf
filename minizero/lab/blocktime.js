// Four bars: forward and backward of one block, at once and overlapped.
// Times are in units of what one parameter needs, so the block's size is nowhere.
const CONTROLS = [
  ["tokens", "tokens a rank", 8, 17, (k) => 2 ** Math.round(k), Math.log2],
  ["bandwidth", "GB/s a rank sends", 0, 3, (k) => +(10 ** k).toPrecision(2), Math.log10],
  ["speed", "TFLOP/s of a rank", 1, 3.3, (k) => +(10 ** k).toPrecision(2), Math.log10],
  ["ranks", "ranks", 1, 10, (k) => 2 ** Math.round(k), Math.log2],
];

export function render({ model, el }) {
  const root = document.createElement("div");
  root.style.cssText = "max-width:40em;font-size:0.95em";
  const rows = document.createElement("div");
  rows.style.cssText =
    "display:grid;grid-template-columns:max-content 1fr 5em;gap:0.3em 0.8em;align-items:center";
  const shown = {};
  for (const [name, label, low, high, from, to] of CONTROLS) {
    const id = `blocktime-${name}-${Math.random().toString(36).slice(2)}`;
    const text = Object.assign(document.createElement("label"), { textContent: label });
    text.htmlFor = id;
    const slider = Object.assign(document.createElement("input"), {
      type: "range", id, min: low, max: high, step: 0.05, value: to(model.get(name)),
    });
    slider.oninput = () => {
      model.set(name, from(+slider.value));
      model.save_changes();
      draw();
    };
    shown[name] = document.createElement("output");
    rows.append(text, slider, shown[name]);
  }
  const bars = document.createElement("div");
  const words = document.createElement("p");
  words.setAttribute("aria-live", "polite");
  root.append(rows, bars, words);
  el.append(root);

  function draw() {
    const [T, W, R, N] = ["tokens", "bandwidth", "speed", "ranks"].map((n) => model.get(n));
    for (const [name] of CONTROLS) shown[name].textContent = model.get(name).toLocaleString("en");
    const compute = (2 * T) / (R * 1e12);
    const move = (2 * (N - 1)) / N / (W * 1e9);
    const colours = model.get("palette");
    const steps = [
      ["at once", [["forward", compute], ["", move], ["backward", 2 * compute], ["", 2 * move]]],
      ["overlap", [["forward", compute], ["", Math.max(0, move - compute)],
        ["backward", 2 * compute], ["", Math.max(0, 2 * move - 2 * compute)]]],
    ];
    const longest = 3 * (compute + move);
    bars.replaceChildren();
    for (const [label, parts] of steps) {
      const line = document.createElement("div");
      line.style.cssText = "display:flex;align-items:center;margin:0.5em 0";
      const name = Object.assign(document.createElement("span"), { textContent: label });
      name.style.cssText = "width:5em;flex:none";
      line.append(name);
      for (const [what, seconds] of parts) {
        const bar = document.createElement("span");
        const fill = what ? colours[what] : `repeating-linear-gradient(135deg,${colours[""]} 0 2px,transparent 2px 7px)`;
        bar.style.cssText = `height:1.6em;width:${(seconds / longest) * 85}%;background:${fill}`;
        bar.title = `${what || "waiting"}: ${((100 * seconds) / longest).toFixed(0)} %`;
        line.append(bar);
      }
      bars.append(line);
    }
    const least = ((R * 1e12) / (W * 1e9)) * ((N - 1) / N);
    const gain = longest / (3 * Math.max(compute, move));
    words.textContent =
      `Green: forward. Purple: backward. Hatched: waiting. Communication hides from ` +
      `${Math.round(least).toLocaleString("en")} tokens a rank on; here overlap makes ` +
      `the block ${gain.toFixed(2)} times as fast.`;
  }
  for (const [name] of CONTROLS) model.on(`change:${name}`, draw);
  draw();
}

export default { render };
