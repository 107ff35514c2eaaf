// How often to save: the time that is lost, against the interval between two saves.

const CONTROLS = {
  n_params: ["parameters", [8, 13, TENS], billions],
  bandwidth: ["all nodes write", [-1, 4, TENS], (x) => `${short(x)} GB/s`],
  nodes: ["nodes", [0, 14, TWOS], short],
  node_days: ["a node fails every", [0, 4, TENS], (x) => `${short(x)} d`],
};
const TALL = 190;
const STYLE = `
  .best { stroke: currentColor; stroke-width: 1.5; }
`;
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
  const words = make("p", { class: "words", role: "status" });
  const [box, svg] = canvas();
  const draw = () => {
    const wide = box.clientWidth || 600;
    const [save, between, best] = seconds(get);
    const [left, right] = [8, wide - 8];
    const of = (place) => best * 2 ** (-3 + 6 * place);  // an eighth of the best to 8 times
    const x = (interval) => left + (right - left) * (Math.log2(interval / best) + 3) / 6;
    const points = Array.from({ length: 121 }, (_, i) => of(i / 120)).map((interval) => {
      const share = lost(interval, save, between);
      return [x(interval), share, Math.min(share, save / (interval + save))];
    });
    const most = Math.max(...points.map(([, share]) => share));
    const y = (share) => TALL - (TALL - 34) * share / most;
    const area = (i) => `M${left} ${TALL}${points.map((p) => `L${p[0]} ${y(p[i])}`).join("")}L${right} ${TALL}Z`;
    const colour = Object.values(get("palette")).map((look) => look.colour);
    const least = lost(best, save, between);
    svg.setAttribute("viewBox", `0 0 ${wide} ${TALL + 42}`);
    svg.innerHTML = `<path class="paint" d="${area(1)}" fill="${colour[1]}"/>
      <path class="paint" d="${area(2)}" fill="${colour[0]}"/>
      <text x="${left}" y="${y(points[0][1]) - 6}">${percent(points[0][1])}</text>
      <text x="${right}" y="${y(points[120][1]) - 6}" text-anchor="end">${percent(points[120][1])}</text>
      <text x="${left}" y="12">time lost</text>
      <text x="${right}" y="${TALL + 36}" text-anchor="end">time between two saves</text>
      <path class="best" d="M${x(best)} ${y(least) - 20}V${TALL + 6}"/>
      <text class="bold" x="${x(best)}" y="${y(least) - 26}" text-anchor="middle">least: ${percent(least)}</text>
      ${FACTORS.map((k) => `<text x="${x(k * best)}" y="${TALL + 18}" text-anchor="middle"
        class="${k === 1 ? "bold" : ""}">${wide < 480 && k !== 1 && k % 4 && k !== 0.25 ? "" : duration(k * best)}</text>`).join("")}`;
  };
  const update = () => {
    controls.update();
    draw();
    const [save, between, best] = seconds(get);
    words.textContent = `A save takes ${duration(save)}, a failure comes every ` +
      `${duration(between)}: save every ${duration(best)}, and ` +
      `${percent(lost(best, save, between))} of the time is lost. Near its ` +
      "lowest point the curve is flat.";
    svg.setAttribute("aria-label", words.textContent);
  };
  const chart = make("div", { class: "chart" }, key(get("palette")), box, words);
  return mount({ model, el }, {
    title: "How often to save",
    names: Object.keys(CONTROLS),
    style: STYLE,
    content: [controls.box, chart],
    update,
    resize: draw,
    table: { head: ["a save", "saves", "steps made again"], rows: () => numbers(get),
      say: percent },
  });
}

export default { render, numbers };
