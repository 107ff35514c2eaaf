// The timeline: lanes of what each rank does in a step, its live bytes under them on the
// same axis, and a row of memory a rank that says who holds what at the moment.

const NAMES = ["stage", "overlap", "prefetch", "offload", "checkpointing",
  "micro_batches", "source", "rank", "zoom", "moment", "n_params"];
const CHOICES = {
  stage: ["plan", [[0, "data parallel"], [1, "ZeRO-1"], [2, "ZeRO-2"], [3, "ZeRO-3"]]],
  offload: ["offload", ["none", "host", "disk"].map((place) => [place, place])],
  source: ["step", [["simulated", "simulated"], ["recorded", "recorded"], ["file", "yours"]]],
  rank: ["bytes of", [0, 1, 2, 3].map((rank) => [rank, `rank ${rank}`])],
  micro_batches: ["micro-batches", [[1, "1"], [2, "2"]]],
  zoom: ["zoom", [1, 2, 4, 8, 16].map((times) => [times, `${times}×`])],
};
const PARTS = ["lanes", "curve", "boxes"];
const SECONDS = 15;  // that playing a step takes

const STYLE = `
  .line { display: flex; flex-wrap: wrap; gap: 6px 16px; align-items: end;
    font-size: 13px; }
  .line select { width: 100%; }
  .check { min-height: 30px; display: flex; gap: 6px; align-items: center; }
  :disabled, .check:has(:disabled) { opacity: 0.5; cursor: default; }
  [hidden] { display: none !important; }
  svg { font-size: 11px; }
  .lanes { touch-action: pan-y; cursor: ew-resize; }
  .s { stroke: color-mix(in srgb, CanvasText 55%, transparent); stroke-width: 0.5; }
  .s.lit, .m.lit { stroke: CanvasText; stroke-width: 2; }
  .now { stroke: CanvasText; stroke-width: 1.2; pointer-events: none; }
  .arrow { stroke: CanvasText; stroke-width: 1; fill: none; pointer-events: none; }
  .grid { stroke: color-mix(in srgb, CanvasText 22%, transparent); pointer-events: none; }
  .ghost { stroke: CanvasText; stroke-dasharray: 2 3; opacity: 0.6; }
  .point { stroke: CanvasText; fill: CanvasText; stroke-width: 1.2; pointer-events: none; }
  [hidden] + .chart { border: 0; padding: 0; margin: 0; }
  .above { stroke: CanvasText; stroke-dasharray: 3 3; }
  .m.lit { fill: none; }
  .patch { stroke: color-mix(in srgb, CanvasText 60%, transparent); stroke-width: 0.5; }
  .off { fill: none; stroke: CanvasText; stroke-width: 1.2; }
  .off.disk { stroke-dasharray: 2 2; } .off.host { stroke-dasharray: 6 2; }
  .slot { fill: color-mix(in srgb, CanvasText 9%, transparent); }
  .phases { display: flex; flex-wrap: wrap; gap: 6px; }
  div.phases { margin: 6px 0 0; }
  .phases button { padding: 2px 10px; }
  .phases [aria-current="true"] { background: #0460a9; color: white; }
  .words { min-height: 3lh; }
  .numbers :is(td, th):not(:nth-child(2), :nth-child(3)) { text-align: left; white-space: normal; }
  caption { caption-side: top; font-weight: 600; color: inherit; }
  .code { min-height: 3lh; margin: 4px 0 0; font-size: 13px; overflow-wrap: anywhere; }
  .calm .words, .calm .code { min-height: 2lh; }  /* one thing at a time is told */
  @container (max-width: 553px) { .words, .code { min-height: 5lh; }
    .calm .words { min-height: 3lh; } .calm .code { min-height: 4lh; } }
  @container (max-width: 400px) { .words { min-height: 6lh; } }
  .chart > button { margin-top: 10px; }
  @container (max-width: 400px) { .numbers { font-size: 12px; } }
  .over { outline: 2px dashed #2f86c8; outline-offset: 4px; }
  .open { position: relative; display: inline-block; cursor: pointer;
    text-decoration: underline; line-height: 30px; }
  .open input { position: absolute; inset: 0; opacity: 0; width: 100%; cursor: pointer; }
  .open:focus-within { outline: 2px solid #2f86c8; }
  @media (forced-colors: active) { .phases [aria-current="true"] { background: Highlight;
    color: HighlightText; forced-color-adjust: none; } }
  @media print { .phases, .open { display: none; } }
`;

