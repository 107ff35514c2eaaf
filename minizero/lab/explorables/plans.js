// Four plans, one playhead: a step of each plan as a strip, all on one time axis and one
// memory axis. One control moves all four.

const [LANE, FOOT, AXIS] = [9, 12, 8];  // heights of a strip's parts, and below all
const PLAY = 12;  // seconds that playing the step takes
const CUT = ["", "optimizer", "gradients", "parameters"];  // what a plan shards first

const STYLE = `
  .line { display: flex; gap: 12px; align-items: center; }
  .line input { flex: 1; }
  .line output { min-width: 5em; text-align: right; font-variant-numeric: tabular-nums; }
  svg { font-size: 12px; touch-action: pan-y; cursor: ew-resize; }
  .now { stroke: CanvasText; stroke-width: 1.5; pointer-events: none; }
  .side { font-size: 11px; }
  .grid { stroke: color-mix(in srgb, CanvasText 25%, transparent); }
  .lost { fill-opacity: 0.2; stroke-width: 2; }
  .new { filter: drop-shadow(0 0 2px var(--hue)) drop-shadow(0 0 3px var(--hue)); }
  .held { stroke: CanvasText; stroke-width: 1; }
  .limit { stroke: currentColor; stroke-width: 1.5; }
  .end { stroke: CanvasText; stroke-width: 1; }
`;

const sum = (list) => list.reduce((a, b) => a + b, 0);

/** Where things are in a drawing so wide: of a strip its title, its bytes and its whole
 *  height, and the width of what stands before it. */
function layout(width) {
  const narrow = width < 600;
  const [title, tall, gutter] = narrow ? [31, 56, 52] : [18, 66, 56];
  return { narrow, title, tall, gutter, right: width,
    strip: title + 2 * LANE + 4 + tall + FOOT };
}

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
  if (!i) return narrow ? "stores everything" : "every GPU stores and updates everything";
  const less = rows[i - 1][2] - rows[i][2];
  const times = rows[i][5] / rows[i - 1][5];
  const sends = times < 1.001 ? "the same" : `${short(times)} times that`;
  return `${amount(less)} less: ${CUT[i]}${i > 1 ? "" : " state"} sharded`
    + (narrow ? "" : `; sends ${sends}`);
}

/** A strip: titles, a lane for computation, one for the link, the bytes below them. What
 *  the plan above stores and this one does not glows in its color over the bytes. */
function strip(trace, i, { x, y, at, rows, above, capacity }, get) {
  const { verbs, categories } = { verbs: get("verbs"), categories: get("categories") };
  const [top, lanes] = [i * at.strip, i * at.strip + at.title];
  const bars = (slices) => slices.map((s) => {
    const on = s.lane === "compute" ? 0 : 1;
    const { colour } = verbs[on ? s.lane : s.verb] ?? verbs.launch;
    return `<rect class="paint" x="${x(s.begin)}" width="${Math.max(0.6, x(s.end) - x(s.begin))}"
      y="${lanes + on * (LANE + 1)}" height="${LANE}" fill="${colour}"/>`;
  }).join("");
  const mine = trace.slices.filter((s) => s.rank === 0 && s.end > s.begin);
  const gathered = (one) => sum(one.slices.map((s) => s.lane === "gather" ? s.bytes : 0));
  const added = !!above && gathered(above) !== gathered(trace);
  const [fresh, usual] = [true, false].map((it) =>
    bars(mine.filter((s) => (added && s.lane === "gather") === it)));
  const base = top + at.strip - FOOT;
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
  const [fits, took] = [peak <= capacity, `${short(ms / 1e3)} s`];
  const told = at.narrow ? `at most ${amount(peak)} ${fits ? "✓" : "✗"} · ${took}`
    : `stored ${amount(rest)} · at most ${amount(peak)}, ${fits ? "fits" : "does not fit"} · ${took}`;
  const side = (text, height) => `<text class="side" y="${height}">${text}</text>`;
  const what = differs(rows, i, at.narrow);
  return `<text y="${top + 12}"><tspan class="bold">${name}</tspan>${
    at.narrow ? "" : `<tspan dx="10">${what}</tspan>`}</text>
    <text x="${at.right}" y="${top + 12}" text-anchor="end">${told}</text>
    ${at.narrow ? `<text y="${top + 26}">${what}</text>` : ""}
    ${side("compute", lanes + 8)}${side("link", lanes + LANE + 10)}
    ${side(amount(capacity), base - y(capacity) + 4)}${side("0", base + 4)}${usual}
    <g class="new" style="--hue: ${verbs.gather.colour}">${fresh}</g>
    ${above ? `<g class="new" style="--hue: ${lost}">${ghost}</g>` : ""}${areas.reverse().join("")}
    <path class="limit" d="M${x(0)} ${base - y(capacity)}H${at.right}"/>
    <path class="grid" d="M${x(0)} ${base}H${at.right}"/>
    <path class="end" d="M${x(trace.total)} ${lanes}V${base + 3}"/>`;
}

