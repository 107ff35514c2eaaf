// The share of a step that is computing, for state on the host and on disk.
// ait * bandwidth / (ait * bandwidth + peak): Rajbhandari et al. 2021, section 4.

const CONTROLS = {
  batch: ["sequences a step", [0, 12, TWOS], short],
  sequence: ["tokens of a sequence", [7, 17, TWOS], short],
  hidden: ["hidden size", [8, 16, TWOS], short],
  bus: ["bus to the host", [0, 3, TENS], (x) => `${short(x)} GB/s`],
  disk: ["disks, a GPU's share", [-1, 2, TENS], (x) => `${short(x)} GB/s`],
  speed: ["speed of a GPU", [1, 3.3, TENS], (x) => `${short(x)} TFLOP/s`],
};
const PLACES = ["on the host", "on disk"];
const STYLE = `
  @container (max-width: 520px) {
    .bars { grid-template-columns: 1fr max-content; gap: 2px 10px; }
    .bars .row > :first-child { grid-column: 1 / -1; margin-top: 5px; }
  }
`;

/** Operations for each byte that moves, by state. */
const intensities = (get) => {
  const tokens = get("batch") * get("sequence");
  return [tokens, tokens / 4, 24 * get("hidden")];
};

/** The share of computing, by state: from the host, and from the disk. */
function numbers(get) {
  const peak = get("speed") * 1e12;
  const share = (ait, place) => {
    const rate = ait * get(place) * 1e9;
    return rate / (rate + peak);
  };
  const all = intensities(get);
  return Object.keys(get("palette")).slice(0, all.length).map((name, i) =>
    [name, share(all[i], "bus"), share(all[i], "disk")]);
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const controls = sliders(model, CONTROLS);
  const say = (share) => `${(100 * share).toFixed(1)} %`;
  const rows = numbers(get).map(() => PLACES.map(() => row(get("palette"), say)));
  const words = make("p", { class: "words", role: "status" });
  const update = () => {
    controls.update();
    numbers(get).forEach(([name, ...shares], i) => shares.forEach((share, j) =>
      rows[i][j].update(`${name}, ${PLACES[j]}`, [[name, share], ["waiting", 1 - share]],
        1, say(share))));
    const half = (place) => short(Math.round(4 * get("speed") * 1e12 / (get(place) * 1e9)));
    words.textContent = "Bars: the share of a step that is computing, if nothing " +
      "overlaps and only this state moves. With Adam's states off the device it is half " +
      `from ${half("bus")} tokens a step over the bus, from ${half("disk")} to the disk; ` +
      `here are ${short(get("batch") * get("sequence"))}.`;
  };
  const chart = make("div", { class: "chart" }, key(get("palette")),
    make("div", { class: "bars" }, ...rows.flat().map(({ box }) => box)), words);
  return mount({ model, el }, {
    title: "Computing or waiting, with state off the device",
    names: Object.keys(CONTROLS),
    style: STYLE,
    content: [controls.box, chart],
    update,
    table: { head: ["state", ...PLACES], rows: () => numbers(get), say },
  });
}

export default { render, numbers };