// Words of the page's own text; a page without scripts has them plain.
const WORD_STYLE = `
  .timeline-word[role] { text-decoration: underline dotted; text-underline-offset: 3px;
    cursor: pointer; border-radius: 3px; }
  .timeline-word.lit { background: #0460a9; color: white; }
  .timeline-word:focus-visible { outline: 2px solid #2f86c8; outline-offset: 2px; }
  @media print { .timeline-word.lit { background: none; color: inherit; } }
`;
const WORDS = [[/^gather/, "gather"], [/^comput/, "compute"], [/^releas|^free/, "release"],
  [/^reduc/, "reduce"], [/^updat/, "update"]];

/** The setting as Python's `Setting.key`: what does nothing at a stage is off. */
function settingOf(get) {
  const ahead = get("overlap") && get("prefetch") && get("stage") === 3;
  const offload = get("stage") ? get("offload") : "none";
  const many = offload === "none" ? get("micro_batches") : 1;
  return [get("stage"), +get("overlap"), +ahead, offload[0], +get("checkpointing"),
    many].join("");
}

const unpacked = new WeakMap();  // by what they are unpacked from

/** The trace that a setting shows. */
function chosen(get) {
  const recorded = get("source") === "recorded";
  const { tables, traces } = get(recorded ? "recorded" : "steps");
  const packed = traces[recorded ? "recorded" : settingOf(get)];
  const wide = recorded ? 1 : layersOf(get("n_params")) / layersOf(7e9);
  if (unpacked.get(packed)?.wide !== wide)
    unpacked.set(packed, { wide, trace: unpack(tables, packed, wide) });
  return unpacked.get(packed).trace;
}

const ORDER = ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"];

/** When the steps of the plans end that are set as this one: [ticks, names], by time. */
function endsOf(get) {
  const ends = new Map();
  for (const stage of ORDER.keys()) {
    const { total } = chosen((name) => (name === "stage" ? stage : get(name)));
    ends.set(total, [...ends.get(total) ?? [], ORDER[stage]]);
  }
  return [...ends].sort(([a], [b]) => a - b);
}

const tickOf = (trace, moment) => Math.round(moment * trace.total);
const deviceBytes = (row) => row.device.reduce((a, b) => a + b, 0);

/** Rows of a name, bytes of a rank at the moment, and the most in the step. */
function numbersOf(trace, get) {
  const names = Object.keys(get("categories"));
  const rank = Math.min(get("rank"), trace.ranks - 1);
  const now = tickOf(trace, get("moment"));
  const rows = live(trace, rank, names).map((row) => ({
    time: row.time, all: [...row.device, deviceBytes(row), row.host, row.disk] }));
  const then = rows.findLast(({ time }) => time <= now)?.all;
  return [...names, "device", "host", "disk"].map((name, i) => [name, then?.[i] ?? 0,
    rows.reduce((most, { all }) => Math.max(most, all[i]), 0)]);
}

const numbers = (get) => numbersOf(chosen(get), get);

const ms = (trace, ticks) => `${short(1e3 * ticks * trace.tick)} ms`;
/** What the colours of a trace mean; `all`: also of what it has not, but another may. */
function legend({ slices }, verbs, all) {
  const there = (name) => all || slices.some((s) => s.verb === name);
  const { in: comes, out: goes, ...rest } = verbs;
  const computed = Object.entries(rest).filter(([name]) => !LANES.includes(name) && there(name));
  const copies = all || slices.some((s) => s.lane.startsWith("to "));
  const box = key({ ...Object.fromEntries(computed),
    ...(copies ? { "comes to the device": comes, "leaves it": goes } : {}) });
  if (there("release")) box.append(make("span", {}, "▾ release"));
  return box;
}

