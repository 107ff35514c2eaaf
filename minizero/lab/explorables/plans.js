// Four plans, one playhead: a step of each plan as a strip, all on one time axis and one
// memory axis. One control moves all four.

const [TITLE, LANE, TALL, FOOT] = [17, 9, 46, 12];  // heights of a strip's parts
const STRIP = TITLE + 2 * LANE + 4 + TALL + FOOT;
const PLAY = 12;  // seconds that playing the step takes

const STYLE = `
  .line { display: flex; gap: 12px; align-items: center; }
  .line input { flex: 1; }
  .line output { min-width: 5em; text-align: right; font-variant-numeric: tabular-nums; }
  svg { display: block; width: 100%; overflow: visible; user-select: none;
    font-size: 12px; fill: currentColor; touch-action: pan-y; cursor: ew-resize; }
  .bold { font-weight: 600; }
  .soft { fill: color-mix(in srgb, CanvasText 75%, transparent); }
  .now { stroke: CanvasText; stroke-width: 1.5; pointer-events: none; }
  .grid { stroke: color-mix(in srgb, CanvasText 25%, transparent); }
  .ghost { fill: none; stroke: CanvasText; stroke-dasharray: 3 3; opacity: 0.7; }
  .limit { stroke: currentColor; stroke-width: 1.5; }
  .end { stroke: CanvasText; stroke-width: 1; }
`;

const sum = (list) => list.reduce((a, b) => a + b, 0);

/** Of each plan: its name, its bytes now, between steps and at most, and its step's ms. */
function planNumbers(get) {
  const traces = tracesOf(get);
  const now = get("moment") * Math.max(...traces.map((t) => t.total));
  return traces.map((trace, i) => {
    const rows = live(trace, 0, Object.keys(get("categories")));
    const bytes = rows.map((row) => sum(row.device));
    const at = rows.findLastIndex(({ time }) => time <= now);
    const ms = Math.round(1e3 * trace.total * trace.tick);
    return [get("plans")[i], bytes[at] ?? 0, bytes[0], Math.max(...bytes), ms];
  });
}

const known = new WeakMap();  // by what they are unpacked from

function tracesOf(get) {
  const { tables, traces } = get("steps");
  return traces.map((packed) => {
    if (!known.has(packed)) known.set(packed, unpack(tables, packed));
    return known.get(packed);
  });
}

