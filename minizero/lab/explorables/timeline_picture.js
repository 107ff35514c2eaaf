// The timeline's pictures, as SVG: lanes above the curve of live bytes, and rows of memory.

const [RANK, GAP, HEAD, CURVE, AXIS] = [57, 5, 15, 104, 22];  // a rank's lanes take RANK
const [ROW, TITLES, UNITS] = [20, 28, 13];  // a rank's memory, and what stands around
const USUAL = LANES.slice(0, 3);  // what every step has; the others where they are used
const ELSEWHERE = ["host", "disk"];
const RIGHT = 6;  // what is free beside the lanes
const gutterOf = (width) => (width < 520 ? 54 : 66);

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

const lastWord = (unit) => unit.replace(/^.*[ .]/, "");

/** Round numbers for an axis up to `most`, about `count`. */
function rounds(most, count) {
  const power = 10 ** Math.floor(Math.log10(most / count));
  const step = power * [1, 2, 5, 10].find((k) => most / (k * power) <= count);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

/** Slices under way together share the height of their lane: [row, of how many]. */
function shares(slices) {
  const ends = [];
  const rows = slices.map((s) => {
    const free = ends.findIndex((end) => end <= s.begin + 1);  // ticks are rounded
    const row = free < 0 ? ends.length : free;
    ends[row] = s.end;
    return row;
  });
  return rows.map((row) => [row, ends.length]);
}

// Towards the device, else from it: copies and requests to the disk.
const COMES = ["load", "out", "read"];
const lookOf = (verbs, s) => verbs[s.lane === "compute" ? s.verb
  : s.lane.startsWith("to ") ? COMES.includes(s.verb) ? "in" : "out" : s.lane] ?? verbs.launch;

/** One lane of one rank. Notes in `spots` where each slice is: left, right, middle. */
function lane(slices, numbers, y, tall, x, verbs, spots) {
  // What is no wider than a line says nothing: a look from nearer shows it.
  const lasting = slices.filter((s) => s.end > s.begin
    && (s.verb !== "launch" || x(s.end) - x(s.begin) > 1.5));
  const rows = shares(lasting);
  const bars = lasting.map((s, i) => {
    const [[row, of], { colour, ink, stripes }] = [rows[i], lookOf(verbs, s)];
    const [left, wide] = [x(s.begin), Math.max(0.7, x(s.end) - x(s.begin))];
    const [high, top] = [(tall - 2) / of, y + row * (tall - 2) / of];
    const waits = s.verb === "wait";
    spots.set(s, [left, left + wide, top + high / 2]);
    const name = waits ? (wide > 12 ? s.chapter : "") : of > 1 ? ""
      : [s.unit, lastWord(s.unit)].find((text) => text.length * 6 + 4 < wide);
    return `<rect class="s paint" data-i="${numbers.get(s)}" x="${left}" y="${top}"
      width="${wide}" height="${high}" fill="${waits ? "url(#waiting)" : colour}"/>` +
      (stripes && !waits ? `<rect class="paint" pointer-events="none" x="${left}" y="${top}"
        width="${wide}" height="${high}" fill="url(#leaving)"/>` : "") +
      (name ? `<text class="halo ${waits ? "bold" : "paint"}" pointer-events="none" text-anchor="middle"
        style="${waits ? "" : `stroke: ${colour}; stroke-width: 2.5`}"
        x="${left + wide / 2}" y="${top + high / 2 + 4}" fill="${waits ? "CanvasText" : ink}">${escaped(name)}</text>` : "");
  });
  const moments = slices.filter((s) => s.end === s.begin).map((s) => {
    spots.set(s, [x(s.begin), x(s.begin), y]);
    return `<path class="s" data-i="${numbers.get(s)}" fill="CanvasText"
      d="M${x(s.begin)} ${y + 4}l-3.5 -6h7z"/>`;
  });
  return bars.join("") + moments.join("");
}

/** Device bytes, stacked, and lines for what is elsewhere; `top` bytes are its height.
 *  `above`: the most under data parallelism, if that is another step. */
function curve(rows, base, { top, above }, [left, right], x, end, categories) {
  const y = (bytes) => base - CURVE * bytes / top;
  const stairs = (of) => rows.map((row, i) =>
    `${i ? "H" : "M"}${x(row.time)}${i ? "V" : " "}${y(of(row))}`).join("");
  const grid = rounds(top, 3).map((bytes) => `<path class="grid" d="M${left} ${y(bytes)}
    H${right}"/><text x="${left - 5}" y="${y(bytes) + 4}" text-anchor="end">
    ${amount(bytes)}</text>`);
  const upTo = (i) => (row) => row.device.slice(0, i + 1).reduce((a, b) => a + b);
  // Each reaches down to zero, and the next lower one covers it.
  const areas = !rows.length ? [] : Object.values(categories).map(({ colour }, i) =>
    `<path class="s paint" pointer-events="none" fill="${colour}"
      d="${stairs(upTo(i))}H${x(end)}V${base}H${x(rows[0].time)}Z"/>`).reverse();
  const away = ELSEWHERE.filter((place) => rows.some((row) => row[place])).map((place) =>
    `<path class="off ${place}" d="${stairs((row) => row[place])}H${x(end)}"/>
      <text class="halo" x="${right - 2}" y="${y(rows.at(-1)[place]) - 3}" text-anchor="end">${
        place}</text>`);
  const most = rows.reduce((a, b) => deviceBytes(b) > deviceBytes(a) ? b : a, rows[0]);
  const limit = above && `<path class="above" d="M${left} ${y(above)}H${right}"/>
    <text x="${right - 2}" y="${y(above) - 4}" text-anchor="end">data parallel, at most
    ${amount(above)}</text>`;
  const peak = most && `<text class="halo" x="${x(most.time)}" y="${y(deviceBytes(most)) - 4}">at most
    ${amount(deviceBytes(most))}</text>`;
  return [...grid, ...areas, ...away, limit, peak].join("");
}

/** What of a trace does not change with the moment, and where things are in it.
 *
 *  stacked: the categories of the curve; parts: lanes and curve, if they are there; ranks: whose lanes; window: the first and
 *  the last tick of the axis; ends: [ticks, names] of other plans' steps, drawn as ghosts;
 *  point: a time, and what is said of it. */
function picture(trace, rank, width, scale, { verbs, stacked, parts, ranks, window, ends, point }) {
  const [left, right] = [gutterOf(width), width - RIGHT];
  const [first, last] = window;
  const x = (time) => left + (right - left)
    * Math.min(1.005, Math.max(-0.005, (time - first) / (last - first)));
  const used = LANES.filter((name) =>
    USUAL.includes(name) || trace.slices.some((s) => s.lane === name));
  const high = RANK * (ranks.length > 1 ? 1 : 1.5);
  const [each, tall] = [HEAD + high + GAP, high / used.length];
  const [spots, numbers] = [new Map(), new Map(trace.slices.map((s, i) => [s, i]))];
  const out = [`<defs><pattern id="waiting" width="5" height="5" patternTransform="rotate(45)"
    patternUnits="userSpaceOnUse"><path d="M0 0V5" stroke="CanvasText" opacity="0.45"
    stroke-width="2"/></pattern><pattern id="leaving" width="5" height="5"
    patternTransform="rotate(45)" patternUnits="userSpaceOnUse"><path d="M0 0V5"
    stroke="${verbs.out.stripes}" stroke-width="2.5"/></pattern></defs>`];
  const at = point && Math.min(Math.max(x(point[0]), left + 4), right - 4);
  const toLeft = at > (left + right) / 2;
  const said = [];  // of the point, in lines that fit beside it
  for (const word of point?.[1].split(" ") ?? []) {
    const longer = `${said.at(-1) ?? ""} ${word}`.trim();
    if (said.length && longer.length < (toLeft ? at - left : right - at) / 7) said[said.length - 1] = longer;
    else said.push(word);
  }
  const top = point ? 8 + 13 * said.length : 0;
  const rows = parts.includes("lanes") ? ranks : [];
  rows.forEach((r, k) => {
    const all = r === trace.ranks ? "the same step, simulated"
      : trace.alike && ranks.length < trace.ranks ? `each of ${trace.ranks} ranks` : `rank ${r}`;
    out.push(`<text class="bold" x="0" y="${top + k * each + HEAD - 5}">${all}</text>`);
    used.forEach((name, i) => {
      const y = top + k * each + HEAD + i * tall;
      const slices = trace.slices.filter((s) => s.rank === r && s.lane === name
        && s.begin <= last && s.end >= first);
      out.push(`<text x="0" y="${y + tall / 2 + 3}">${name.replace("to ", "")}</text>
        <path class="grid" d="M${left} ${y + tall - 0.5}H${right}"/>`,
        lane(slices, numbers, y, tall, x, verbs, spots));
    });
  });
  let base = top + rows.length * each;
  if (parts.includes("curve")) {
    base += 22 + CURVE;
    const title = `<tspan class="bold">live bytes, rank ${rank}</tspan>`;
    const names = Object.entries(stacked).map(([name, { colour }]) =>
      `<tspan dx="12" class="paint patch" fill="${colour}">■</tspan> ${name}`);
    out.push(`<text x="0" y="${base - CURVE - 14}">${title}${width < 520 ? "" : names.join("")}</text>`,
      curve(live(trace, rank, Object.keys(stacked)), base, scale, [left, right], x,
        trace.total, stacked));
  }
  const begin = 1e3 * first * trace.tick;
  const ticks = rounds(1e3 * (last - first) * trace.tick, width < 520 ? 4 : 8);
  const from = begin && ticks[1] * Math.ceil(begin / ticks[1]);
  for (const [i, time] of ticks.map((tick) => tick + from).entries()) {
    if (time / 1e3 / trace.tick > last) continue;
    out.push(`<text x="${x(time / 1e3 / trace.tick)}" y="${base + 15}"
      text-anchor="middle">${short(time)}${i ? "" : " ms"}</text>`);
  }
  let foot = base + AXIS;
  for (const [end, name] of ends.filter(([end]) => end >= first && end <= last)) {
    const side = x(end) > (left + right) / 2 ? ["end", -4] : ["start", 4];
    out.push(`<path class="ghost" d="M${x(end)} ${top}V${foot + 10}"/>
      <text class="halo" x="${x(end) + side[1]}" y="${foot + 9}" text-anchor="${side[0]}">${
      escaped(LIST.format(name))} end${name.length > 1 ? "" : "s"}, ${short(1e3 * end * trace.tick)} ms</text>`);
    foot += 14;
  }
  if (point) {
    const [anchor, from] = toLeft ? ["end", at - 8] : ["start", at + 8];
    out.push(`<path class="point" d="M${at} 2V${base}m-4 ${top - 8 - base}h8l-4 6z"/>`,
      ...said.map((text, i) => `<text class="bold" x="${from}" text-anchor="${anchor}"
        y="${11 + 13 * i}">${escaped(text)}</text>`));
  }
  // As high under every plan.
  return { html: out.join(""), height: base + AXIS + (ends.length ? 46 : 0), base, x, spots };
}

/** The units of each category that are ever there, and the most bytes of each. */
function slots(traces, categories) {
  const most = new Map(categories.map((category) => [category, new Map()]));
  for (const trace of traces) {
    const now = Array.from({ length: trace.ranks }, () => ({}));
    for (const { rank, changes } of trace.moments) {
      for (const [, category, unit, bytes] of changes) {
        const [slot, units] = [`${category}/${unit}`, most.get(category)];
        now[rank][slot] = (now[rank][slot] ?? 0) + bytes;
        units.set(unit, Math.max(units.get(unit) ?? 0, now[rank][slot]));
      }
    }
  }
  const order = [...most.get("parameters").keys()];
  return [...most].map(([category, units]) => [category, [...units].filter(([, n]) => n)
    .sort(([a], [b]) => order.indexOf(a) - order.indexOf(b))])
    .filter(([, units]) => units.length);
}

/** Which categories a slice works on. */
function touched({ lane, verb }) {
  if (lane === "gather") return ["parameters"];
  if (lane === "reduce") return ["gradients"];
  return { forward: ["parameters", "activations"], update: ["optimizer"], read: ["optimizer"],
    backward: ["parameters", "gradients", "activations"], write: ["optimizer"],
    release: ["parameters"], load: ["parameters"], out: ["parameters"], in: ["gradients"],
    add: ["gradients"] }[verb] ?? [];
}

/** A row a rank, a column a category: a box for each unit, filled as far as it is there,
 *  pale where it is on its way, and in outline where it is off the device. */
function memory(trace, time, shown, all, width, lit, categories) {
  const [gutter, gap] = [gutterOf(width), 10];
  const wide = (width - gutter - RIGHT - gap * (all.length - 1)) / all.length;
  const out = [];
  const coming = trace.slices.filter((s) =>
    s.lane === "gather" && s.begin <= time && time < s.end);
  const text = (x, y, words, more = "") => `<text x="${x}" y="${y}" ${more}>${words}</text>`;
  for (let rank = 0; rank < trace.ranks; rank++) {
    const [there, y] = [held(trace, rank, time), TITLES + rank * ROW];
    out.push(text(0, y + 12, `rank ${rank}`));
    all.forEach(([category, units], column) => {
      const [from, each] = [gutter + column * (wide + gap), wide / units.length];
      const { colour } = categories[category];
      if (rank === shown) {
        const bytes = units.reduce((sum, [unit]) =>
          sum + (there.get(`${category}/${unit}`)?.device ?? 0), 0);
        const name = category.length * 7 < wide ? category : `${category.slice(0, 5)}.`;
        const shown = wide < 45 ? Number(bytes.toPrecision(3)) : bytes;  // 674 kB, not 674.1
        out.push(text(from, 10, name, `class="bold"`), text(from, 22, amount(shown)));
      }
      units.forEach(([unit, most], i) => {
        const [x, box, now] = [from + i * each, each - 2, there.get(`${category}/${unit}`)];
        const part = Math.min(1, (now?.device ?? 0) / most);
        // A shard stands at its own place in the whole.
        const own = x + box * rank / trace.ranks;
        const away = ELSEWHERE.find((place) => now?.[place]);
        const pale = category === "parameters" && part === 1
          && coming.some((s) => s.rank === rank && s.unit === unit);
        const on = lit?.rank === rank && touched(lit).includes(category)
          && (!unit || unit === lit.unit);
        const sharded = unit && part && category !== "activations"
          && part * trace.ranks < 1.001;
        const paint = (left, share, more = "") => `<rect class="paint" x="${left}" y="${y}"
          width="${share * box}" height="${ROW - 4}" fill="${colour}" ${more}/>`;
        out.push(`<rect class="slot" x="${x}" y="${y}" width="${box}" height="${ROW - 4}"/>`,
          pale ? paint(x, 1, `opacity="0.4"`) + paint(own, 1 / trace.ranks)
            : sharded ? paint(own, 1 / trace.ranks) : paint(x, part),
          away ? `<rect class="off ${away}" x="${own + 0.6}" y="${y + 2}"
            width="${Math.max(1, box / trace.ranks - 1.2)}" height="${ROW - 8}"/>` : "",
          on ? `<rect class="m lit" x="${x}" y="${y}" width="${box}" height="${ROW - 4}"/>` : "");
      });
    });
  }
  all.forEach(([, units], column) => units.forEach(([unit], i) => {
    const [each, name] = [wide / units.length, lastWord(unit)];
    if (name.length * 6 < each) out.push(text(gutter + column * (wide + gap) + (i + 0.5) * each - 1,
      TITLES + trace.ranks * ROW + 8, escaped(name), `text-anchor="middle"`));
  }));
  return { html: out.join(""), height: TITLES + trace.ranks * ROW + UNITS };
}

/** Arrows of one collective: from each rank's send to where each other has received. */
function flows(trace, { call, peers }, spots) {
  const alike = trace.slices.filter((s) =>
    s.call === call && spots.has(s) && (peers?.includes(s.rank) ?? true));
  return alike.flatMap((from) => alike.filter((to) => to !== from).map((to) => {
    const [[x0, , y0], [, x1, y1]] = [spots.get(from), spots.get(to)];
    const back = y1 > y0 ? -4 : 4;
    return `<path class="arrow" d="M${x0} ${y0}L${x1} ${y1}m-5 ${back}l5 ${-back}l-6 1"/>`;
  })).join("");
}

const TELLS = { forward: "runs the forward of %", backward: "runs the backward of %",
  update: "updates its part of %", wait: "waits for %", launch: "launches a call for %",
  all_gather: "gathers the parameters of %", reduce_scatter: "reduces the gradients of %",
  all_reduce: "reduces the gradients of %", read: "reads % from disk",
  write: "writes % to disk", load: "copies the shard of % from the host",
  out: "copies the shard of % from the host", add: "copies gradients of % to the host",
  in: "copies gradients of % to the host" };
const LIST = new Intl.ListFormat("en-GB");

/** What a rank does, as the end of a sentence; with several units alike it is told once. */
function tells(slices) {
  const alike = Map.groupBy(slices, (s) => TELLS[s.verb] ?? `${s.lane}: ${says(s)}`);
  return [...alike].map(([told, all]) => told.replace("%", () =>
    LIST.format(new Set(all.map((s) => s.unit || "the model"))))).join(", and ");
}

/** A slice in words, and the line of the package that does it. */
function about(trace, slice) {
  const [path, name, line] = slice.source;
  const moved = slice.bytes ? `, ${amount(slice.bytes)}` : "";
  const until = slice.end > slice.begin ? ` to ${ms(trace, slice.end)}` : "";
  const here = trace.slices.filter((s) => s.call === slice.call).map((s) => s.rank);
  const missing = slice.call < 0 ? [] : (slice.peers ?? Array.from({ length: trace.ranks },
    (_, rank) => rank)).filter((rank) => !here.includes(rank));
  const [left, absent] = [true, false].map((there) => missing.filter((rank) =>
    trace.slices.some((s) => s.rank === rank) === there).join(", "));
  const waits = (left && `It waits for rank ${left}, which made no such call. `)
    + (absent && `It needs rank ${absent}, whose part is not here. `);
  const what = `${says(slice)}, rank ${slice.rank}${moved}, ${ms(trace, slice.begin)}${until}. `
    + waits;
  if (!name) return [what];
  const root = document.documentElement.dataset.content_root;  // in the book's pages
  const place = root === undefined ? `${path}, ${name}`
    : make("a", { href: `${root}source/${path}.html#${name}` }, `${path}, ${name}`);
  return [what, place, ": ", make("code", {}, line)];
}