/** What a rank does not compute in, and the chapter of each; null for a simulated step. */
function losses(trace, rank) {
  const root = document.documentElement.dataset.content_root;  // in the book's pages
  const rows = lost(trace, rank).map(([kind, there, other]) => {
    const [text, file] = GAPS[kind];
    const words = `${parseInt(file)}`;
    return make("tr", {}, make("td", {}, text), make("td", {}, ms(trace, there)),
      make("td", {}, other === null ? "" : ms(trace, other)),
      make("td", {}, root === undefined ? words
        : make("a", { href: `${root}notebooks/${file}.html` }, words)));
  });
  const heads = [`rank ${rank}`, "took", trace.simulated ? "simulated" : "", "chapter"];
  return make("table", {}, make("caption", {}, "Where the time goes in which it computes nothing"),
    make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text))), ...rows);
}

const says = (s) => `${s.verb.replaceAll("_", "-")} ${s.unit}`.trim();

/** Selects and ticks for the settings; `usable` says which of them do something, and
 *  `shows` which are there. */
function settings(model, shows, before) {
  const set = (name, value) => {
    before(name);
    put(model, name, value);
  };
  const selects = Object.entries(CHOICES).map(([name, [title, options]]) => {
    const { box, select, show } = choice(title, options, (value) => set(name, value));
    return [name, select, box, show];
  });
  const ticks = ["overlap", "prefetch", "checkpointing"].map((name) => {
    const box = make("input", { type: "checkbox", onchange: () => set(name, box.checked) });
    return [name, box, make("label", { class: "check" }, box, name),
      (value) => { box.checked = value; }];
  });
  const all = [...selects, ...ticks];
  const update = (own, every) => {
    const simulated = !own && model.get("source") === "simulated";
    const here = simulated && (!model.get("stage") || model.get("offload") === "none");
    const usable = { stage: simulated, overlap: simulated, checkpointing: simulated,
      micro_batches: here,
      prefetch: simulated && model.get("stage") === 3 && model.get("overlap"),
      offload: simulated && model.get("stage") > 0, source: true, rank: true, zoom: true };
    for (const [name, box, outer, show] of all) {
      outer.hidden = !shows(name) || !(every || usable[name]);
      const yours = name === "source" && own;  // so that either other can be chosen
      show(yours ? "file" : model.get(name));
      box.disabled = !usable[name];
      if (name === "source") box.lastChild.hidden = box.lastChild.disabled = !own;
    }
  };
  return { box: make("div", { class: "line" }, ...all.map(([, , outer]) => outer)), update };
}

/** Buttons that go to an event or a phase, and play the step. */
function player({ model, trace, mine, go, next }) {
  const button = (text, title, onclick) =>
    make("button", { type: "button", "aria-label": title, onclick }, text);
  const play = playing((since, calm) => {
    if (model.get("moment") >= 1) go(0);
    const now = tickOf(trace(), model.get("moment"));
    const later = mine().find((s) => s.begin > now)?.begin ?? trace().total;
    go(calm ? later : now + trace().total * since / SECONDS);
    return model.get("moment") < 1;
  });
  const jumps = Object.entries(PHASES).map(([name, wanted]) =>
    [name, button(name, `to the next ${name}`, () => next(wanted))]);
  const all = make("span", { class: "phases" }, ...jumps.map(([, one]) => one));
  const box = make("div", { class: "phases", role: "group", "aria-label": "moments" },
    button("◀", "one event back", () => next(() => true, -1)), play.button,
    button("▶", "one event on", () => next(() => true)), all);
  const update = (on) =>
    jumps.forEach(([name, one]) => one.setAttribute("aria-current", on.has(name)));
  return { box, jumps: all, update, stop: play.stop, playing: play.on };
}

/** Words of the page's text: the first timeline of a page answers to them. */
function textWords(host, next) {
  host.dataset.timeline = "";
  if (!document.querySelector("#timeline-words"))
    document.head.append(make("style", { id: "timeline-words" }, WORD_STYLE));
  const first = () => document.querySelector("[data-timeline]") === host;
  const phaseOf = (word) => WORDS.find(([stem]) =>
    stem.test(word.textContent.trim().toLowerCase()))?.[1];
  const asked = (event) => {
    const word = event.target.closest?.(".timeline-word");
    const meant = event.type === "click" || event.key === "Enter" || event.key === " ";
    if (!word || !meant || !first()) return;
    event.preventDefault();
    next(PHASES[phaseOf(word)]);
  };
  for (const kind of ["click", "keydown"]) document.addEventListener(kind, asked);
  const update = (on) => {
    for (const word of first() ? document.querySelectorAll(".timeline-word") : []) {
      word.setAttribute("role", "button");
      word.tabIndex = 0;
      word.classList.toggle("lit", on.has(phaseOf(word)));
    }
  };
  return { update, end: () => {
    for (const kind of ["click", "keydown"]) document.removeEventListener(kind, asked);
  } };
}

