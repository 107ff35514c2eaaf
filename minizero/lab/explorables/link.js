// A unit under ZeRO against the tokens of a micro-batch: the time of computing it rises
// with them, the time of moving it does not. Where the lines cross, waiting ends.

const CONTROLS = {
  tokens: ["tokens of a micro-batch", [8, 18, TWOS], short],
  bandwidth: ["bandwidth of a rank", [0, 3, FINE], (x) => `${short(x)} GB/s`],
  latency: ["latency of a call", [0, 3, TENS], (x) => `${short(x)} µs`],
  unit: ["parameters of the unit", [-1, 4, TENS], (x) => `${short(x)} million`],
  speed: ["speed of a rank", [1, 3.3, TENS], (x) => `${short(x)} TFLOP/s`],
};
const [TALL, LEFT, RIGHT, BOTTOM] = [230, 50, 8, 56];
const [FEWEST, MOST] = [256, 262144];

const STYLE = `
  svg { cursor: ew-resize; touch-action: pan-y; }
  path { fill: none; stroke: currentColor; stroke-width: 2; }
  .moved { stroke-dasharray: 6 4; } .moved.two { stroke-dasharray: 2 3; }
  .now { stroke-width: 1; } .axis { stroke-width: 1; opacity: 0.5; }
  .hidden { fill: currentColor; opacity: 0.1; }
  .waits { fill: url(#waits); }
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
  const [box, svg] = canvas();
  let [wide, end] = [600, 0];
  const x = (tokens) => LEFT + (end - LEFT) * (Math.log2(tokens) - 8) / 10;
  const crossing = () => {
    const [work, , moved] = times(get, 1);
    return moved / work;
  };
  let crosses = false;  // the crossing is dragged, and with it the link's bandwidth
  drag(svg, (event, first) => {
    if (first) crosses = event.target.matches(".handle");
    const { left, width } = svg.getBoundingClientRect();
    const place = ((event.clientX - left) / width * wide - LEFT) / (end - LEFT);
    const tokens = Math.round(2 ** (8 + 10 * Math.min(1, Math.max(0, place))));
    if (crosses) put(model, "bandwidth", Number(needed(get, tokens).toPrecision(3)));
    else put(model, "tokens", tokens);
  });
  const draw = () => {
    wide = box.clientWidth || wide;
    end = wide - RIGHT;
    const narrow = wide < 480;
    svg.setAttribute("viewBox", `0 0 ${wide} ${TALL + BOTTOM}`);
    const [low, two, three] = times(get, FEWEST);
    const [high] = times(get, MOST);
    const [work] = times(get);
    const [least, most] = [Math.log(Math.min(low, two)), Math.log(Math.max(high, three))];
    const y = (t) => TALL - 8 - (TALL - 24) * (Math.log(t) - least) / (most - least);
    const cross = crossing();
    const from = Math.min(MOST, Math.max(FEWEST, cross));
    const now = x(get("tokens"));
    const [anchor, place] = now + 170 < end ? ["start", now + 8] : ["end", now - 8];
    const wait = three - work;
    const [first, last] = [least, most].map((t) => Math.ceil(t / Math.LN10));
    const times10 = Array.from({ length: last - first }, (_, i) => 10 ** (first + i));
    const counts = (narrow ? [8, 13, 18] : [8, 10, 12, 14, 16, 18]).map((power) => 2 ** power);
    const ends = `x="${end}" text-anchor="end"`;
    const moved = (plan, t) => `${plan} sends${narrow ? "" : `, ${say(t)}`}`;
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
      ${times10.map((t) => `<path class="axis" d="M${LEFT - 4} ${y(t)}h4"/>
        <text x="${LEFT - 8}" y="${y(t) + 4}" text-anchor="end">${say(t)}</text>`).join("")}
      ${counts.map((n) => `<path class="axis" d="M${x(n)} ${TALL}v4"/><text x="${x(n)}" y="${TALL + 18}"
        text-anchor="${n === MOST ? "end" : "middle"}">${n < 1000 ? n : `${Math.round(n / 1000)}k`}</text>`).join("")}
      <text ${ends} y="${TALL + 34}">tokens of a micro-batch</text>
      <text x="${LEFT + 6}" y="14">time of a unit</text>
      ${label(moved("ZeRO-3", three), y(three) - 7, ends)}
      ${label(moved("ZeRO-2", two), y(two) + 17, ends)}
      ${label("computes", Math.max(14, y(high) + 4), `x="${end - 24}" text-anchor="end"`)}
      ${y(low) - y(three) < 60 ? "" : label("waits", y(three) + 36, `x="${LEFT + 6}"`)}
      ${end - x(from) < 80 ? "" : label("hidden", 40, `x="${x(from) + 8}"`)}
      ${narrow ? "" : label(`${short(get("tokens"))} tokens: ${wait > 0 ? `waits ${say(wait)}` : "no wait"}`,
        TALL - 8, `class="bold halo" x="${place}" text-anchor="${anchor}"`)}
      ${cross < FEWEST || cross > MOST ? "" : `<circle class="handle" r="9" cx="${x(cross)}"
        cy="${y(three)}"/><text class="bold" x="${Math.min(end - 100, Math.max(LEFT + 60, x(cross)))}"
        y="${TALL + 50}" text-anchor="middle">hidden from ${short(Math.round(cross))} tokens on</text>`}`;
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