/** What each plan holds at the moment: a column on the playhead, and its bytes. */
function columns(traces, now, { x, y, at }, get) {
  const looks = Object.values(get("categories"));
  return traces.map((trace, i) => {
    const row = live(trace, 0, Object.keys(get("categories"))).findLast((r) => r.time <= now);
    const foot = (i + 1) * at.strip - FOOT;
    let base = foot;
    const parts = now > trace.total ? [] : row.device.map((bytes, k) => {
      base -= y(bytes);
      return `<rect class="paint" x="${x(now) - 4}" width="8" y="${base}" height="${y(bytes)}"
        fill="${looks[k].colour}"/>`;
    });
    const [side, anchor] = x(now) > 0.8 * at.right ? [-8, "end"] : [8, "start"];
    return `<path class="now" d="M${x(now)} ${i * at.strip + at.title}V${foot}"/>
      <g class="held">${parts.join("")}</g><text class="halo bold" x="${x(now) + side}"
      y="${Math.max(base + 4, foot - at.tall + 10)}" text-anchor="${anchor}">${
      parts.length ? amount(sum(row.device)) : "done"}</text>`;
  }).join("");
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const traces = tracesOf(get);
  const longest = Math.max(...traces.map((trace) => trace.total));
  const names = Object.keys(get("categories"));
  const most = 1.05 * Math.max(...live(traces[0], 0, names).map((row) => sum(row.device)));
  const [box, svg] = canvas("<g></g><g></g>");
  const [all, held] = svg.children;
  let [width, at] = [0, null];
  const x = (time) => at.gutter + (at.right - at.gutter) * time / longest;
  const y = (bytes) => at.tall * bytes / most;
  const go = (moment) => put(model, "moment", Math.min(1, Math.max(0, moment)));
  const slide = make("input", { type: "range", min: 0, max: 400, "aria-label": "moment",
    oninput: () => go(slide.valueAsNumber / 400) });
  const play = playing((since) => {
    go((get("moment") >= 1 ? 0 : get("moment")) + since / PLAY);
    return get("moment") < 1;
  });
  const clock = make("output");
  const words = make("p", { class: "words" }, "What glows is new in a plan: the bytes that " +
    "it no longer stores, and the calls that it adds.");
  drag(svg, ({ clientX }) => go((clientX - svg.getBoundingClientRect().left - at.gutter)
    / (at.right - at.gutter)));
  const draw = () => {
    width = svg.clientWidth || width || 640;
    at = layout(width);
    const scale = { x, y, at, rows: planNumbers(get), capacity: get("capacity") };
    const [foot, second] = [4 * at.strip + AXIS, 1 / traces[0].tick];
    const ticks = Array.from({ length: Math.floor(longest / second) + 1 }, (_, i) =>
      `<text class="side" x="${x(i * second)}" y="${foot}" text-anchor="middle">${i} s</text>`);
    all.innerHTML = traces.map((trace, i) =>
      strip(trace, i, { ...scale, above: traces[i - 1] }, get)).join("") + ticks.join("");
    svg.setAttribute("viewBox", `0 0 ${width} ${foot + 4}`);
    svg.style.height = `${foot + 4}px`;
  };
  const update = () => {
    if (svg.clientWidth !== width) draw();
    const now = get("moment") * longest;
    held.innerHTML = columns(traces, now, { x, y, at }, get);
    slide.value = 400 * get("moment");
    clock.textContent = `${short(now * traces[0].tick)} s`;
    slide.setAttribute("aria-valuetext", clock.textContent);
    const bytes = planNumbers(get).map(([name, bytes]) => `${name} ${amount(bytes)}`);
    svg.setAttribute("aria-label", `Now on each of 8 GPUs: ${bytes.join(", ")}.`);
  };
  const controls = make("div", { class: "line" }, play.button, slide, clock);
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
    play.stop();
  };
}

export default { render, numbers: planNumbers };