/** Opens traces of the reader's own, here and nowhere else: `opened` gets each, or null,
 *  and a sentence. */
function files(opened) {
  const take = async (list) => {
    const names = list.map((one) => one.name).join(", ");
    try {
      const texts = await Promise.all(list.map((one) => one.text()));
      const trace = fromChrome(...texts.map((text) => JSON.parse(text)));
      const many = trace.slices.filter((s) => s.rank < trace.ranks).length;
      opened(trace, `${names}: ${many} ${many > 1 ? "slices" : "slice"} of ${trace.ranks} ` +
        `${trace.ranks > 1 ? "ranks" : "rank"}. ` +
        (trace.dropped ? `The last ${trace.dropped} events are left out. ` : ""));
    } catch (error) {
      opened(null, `${names} is no trace that can be drawn: ${error.message}. `);
    }
  };
  // Any name: the parts of a hang end in .rank0 and so on.
  const picker = make("input", { type: "file", multiple: "",
    "aria-label": "open a trace", onchange: () => {
      take([...picker.files]);
      picker.value = "";  // the next choice does not add to this one
    } });
  const drops = (box) => {
    for (const kind of ["dragenter", "dragover", "dragleave", "drop"])
      box.addEventListener(kind, (event) => {
        event.preventDefault();
        box.classList.toggle("over", kind === "dragenter" || kind === "dragover");
        if (kind === "drop") take([...event.dataTransfer.files]);
      });
  };
  return { box: make("label", { class: "open" }, "Open a trace, or drop one here", picker),
    drops };
}

/** The drawing: pressing and dragging asks to `go` to a time, pointing to `light` one. */
function drawing(trace, go, light) {
  const [lanes, blocks] = ["lanes", "blocks"].map((kind) => {
    const [, svg] = canvas(`<g></g><g></g><path class="now"/><g></g>`);
    svg.classList.add(kind);
    return svg;
  });
  const [all, arrows, now, texts] = lanes.children;
  let [parts, drawn, lit, width, view] = [null, "", null, 640, null];
  drag(lanes, (event) => {
    const { left, width } = lanes.getBoundingClientRect();
    const gutter = gutterOf(width);
    const [first, last] = view.window;
    go(first + (event.clientX - left - gutter) / (width - gutter - RIGHT) * (last - first));
  });
  const point = (slice) => { if (lit !== slice) light(lit = slice); };
  lanes.addEventListener("pointermove", (event) => {
    if (!event.buttons) point(trace().slices[event.target.dataset.i] ?? null);
  });
  lanes.addEventListener("pointerleave", () => point(null));
  const size = (box, width, height) => {
    box.setAttribute("viewBox", `0 0 ${width} ${height}`);
    box.style.height = `${height}px`;
  };
  /** `state`: what the picture depends on, beside the trace. `plain`: the step that is
   *  drawn to one scale with it, if there is one. `seen`: what `picture` takes. */
  const update = (state, plain, rank, time, slice, seen) => {
    const [one, names] = [trace(), Object.keys(seen.categories)];
    const { categories } = view = seen;
    width = lanes.clientWidth || width;  // JupyterLab takes cells out of the page and back
    if (drawn !== `${width} ${state} ${seen.window}`) {
      const most = (other, of) => live(other, rank, Object.keys(seen.stacked)).map(of).reduce((a, b) =>
        Math.max(a, b), 1);
      const whole = (row) => Math.max(deviceBytes(row), row.host, row.disk);
      const [top, above] = [1.05 * most(plain ?? one, whole), plain && most(plain, deviceBytes)];
      parts = picture(one, rank, width, { top, above: plain === one ? 0 : above }, seen);
      parts.slots = slots(plain ? [plain, one] : [one], names);
      all.innerHTML = parts.html;
      texts.replaceChildren(...all.querySelectorAll("text"));  // over the line of the moment
      size(lanes, width, parts.height);
      drawn = `${width} ${state} ${seen.window}`;
    }
    blocks.parentElement.hidden = !seen.parts.includes("boxes");
    now.setAttribute("d", `M${parts.x(time)} 0V${parts.base}`);
    all.querySelector(".lit")?.classList.remove("lit");
    if (slice) all.querySelector(`[data-i="${one.slices.indexOf(slice)}"]`)?.classList.add("lit");
    arrows.innerHTML = slice && slice.call >= 0 ? flows(one, slice, parts.spots) : "";
    const rows = memory(one, time, rank, parts.slots, width, slice, categories);
    blocks.firstChild.innerHTML = rows.html;
    size(blocks, width, rows.height);
    return [parts.x(0), parts.x(one.total)];
  };
  return { lanes, blocks: make("div", {}, make("div", { class: "name" },
    "who holds what now, not to scale"), blocks), boxes: blocks, update, lit: () => lit };
}

