// A unit under ZeRO against the tokens of a micro-batch: the time of computing it rises
// with them, the time of moving it does not. Where the lines cross, waiting ends.

const CONTROLS = {
  tokens: ["tokens of a micro-batch", [8, 18, TWOS], short],
  bandwidth: ["bandwidth of a rank", [0, 3, TENS], (x) => `${short(x)} GB/s`],
  latency: ["latency of a call", [0, 3, TENS], (x) => `${short(x)} µs`],
  unit: ["parameters of the unit", [-1, 3.5, TENS], (x) => `${short(x)} million`],
  speed: ["speed of a rank", [1, 3.3, TENS], (x) => `${short(x)} TFLOP/s`],
};
const [WIDE, TALL, LEFT, BOTTOM] = [560, 170, 8, 20];

const STYLE = `
  svg { display: block; width: 100%; height: auto; overflow: visible; font-size: 13px;
    fill: currentColor; cursor: ew-resize; touch-action: pan-y; user-select: none; }
  path { fill: none; stroke: currentColor; stroke-width: 2; }
  .moved { stroke-dasharray: 6 4; } .moved.two { stroke-dasharray: 2 3; }
  .now { stroke-width: 1; } .hidden { fill: currentColor; opacity: 0.1; stroke: none; }
`;

/** Seconds: of computing the unit, and of what ZeRO-2 and ZeRO-3 send for it. */
function times(get, tokens = get("tokens")) {
  const n = get("unit") * 1e6;
  const call = 2 * n / (get("bandwidth") * 1e9) + get("latency") / 1e6;
  return [6 * n * tokens / (get("speed") * 1e12), 2 * call, 3 * call];
}

const numbers = (get) => {
  const [work, ...sent] = times(get);
  return ["ZeRO-2", "ZeRO-3"].map((name, i) =>
    [name, work, sent[i], Math.max(0, sent[i] - work)]);
};

function render({ model, el }) {
  const get = (name) => model.get(name);
  const controls = sliders(model, CONTROLS);
  const say = (seconds) => `${short(1e3 * seconds)} ms`;
  const rows = ["one after the other", "overlapped"].map((name) =>
    [name, row(get("palette"), say)]);
  const words = make("p", { class: "words", role: "status" });
  const box = make("div");
  box.innerHTML = `<svg role="img" viewBox="0 0 ${WIDE} ${TALL + BOTTOM}"></svg>`;
  const svg = box.firstChild;
  const x = (tokens) => LEFT + (WIDE - 2 * LEFT) * (Math.log2(tokens) - 8) / 10;
  const set = (event) => {
    const { left, width } = svg.getBoundingClientRect();
    const place = ((event.clientX - left) / width * WIDE - LEFT) / (WIDE - 2 * LEFT);
    put(model, "tokens", Math.round(2 ** (8 + 10 * Math.min(1, Math.max(0, place)))));
  };
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    set(event);
  });
  svg.addEventListener("pointermove", (event) => { if (event.buttons) set(event); });
  const draw = () => {
    const [low, two, three] = times(get, 256);
    const high = times(get, 262144)[0];
    const [least, most] = [Math.log(Math.min(low, two)), Math.log(Math.max(high, three))];
    const y = (t) => TALL - 8 - (TALL - 24) * (Math.log(t) - least) / (most - least);
    const from = Math.min(262144, Math.max(256, 256 * three / low));
    const end = WIDE - LEFT;
    svg.innerHTML = `<rect class="hidden" x="${x(from)}" y="0" height="${TALL}"
        width="${end - x(from)}"/>
      <path d="M${x(256)} ${y(low)}L${x(262144)} ${y(high)}"/>
      <path class="moved" d="M${LEFT} ${y(three)}H${end}"/>
      <path class="moved two" d="M${LEFT} ${y(two)}H${end}"/>
      <path class="now" d="M${x(get("tokens"))} 0V${TALL}"/>
      <text x="${LEFT}" y="${y(three) - 5}">ZeRO-3 sends, ${say(three)}</text>
      <text x="${LEFT}" y="${y(two) + 15}">ZeRO-2 sends, ${say(two)}</text>
      <text x="${end}" y="${y(high) + 18}" text-anchor="end">computes</text>
      <text x="${Math.min(x(from) + 4, end - 60)}" y="${TALL - 4}">hidden</text>
      <text x="${LEFT}" y="${TALL + 15}">256 tokens</text>
      <text x="${end}" y="${TALL + 15}" text-anchor="end">262,144</text>`;
  };
  const update = () => {
    controls.update();
    draw();
    const [work, , moved] = times(get);
    const waits = [moved, Math.max(0, moved - work)];
    rows.forEach(([name, one], i) => one.update(name,
      [["computation", work], ["waiting", waits[i]]], work + moved, say(work + waits[i])));
    const least = get("tokens") * moved / work;
    words.textContent = `ZeRO-3 hides its communication from ${short(Math.round(least))} ` +
      `tokens on. Here overlap makes the unit ` +
      `${((work + moved) / Math.max(work, moved)).toFixed(2)} times as fast.`;
    svg.setAttribute("aria-label", words.textContent);
  };
  const chart = make("div", { class: "chart" }, box, key(get("palette")),
    make("div", { class: "bars" }, ...rows.map(([, one]) => one.box)), words);
  return mount({ model, el }, {
    title: "Computing and sending a unit",
    names: Object.keys(CONTROLS),
    style: STYLE,
    content: [controls.box, chart],
    update,
    table: { head: ["plan", "computes", "sends", "waits, overlapped"],
      rows: () => numbers(get), say },
  });
}

export default { render, numbers };
