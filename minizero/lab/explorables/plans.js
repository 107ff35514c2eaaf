// Four plans, one playhead: a step of each plan as a strip, all on one time axis and one
// memory axis. One control moves all four.

const [TITLE, LANE, TALL, FOOT] = [31, 9, 56, 12];  // heights of a strip's parts
const STRIP = TITLE + 2 * LANE + 4 + TALL + FOOT;
const PLAY = 12;  // seconds that playing the step takes
const CUT = ["", "optimizer", "gradients", "parameters"];  // what a plan shards first

const STYLE = `
  .line { display: flex; gap: 12px; align-items: center; }
  .line input { flex: 1; }
  .line output { min-width: 5em; text-align: right; font-variant-numeric: tabular-nums; }
  svg { display: block; width: 100%; overflow: visible; user-select: none;
    font-size: 12px; fill: currentColor; touch-action: pan-y; cursor: ew-resize; }
  .bold { font-weight: 600; }
  .now { stroke: CanvasText; stroke-width: 1.5; pointer-events: none; }
  .grid { stroke: color-mix(in srgb, CanvasText 25%, transparent); }
  .lost { fill-opacity: 0.2; stroke-width: 2; }
  .new { filter: drop-shadow(0 0 2px var(--hue)) drop-shadow(0 0 3px var(--hue)); }
  .held { stroke: CanvasText; stroke-width: 1; }
  .halo { stroke: Canvas; stroke-width: 4; paint-order: stroke; font-weight: 600; }
  .limit { stroke: currentColor; stroke-width: 1.5; }
  .end { stroke: CanvasText; stroke-width: 1; }
`;

const sum = (list) => list.reduce((a, b) => a + b, 0);

/** Of each plan: its name, its bytes now, between steps and at most, the ms of its step,
 *  and the bytes that a rank sends in it. */
