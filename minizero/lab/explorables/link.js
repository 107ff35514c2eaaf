// A unit under ZeRO against the tokens of a micro-batch: the time of computing it rises
// with them, the time of moving it does not. Where the lines cross, waiting ends.

const CONTROLS = {
  tokens: ["tokens of a micro-batch", [8, 18, TWOS], short],
  bandwidth: ["bandwidth of a rank", [0, 3, FINE], (x) => `${short(x)} GB/s`],
  latency: ["latency of a call", [0, 3, TENS], (x) => `${short(x)} µs`],
  unit: ["parameters of the unit", [-1, 4, TENS], (x) => `${short(x)} million`],
  speed: ["speed of a rank", [1, 3.3, TENS], (x) => `${short(x)} TFLOP/s`],
};
const [TALL, LEFT, BOTTOM] = [230, 8, 40];
const [FEWEST, MOST] = [256, 262144];

const STYLE = `
  svg { display: block; width: 100%; height: auto; overflow: visible; font-size: 13px;
    fill: currentColor; cursor: ew-resize; touch-action: pan-y; user-select: none; }
  path { fill: none; stroke: currentColor; stroke-width: 2; }
  .moved { stroke-dasharray: 6 4; } .moved.two { stroke-dasharray: 2 3; }
  .now { stroke-width: 1; } .axis { stroke-width: 1; opacity: 0.5; }
  .hidden { fill: currentColor; opacity: 0.1; }
  .waits { fill: url(#waits); }
  .bold { font-weight: 600; } .halo { stroke: Canvas; stroke-width: 4; paint-order: stroke; }
  .handle { fill: #2f86c8; stroke: Canvas; stroke-width: 2; cursor: grab; }
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

/** The bandwidth with which ZeRO-3 hides from so many tokens on, as far as there is one. */
function needed(get, tokens) {
  const n = get("unit") * 1e6;
  const left = times(get, tokens)[0] / 3 - get("latency") / 1e6;
  return Math.min(1000, Math.max(1, left > 0 ? 2 * n / left / 1e9 : 1000));
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const controls = sliders(model, CONTROLS);
  const say = (seconds) => `${short(1e3 * seconds)} ms`;
  const words = make("p", { class: "words", role: "status" });
  const box = make("div");
  box.innerHTML = `<svg role="img" ></svg>`;
  const svg = box.firstChild;
  let [wide, end] = [600, 0];
  const x = (tokens) => LEFT + (end - LEFT) * (Math.log2(tokens) - 8) / 10;
  const crossing = () => {
    const [work, , moved] = times(get, 1);
    return moved / work;
  };
  let crosses = false;  // the crossing is dragged, and with it the link's bandwidth
  const set = (event) => {
    const { left, width } = svg.getBoundingClientRect();
    const place = ((event.clientX - left) / width * wide - LEFT) / (end - LEFT);
    const tokens = Math.round(2 ** (8 + 10 * Math.min(1, Math.max(0, place))));
    if (crosses) put(model, "bandwidth", Number(needed(get, tokens).toPrecision(3)));
    else put(model, "tokens", tokens);
  };
  svg.addEventListener("pointerdown", (event) => {
    crosses = event.target.matches(".handle");
    svg.setPointerCapture(event.pointerId);
    set(event);
  });
  svg.addEventListener("pointermove", (event) => { if (event.buttons) set(event); });
  const draw = () => {
    wide = box.clientWidth || wide;
    end = wide - LEFT;
    svg.setAttribute("viewBox", `0 0 ${wide} ${TALL + BOTTOM}`);
    const [low, two, three] = times(get, FEWEST);
    const [high] = times(get, MOST);
    const [work] = times(get);
    const [least, most] = [Math.log(Math.min(low, two)), Math.log(Math.max(high, three))];
    const y = (t) => TALL - 8 - (TALL - 24) * (Math.log(t) - least) / (most - least);
    const cross = crossing();
    const from = Math.min(MOST, Math.max(FEWEST, cross));
    const now = x(get("tokens"));
    const side = now > wide / 2 ? ["end", -8] : ["start", 8];
    const wait = three - work;
    const label = (text, at, more) => `<text class="halo" y="${at}" ${more}>${text}</text>`;
    svg.innerHTML = `<defs><pattern id="waits" width="6" height="6" patternUnits="userSpaceOnUse"
        patternTransform="rotate(45)"><path d="M0 0V6" opacity="0.5"/></pattern></defs>
      <rect class="hidden" x="${x(from)}" y="0" height="${TALL}" width="${end - x(from)}"/>
      <path class="waits" style="stroke: none" d="M${x(FEWEST)} ${y(low)}L${x(from)} ${
      y(times(get, from)[0])}V${y(three)}H${x(FEWEST)}Z"/>
      <path d="M${x(FEWEST)} ${y(low)}L${x(MOST)} ${y(high)}"/>
      <path class="moved" d="M${LEFT} ${y(three)}H${end}"/>
      <path class="moved two" d="M${LEFT} ${y(two)}H${end}"/>
      <path class="axis" d="M${LEFT} ${TALL}H${end}"/><path class="now" d="M${now} 0V${TALL}"/>
      ${label(`ZeRO-3 sends, ${say(three)}`, y(three) - 6, `x="${LEFT}"`)}
      ${label(`ZeRO-2 sends, ${say(two)}`, y(two) + 15, `x="${LEFT}"`)}
      ${label("computes", Math.max(14, y(high) + 4), `x="${end - 24}" text-anchor="end"`)}
      <text x="${LEFT}" y="${TALL + 15}">256 tokens</text>
      <text x="${end}" y="${TALL + 15}" text-anchor="end">262,144</text>
      ${label(`${short(get("tokens"))} tokens: ${wait > 0 ? `waits ${say(wait)}` : "no wait"}`,
        TALL - 8, `class="bold halo" x="${now + side[1]}" text-anchor="${side[0]}"`)}
      ${cross < FEWEST || cross > MOST ? "" : `<circle class="handle" r="9" cx="${x(cross)}"
        cy="${y(three)}"/><text class="bold" x="${Math.min(end - 70, Math.max(80, x(cross)))}"
        y="${TALL + 33}" text-anchor="middle">hidden from ${short(Math.round(cross))} on</text>`}`;
  };
  const update = () => {
    controls.update();
    draw();
    const [work, , moved] = times(get);
    words.textContent = `ZeRO-3 hides its communication from ${short(Math.round(crossing()))} ` +
      `tokens on: drag the crossing to see which link that takes. With ` +
      `${short(get("tokens"))} tokens overlap makes the unit ` +
      `${((work + moved) / Math.max(work, moved)).toFixed(2)} times as fast.`;
    svg.setAttribute("aria-label", words.textContent);
  };
  const chart = make("div", { class: "chart" }, box, words);
  return mount({ model, el }, {
    title: "Computing and sending a unit",
    names: Object.keys(CONTROLS),
    style: STYLE,
    content: [controls.box, chart],
    update,
    resize: draw,
    table: { head: ["plan", "computes", "sends", "waits, overlapped"],
      rows: () => numbers(get), say },
  });
}

export default { render, numbers };