function render({ model, el }) {
  let [file, opening, opened, asked] = [null, "", 0, null];  // `asked`: a slice
  const get = (name) => model.get(name);
  const trace = () => file ?? chosen(get);
  const rank = () => Math.min(get("rank"), trace().ranks - 1);
  const mine = () => trace().slices.filter((s) => s.rank === rank());
  const go = (time) => put(model, "moment", Math.max(0, Math.min(1, time / trace().total)));
  const next = (wanted, by = 1) => {
    const [all, now] = [mine(), tickOf(trace(), get("moment"))];
    const from = asked?.begin === now ? all.indexOf(asked)
      : by > 0 ? all.findLastIndex((s) => s.begin <= now) : all.findIndex((s) => s.begin >= now);
    const found = by > 0 ? all.find((s, i) => i > from && wanted(s)) ?? all.find(wanted)
      : all.findLast((s, i) => i < from && wanted(s)) ?? all.findLast(wanted);
    if (!found) return;
    asked = found;
    if (found.begin === now) changed();
    else go(found.begin);
  };
  // Until the reader asks for all, there is what the chapter is about.
  let every = [...PARTS, ...NAMES].every((name) => name === "n_params" || get("shown").includes(name));
  const shows = (name) => every || get("shown").includes(name);
  const more = make("button", { type: "button", onclick: () => {
    every = true;
    more.remove();
    changed();
  } }, "Show everything");
  const meant = get("point") && [get("moment"), settingOf(get) + get("source") + get("n_params")];
  const controls = settings(model, shows, (name) => {
    if (name !== "source" || !opening) return;
    [file, opening] = [null, ""];
    changed();  // the value that is chosen may be the one from before
  });
  const buttons = player({ model, trace, mine, go, next });
  const text = textWords(el, next);
  const own = files((found, sentence) => {
    [file, opening, opened] = [found, sentence, opened + 1];
    const lines = get("sources");
    for (const s of found?.slices ?? [])
      if (!s.source[0]) s.source = lines[s.unit] ?? lines[`${s.verb} ${s.phase}`] ?? lines[s.verb] ?? [""];
    const [first] = found?.slices ?? [];  // of a part of a rank that is not the chosen one
    if (first?.rank < CHOICES.rank[1].length && !mine().length) put(model, "rank", first.rank);
    changed();
  });
  const shown = drawing(trace, go, () => changed());
  const words = make("p", { class: "words", role: "status" });
  const code = make("p", { class: "code" });
  const colours = make("div");
  const lostTable = make("div", { class: "numbers" });
  const scrub = make("input", { type: "range", class: "scrub", min: 0, max: 1, step: 0.001,
    "aria-label": "moment", oninput: () => put(model, "moment", scrub.valueAsNumber) });

  const changed = () => {
    const [one, rows] = [trace(), mine()];
    const time = tickOf(one, get("moment"));
    const begun = rows.filter((s) => s.begin <= time);
    const slice = shown.lit() ?? (asked?.begin === time && rows.includes(asked) ? asked
      : begun.findLast((s) => s.end > time || s.begin === time));
    // One scale for all that is simulated: less memory looks like less.
    const zero = { stage: 0, overlap: false, checkpointing: false };
    const plain = file || get("source") === "recorded" ? null
      : chosen((name) => zero[name] ?? get(name));
    const ends = plain && shows("stage") ? endsOf(get) : [];
    // A chapter shows one rank, from where it begins; another may have begun before.
    const start = every || one.simulated ? 0 : Math.min(time, rows[0]?.begin ?? 0);
    const page = (Math.max(one.total, ...ends.map(([end]) => end)) - start) / get("zoom");
    const first = start + page * Math.min(get("zoom") - 1, Math.floor((time - start) / page));
    const categories = get("categories");
    const only = Object.entries(categories).filter(([name]) => !every && shows(name));
    const told = `${settingOf(get)}${get("source")}${get("n_params")}`;
    controls.update(file, every);
    colours.replaceChildren(legend(one, get("verbs"), every));
    const compared = file || one.simulated;
    if (compared) lostTable.replaceChildren(losses(one, rank()));
    lostTable.hidden = !compared;
    controls.box.hidden = !Object.keys(CHOICES).some(shows);
    chart.classList.toggle("calm", !every && !get("overlap"));
    own.box.hidden = buttons.jumps.hidden = !every;
    const [from, to] = shown.update(`${told} ${rank()} ${opened} ${!file} ${every}`, plain,
      rank(), time, slice, { verbs: get("verbs"), categories, stacked: only.length ? Object.fromEntries(only) : categories,
        parts: PARTS.filter(shows), window: [first, first + page],
        ends: ends.filter(([end]) => end !== one.total),
        ranks: [...(every ? Array(one.ranks).keys() : [rank()]), ...(one.simulated ? [one.ranks] : [])],
        point: !file && meant?.[1] === told ? [tickOf(one, meant[0]), get("point")] : null });
    const [left, wide] = get("zoom") > 1 ? ["0", "100%"] : [`${from - 10}px`, `${to - from + 20}px`];
    Object.assign(scrub.style, { marginLeft: left, width: wide });
    scrub.value = get("moment");
    scrub.setAttribute("aria-valuetext", `${ms(one, time)} of ${ms(one, one.total)}`);
    const doing = tells(begun.filter((s) => s.end > time).sort((a, b) =>
      LANES.indexOf(a.lane) - LANES.indexOf(b.lane)));
    const bytes = numbersOf(one, get).find(([name]) => name === "device")[1];
    words.setAttribute("aria-live", buttons.playing() ? "off" : "polite");
    const model = get("n_params") === 7e9 || !plain ? "" : "Blocks of a model of " +
      `${billions(get("n_params"))}, scaled from those of one of 7B. `;
    words.textContent = `${opening}${model}At ${ms(one, time)} of ${ms(one, one.total)} rank ${rank()} ` +
      `${doing || "does nothing"}. ${amount(bytes)} are live on its device.`;
    shown.lanes.setAttribute("aria-label", `Lanes and live bytes. ${words.textContent}`);
    shown.boxes.setAttribute("aria-label", `Memory of each rank at ${ms(one, time)}`);
    code.replaceChildren(...(slice ? about(one, slice) : []));
    const near = (s) => time < Math.max(s.end, s.begin + one.total / 60);
    const on = new Set(Object.keys(PHASES).filter((name) =>
      begun.some((s) => near(s) && PHASES[name](s))));
    buttons.update(on);
    text.update(on);
  };

  const chart = make("div", { class: "chart" }, colours, shown.lanes, scrub, buttons.box, words,
    shown.blocks, code, lostTable, own.box, every ? "" : more);
  own.drops(chart);
  const end = mount({ model, el }, {
    title: "A step of each rank", names: NAMES, style: STYLE, update: changed,
    content: [controls.box, chart],
    table: { head: ["bytes of the rank", "now", "at most"],
      rows: () => numbersOf(trace(), get), say: amount },
    resize: () => changed(),
  });
  document.addEventListener("DOMContentLoaded", changed, { once: true });  // later words
  return () => {
    buttons.stop();
    text.end();
    end();
  };
}

export default { render, numbers };
