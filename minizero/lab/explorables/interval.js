// How often to save: time lost at five intervals around the best one.

const CONTROLS = {
  n_params: ["parameters", [8, 13, TENS], billions],
  bandwidth: ["all nodes write", [-1, 4, TENS], (x) => `${short(x)} GB/s`],
  nodes: ["nodes", [0, 14, TWOS], short],
  node_days: ["between failures of a node", [0, 4, TENS], (x) => `${short(x)} d`],
};
const FACTORS = [0.25, 0.5, 1, 2, 4];

/** Seconds in words, as Python's `duration`. */
const duration = (seconds) =>
  scaled(seconds, [[" d", 86400], [" h", 3600], [" min", 60], [" s", 1]]);

/** The share of time that is not training (Daly 2006, the complete model). */
function lost(interval, save, between) {
  const passed = between * Math.expm1(Math.min(700, (interval + save) / between));
  return 1 - interval / passed;
}

/** Seconds: of a save, between two failures, and the best interval. */
function seconds(get) {
  const save = 12 * get("n_params") / (get("bandwidth") * 1e9);
  const between = get("node_days") * 86400 / get("nodes");
  return [save, between, Math.sqrt(2 * save * between)];
}

/** Shares of the time lost to saves and to steps made again, by interval. */
function numbers(get) {
  const [save, between, best] = seconds(get);
  return FACTORS.map((factor) => {
    const share = lost(factor * best, save, between);
    const saves = Math.min(share, save / (factor * best + save));
    return [`every ${duration(factor * best)}`, saves, share - saves];
  });
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const controls = sliders(model, CONTROLS);
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const rows = FACTORS.map(() => row(get("palette"), percent));
  const words = make("p", { class: "words", role: "status" });
  const update = () => {
    controls.update();
    const [save, between, best] = seconds(get);
    const all = numbers(get);
    const most = Math.max(...all.map(([, saves, again]) => saves + again));
    all.forEach(([name, saves, again], i) => rows[i].update(name,
      [["saves", saves], ["steps made again", again]], most, percent(saves + again)));
    words.textContent = `A save takes ${duration(save)}, a failure comes every ` +
      `${duration(between)}: save every ${duration(best)}, and ` +
      `${percent(lost(best, save, between))} of the time is lost.`;
  };
  rows[FACTORS.indexOf(1)].title.style.fontWeight = 700;
  const chart = make("div", { class: "chart" }, key(get("palette")),
    make("div", { class: "bars" }, ...rows.map(({ box }) => box)), words);
  return mount({ model, el }, {
    title: "How often to save",
    names: Object.keys(CONTROLS),
    content: [controls.box, chart],
    update,
    table: { head: ["a save", "saves", "steps made again"], rows: () => numbers(get),
      say: percent },
  });
}

export default { render, numbers };