function planNumbers(get) {
  const traces = tracesOf(get);
  const now = get("moment") * Math.max(...traces.map((t) => t.total));
  return traces.map((trace, i) => {
    const rows = live(trace, 0, Object.keys(get("categories")));
    const bytes = rows.map((row) => sum(row.device));
    const at = rows.findLastIndex(({ time }) => time <= now);
    const ms = Math.round(1e3 * trace.total * trace.tick);
    const sent = sum(trace.slices.filter((s) => !s.rank && s.call >= 0).map((s) => s.bytes));
    return [get("plans")[i], bytes[at] ?? 0, bytes[0], Math.max(...bytes), ms, sent];
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

/** What a plan has that the one above it has not, in words. */
function differs(rows, i, narrow) {
  if (!i) return narrow ? "stores everything" : "every GPU stores everything, and updates everything";
  const less = rows[i - 1][2] - rows[i][2];
  const times = rows[i][5] / rows[i - 1][5];
  const sends = times < 1.001 ? "as much" : `${short(times)} times as much`;
  return `${amount(less)} less: ${CUT[i]}${i > 1 ? "" : " state"} sharded`
    + (narrow ? "" : `; sends ${sends}`);
}

/** A strip: titles, a lane for computation, one for the link, the bytes below them. What
 *  the plan above stores and this one does not glows in its color over the bytes. */
function strip(trace, i, top, { x, y, rows, above, narrow, capacity }, get) {
  const { verbs, categories } = { verbs: get("verbs"), categories: get("categories") };
  const bars = (slices) => slices.map((s) => {
    const on = s.lane === "compute" ? 0 : 1;
    const { colour } = verbs[on ? s.lane : s.verb] ?? verbs.launch;
    return `<rect class="paint" x="${x(s.begin)}" width="${Math.max(0.6, x(s.end) - x(s.begin))}"
      y="${top + TITLE + on * (LANE + 1)}" height="${LANE}" fill="${colour}"/>`;
  }).join("");
  const mine = trace.slices.filter((s) => s.rank === 0 && s.end > s.begin);
  const gathered = (one) => sum(one.slices.map((s) => s.lane === "gather" ? s.bytes : 0));
  const added = !!above && gathered(above) !== gathered(trace);
  const [fresh, usual] = [true, false].map((it) =>
    bars(mine.filter((s) => (added && s.lane === "gather") === it)));
  const base = top + STRIP - FOOT;
  const area = (one, of, end) => {
    const stairs = live(one, 0, Object.keys(categories)).filter((row) => row.time <= end);
    return stairs.map((row, k) => `${k ? "H" : "M"}${x(row.time)}${k ? "V" : " "}${
      base - y(of(row))}`).join("") + `H${x(end)}V${base}H${x(0)}Z`;
  };
  const areas = Object.values(categories).map(({ colour }, k) => `<path class="paint"
    fill="${colour}" d="${area(trace, (row) => sum(row.device.slice(0, k + 1)), trace.total)}"/>`);
  const lost = above && categories[CUT[i]].colour;
  const ghost = above && `<path class="lost paint" fill="${lost}" stroke="${lost}" d="${
    area(above, (row) => sum(row.device), Math.min(trace.total, above.total))}"/>`;
  const [name, , rest, peak, ms] = rows[i];
  const told = narrow ? `at most ${amount(peak)}` : `stored ${amount(rest)}, at most ${amount(peak)}`;
  return `<text class="bold" x="0" y="${top + 12}">${name}</text>
    <text x="${x.right}" y="${top + 12}" text-anchor="end">${told} ${
    peak <= capacity ? "✓" : "✗"} ${ms.toLocaleString("en-US")} ms</text>
    <text x="0" y="${top + 26}">${differs(rows, i, narrow)}</text>${usual}
    <g class="new" style="--hue: ${verbs.gather.colour}">${fresh}</g>
    ${above ? `<g class="new" style="--hue: ${lost}">${ghost}</g>` : ""}${areas.reverse().join("")}
    <path class="limit" d="M${x(0)} ${base - y(capacity)}H${x.right}"/>
    <path class="grid" d="M${x(0)} ${base}H${x.right}"/>
    <path class="end" d="M${x(trace.total)} ${top + TITLE}V${base + 3}"/>`;
}

/** What each plan holds at the moment: a column on the playhead, and its bytes. */
function columns(traces, now, { x, y }, get) {
  const looks = Object.values(get("categories"));
  return traces.map((trace, i) => {
    const row = live(trace, 0, Object.keys(get("categories"))).findLast((r) => r.time <= now);
    let base = i * STRIP + STRIP - FOOT;
    const parts = now > trace.total ? [] : row.device.map((bytes, k) => {
      base -= y(bytes);
      return `<rect class="paint" x="${x(now) - 4}" width="8" y="${base}" height="${y(bytes)}"
        fill="${looks[k].colour}"/>`;
    });
    const [side, anchor] = x(now) > 0.8 * x.right ? [-8, "end"] : [8, "start"];
    return `<g class="held">${parts.join("")}</g><text class="halo" x="${x(now) + side}"
      y="${Math.max(base + 4, i * STRIP + STRIP - FOOT - TALL + 10)}" text-anchor="${anchor}">${
      parts.length ? amount(sum(row.device)) : "done"}</text>`;
  }).join("");
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const traces = tracesOf(get);
  const longest = Math.max(...traces.map((trace) => trace.total));
  const names = Object.keys(get("categories"));
  const most = 1.05 * Math.max(...live(traces[0], 0, names).map((row) => sum(row.device)));
  const box = make("div");
  box.innerHTML = `<svg role="img"><g></g><path class="now"/><g></g></svg>`;
  const svg = box.firstChild;
  const [all, line, held] = svg.children;
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let [width, ticking, x] = [0, 0, null];
  const y = (bytes) => TALL * bytes / most;
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
  const words = make("p", { class: "words" }, "What glows is new in a plan: bytes that the " +
    "one above it still stores, and calls that it does not make. The line is a GPU's 80 GB.");
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
    const scale = { x, y, rows: planNumbers(get), narrow: width < 520, capacity: get("capacity") };
    all.innerHTML = traces.map((trace, i) =>
      strip(trace, i, i * STRIP, { ...scale, above: traces[i - 1] }, get)).join("");
    svg.setAttribute("viewBox", `0 0 ${width} ${4 * STRIP}`);
    svg.style.height = `${4 * STRIP}px`;
  };
  const update = () => {
    if (svg.clientWidth !== width) draw();
    const now = get("moment") * longest;
    line.setAttribute("d", `M${x(now)} ${TITLE}V${4 * STRIP - FOOT}`);
    held.innerHTML = columns(traces, now, { x, y }, get);
    slide.value = 1000 * get("moment");
    const ms = `${short(1e3 * now * traces[0].tick)} ms`;
    slide.setAttribute("aria-valuetext", ms);
    clock.textContent = ms;
    const bytes = planNumbers(get).map(([name, bytes]) => `${name} ${amount(bytes)}`);
    svg.setAttribute("aria-label", `Now on each of 8 GPUs: ${bytes.join(", ")}.`);
  };
  const controls = make("div", { class: "line" }, play, slide, clock);
  const end = mount({ model, el }, {
    title: "Four plans, one step", names: ["moment"], style: STYLE,
    content: [controls, key(get("categories")), box, words], update,
    table: { head: ["plan", "now", "stored", "at most", "step", "sent"],
      say: (number, i) => i === 3 ? `${number} ms` : amount(number),
      rows: () => planNumbers(get) },
    resize: update,
  });
  return () => {
    end();
    stop();
  };
}

export default { render, numbers: planNumbers };