/** A strip: title, a lane for computation, one for the link, the bytes below them. */
function strip(trace, i, top, { x, most, ghost, capacity }, get) {
  const { verbs, categories } = { verbs: get("verbs"), categories: get("categories") };
  const mine = trace.slices.filter((s) => s.rank === 0 && s.end > s.begin);
  const bars = mine.map((s) => {
    const on = s.lane === "compute" ? 0 : 1;
    const colour = (verbs[s.lane === "compute" ? s.verb : s.lane] ?? verbs.launch).colour;
    return `<rect class="paint" x="${x(s.begin)}" width="${Math.max(0.6, x(s.end) - x(s.begin))}"
      y="${top + TITLE + on * (LANE + 1)}" height="${LANE}" fill="${colour}"/>`;
  });
  const base = top + TITLE + 2 * LANE + 4 + TALL;
  const y = (bytes) => base - TALL * bytes / most;
  const rows = live(trace, 0, Object.keys(categories));
  const stairs = (rows, of) => rows.map((row, k) =>
    `${k ? "H" : "M"}${x(row.time)}${k ? "V" : " "}${y(of(row))}`).join("");
  const areas = Object.values(categories).map(({ colour }, k) => `<path class="paint"
    fill="${colour}" d="${stairs(rows, (row) => sum(row.device.slice(0, k + 1)))}H${
    x(trace.total)}V${base}H${x(0)}Z"/>`).reverse();
  const [, , rest, peak, ms] = planNumbers(get)[i];
  const fits = peak <= capacity;
  const other = i && `<path class="ghost" d="${stairs(ghost, (row) => sum(row.device))}"/>`;
  return `<text class="bold" x="0" y="${top + 12}">${get("plans")[i]}</text>
    <text x="${x.right}" y="${top + 12}" text-anchor="end">stored ${amount(rest)}, at most ${
    amount(peak)} ${fits ? "✓" : "✗"}, ${ms} ms</text>${bars.join("")}${areas.join("")}${other || ""}
    <path class="limit" d="M${x(0)} ${y(capacity)}H${x.right}"/>
    <path class="grid" d="M${x(0)} ${base}H${x.right}"/>
    <path class="end" d="M${x(trace.total)} ${top + TITLE}V${base + 3}"/>`;
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const traces = tracesOf(get);
  const longest = Math.max(...traces.map((trace) => trace.total));
  const names = Object.keys(get("categories"));
  const ghost = live(traces[0], 0, names);
  const most = 1.05 * Math.max(...ghost.map((row) => sum(row.device)));
  const box = make("div");
  box.innerHTML = `<svg role="img"><g></g><path class="now"/></svg>`;
  const svg = box.firstChild;
  const [all, line] = svg.children;
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let [width, ticking, x] = [0, 0, null];
  const go = (moment) => put(model, "moment", Math.min(1, Math.max(0, moment)));
  const slide = make("input", { type: "range", min: 0, max: 1000, "aria-label": "moment",
    oninput: () => go(slide.valueAsNumber / 1000) });
  const stop = () => {
    clearInterval(ticking);
    ticking = 0;
    play.textContent = "Play";
  };
  const play = make("button", { type: "button", onclick: () => {
    if (ticking) return stop();
    if (get("moment") >= 1) go(0);
    play.textContent = "Pause";
    const [pace, step] = calm.matches ? [1000, 1 / PLAY] : [40, 0.04 / PLAY];
    ticking = setInterval(() => {
      go(get("moment") + step);
      if (!play.isConnected || get("moment") >= 1) stop();
    }, pace);
  } }, "Play");
  const clock = make("output");
  const words = make("p", { class: "words", role: "status" });
  const point = (event) => {
    const { left } = svg.getBoundingClientRect();
    go((event.clientX - left) / svg.clientWidth);
  };
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    point(event);
  });
  svg.addEventListener("pointermove", (event) => { if (event.buttons) point(event); });
  const draw = () => {
    width = svg.clientWidth || width || 640;
    x = Object.assign((time) => width * time / longest, { right: width });
    const scale = { x, most, ghost, capacity: get("capacity") };
    all.innerHTML = traces.map((trace, i) => strip(trace, i, i * STRIP, scale, get)).join("");
    svg.setAttribute("viewBox", `0 0 ${width} ${4 * STRIP}`);
    svg.style.height = `${4 * STRIP}px`;
  };
  const update = () => {
    if (svg.clientWidth !== width) draw();
    const now = get("moment") * longest;
    line.setAttribute("d", `M${x(now)} ${TITLE}V${4 * STRIP - FOOT}`);
    slide.value = 1000 * get("moment");
    const ms = `${short(1e3 * now * traces[0].tick)} ms`;
    slide.setAttribute("aria-valuetext", ms);
    clock.textContent = ms;
    const held = planNumbers(get).map(([name, bytes]) => `${name} ${amount(bytes)}`);
    words.textContent = `Now on each of 8 GPUs: ${held.join(", ")}. Solid line: the 80 GB ` +
      "of a GPU; dashed: data parallel.";
    svg.setAttribute("aria-label", words.textContent);
  };
  const controls = make("div", { class: "line" }, play, slide, clock);
  const end = mount({ model, el }, {
    title: "Four plans, one step", names: ["moment"], style: STYLE,
    content: [controls, key(get("categories")), box, words], update,
    table: { head: ["plan", "now", "stored", "at most", "step"],
      say: (number, i) => i === 3 ? `${number} ms` : amount(number),
      rows: () => planNumbers(get) },
  });
  const resized = new ResizeObserver(() => { draw(); update(); });
  resized.observe(box);
  return () => {
    end();
    stop();
    resized.disconnect();
  };
}

export default { render, numbers: planNumbers };
