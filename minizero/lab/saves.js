// How often to save: time lost at five intervals around the best one.
const CONTROLS = [
  ["n_params", "parameters", 8, 13, (k) => +(10 ** k).toPrecision(2), Math.log10],
  ["bandwidth", "GB/s written, all nodes", -1, 4, (k) => +(10 ** k).toPrecision(2), Math.log10],
  ["nodes", "nodes", 0, 14, (k) => Math.round(2 ** k), Math.log2],
  ["node_days", "days between failures of a node", 0, 4, (k) => +(10 ** k).toPrecision(2), Math.log10],
];
const FACTORS = [0.25, 0.5, 1, 2, 4];

function duration(seconds) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${+(seconds / size).toPrecision(3)} ${unit}`;
  }
  return `${+seconds.toPrecision(3)} s`;
}

function lost(interval, save, between) {
  const passed = between * Math.expm1(Math.min(700, (interval + save) / between));
  return 1 - interval / passed;
}

function shown(name, value) {
  if (name === "n_params") {
    return value >= 1e12 ? `${value / 1e12}T` : `${+(value / 1e9).toPrecision(2)}B`;
  }
  return value.toLocaleString("en");
}

export function render({ model, el }) {
  const root = document.createElement("div");
  root.style.cssText = "max-width:40em;font-size:0.95em";
  const rows = document.createElement("div");
  rows.style.cssText =
    "display:grid;grid-template-columns:max-content 1fr 5em;gap:0.3em 0.8em;align-items:center";
  const outputs = {}, sliders = {};
  for (const [name, label, low, high, from, to] of CONTROLS) {
    const id = `saves-${name}-${Math.random().toString(36).slice(2)}`;
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
    sliders[name] = [slider, to];
    outputs[name] = document.createElement("output");
    rows.append(text, slider, outputs[name]);
  }
  const words = document.createElement("p");
  words.setAttribute("aria-live", "polite");
  const bars = document.createElement("div");
  const legend = document.createElement("p");
  root.append(rows, words, bars, legend);
  el.append(root);

  function draw() {
    for (const [name] of CONTROLS) {
      outputs[name].textContent = shown(name, model.get(name));
      const [slider, to] = sliders[name];
      if (document.activeElement !== slider) slider.value = to(model.get(name));
    }
    const save = (12 * model.get("n_params")) / (model.get("bandwidth") * 1e9);
    const between = (model.get("node_days") * 86400) / model.get("nodes");
    const best = Math.sqrt(2 * save * between);
    const colours = model.get("palette");
    words.textContent =
      `A save takes ${duration(save)}, a failure comes every ${duration(between)}: ` +
      `save every ${duration(best)}, and ${(100 * lost(best, save, between)).toFixed(1)} % ` +
      `of the time is lost.`;
    const longest = Math.max(...FACTORS.map((f) => lost(f * best, save, between)));
    bars.replaceChildren();
    for (const factor of FACTORS) {
      const interval = factor * best;
      const all = lost(interval, save, between);
      const saves = Math.min(all, save / (interval + save));
      const line = document.createElement("div");
      line.style.cssText = "display:flex;align-items:center;margin:0.35em 0";
      const name = document.createElement("span");
      name.textContent = `every ${duration(interval)}`;
      name.style.cssText = `width:9em;flex:none;font-weight:${factor === 1 ? 700 : 400}`;
      line.append(name);
      for (const [what, share] of [["saves", saves], ["again", all - saves]]) {
        const bar = document.createElement("span");
        bar.style.cssText =
          `height:1.4em;width:${(share / longest) * 55}%;background:${colours[what]}`;
        line.append(bar);
      }
      const percent = document.createElement("span");
      percent.textContent = `${(100 * all).toFixed(1)} %`;
      percent.style.cssText = "margin-left:0.6em;flex:none";
      line.append(percent);
      bars.append(line);
    }
    legend.replaceChildren();
    for (const [what, text] of [["saves", "saves"], ["again", "steps made again"]]) {
      const key = document.createElement("span");
      key.style.cssText =
        `display:inline-block;width:1em;height:1em;margin:0 0.4em 0 0;vertical-align:-0.1em;background:${colours[what]}`;
      const label = document.createElement("span");
      label.textContent = text;
      label.style.marginRight = "1.5em";
      legend.append(key, label);
    }
  }
  for (const [name] of CONTROLS) model.on(`change:${name}`, draw);
  draw();
}

export default { render };
