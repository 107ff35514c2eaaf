// The timeline's pictures, as SVG: lanes above the curve of live bytes, and rows of memory.

const [LANE, GAP, HEAD, CURVE, AXIS] = [13, 6, 17, 104, 22];
const ELSEWHERE = ["host", "disk"];
const RIGHT = 6;  // what is free beside the lanes
const gutterOf = (width) => (width < 520 ? 54 : 66);

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

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

const lookOf = (verbs, s) => verbs[s.lane === "compute" ? s.verb : s.lane] ?? verbs.launch;

/** One lane of one rank. Notes in `spots` where each slice is: left, right, middle. */
function lane(slices, numbers, y, x, verbs, spots) {
  const lasting = slices.filter((s) => s.end > s.begin);
  const rows = shares(lasting);
  const bars = lasting.map((s, i) => {
    const [[row, of], { colour, ink }] = [rows[i], lookOf(verbs, s)];
    const [left, wide] = [x(s.begin), Math.max(0.7, x(s.end) - x(s.begin))];
    const [high, top] = [(LANE - 2) / of, y + row * (LANE - 2) / of];
    const waits = s.verb === "wait";
    spots.set(s, [left, left + wide, top + high / 2]);
    const name = of > 1 || waits ? undefined
      : [s.unit, s.unit.replace(/^.*[ .]/, "")].find((text) => text.length * 6 + 4 < wide);
    return `<rect class="s paint" data-i="${numbers.get(s)}" x="${left}" y="${top}"
      width="${wide}" height="${high}" fill="${waits ? "url(#waiting)" : colour}"/>` +
      (name ? `<text class="paint" pointer-events="none" text-anchor="middle"
        x="${left + wide / 2}" y="${top + 9.5}" fill="${ink}">${escaped(name)}</text>` : "");
  });
  const moments = slices.filter((s) => s.end === s.begin).map((s) => {
    spots.set(s, [x(s.begin), x(s.begin), y]);
    return `<path class="s" data-i="${numbers.get(s)}" fill="CanvasText"
      d="M${x(s.begin)} ${y + 4}l-3.5 -6h7z"/>`;
  });
  return bars.join("") + moments.join("");
}

/** Device bytes, stacked, and lines for what is elsewhere; `top` bytes are its height. */
function curve(rows, base, top, [left, right], x, end, categories) {
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
      <text x="${right - 2}" y="${y(rows.at(-1)[place]) - 3}" text-anchor="end">${place}</text>`);
  return [...grid, ...areas, ...away].join("");
}

/** What of a trace does not change with the moment, and where things are in it. */
function picture(trace, rank, width, top, verbs, categories) {
  const [left, right] = [gutterOf(width), width - RIGHT];
  const x = (time) => left + (right - left) * time / trace.total;
  const each = HEAD + LANES.length * LANE + GAP;
  const [spots, numbers] = [new Map(), new Map(trace.slices.map((s, i) => [s, i]))];
  const out = [`<defs><pattern id="waiting" width="5" height="5" patternTransform="rotate(45)"
    patternUnits="userSpaceOnUse"><path d="M0 0V5" stroke="CanvasText" opacity="0.45"
    stroke-width="2"/></pattern></defs>`];
  for (let r = 0; r < trace.ranks; r++) {
    out.push(`<text class="bold" x="0" y="${r * each + HEAD - 5}">rank ${r}</text>`);
    LANES.forEach((name, i) => {
      const y = r * each + HEAD + i * LANE;
      const slices = trace.slices.filter((s) => s.rank === r && s.lane === name);
      out.push(`<text x="0" y="${y + 10}">${name}</text>
        <path class="grid" d="M${left} ${y + LANE - 0.5}H${right}"/>`,
        lane(slices, numbers, y, x, verbs, spots));
    });
  }
  const base = trace.ranks * each + 18 + CURVE;
  out.push(`<text class="bold" x="0" y="${base - CURVE - 10}">live bytes, rank ${rank}</text>`,
    curve(live(trace, rank, Object.keys(categories)), base, top, [left, right], x,
      trace.total, categories));
  for (const time of rounds(1e3 * trace.total * trace.tick, width < 520 ? 4 : 8))
    out.push(`<text x="${x(time / 1e3 / trace.tick)}" y="${base + 15}"
      text-anchor="middle">${short(time)}${time ? "" : " ms"}</text>`);
  return { html: out.join(""), height: base + AXIS, base, x, spots };
}

/** Where each category of each unit stands in a row of memory: the most bytes of it. */
function slots(traces, categories) {
  const most = new Map();
  for (const trace of traces) {
    const now = Array.from({ length: trace.ranks }, () => new Map());
    for (const { rank, changes } of trace.moments) {
      for (const [, category, unit, bytes] of changes) {
        const slot = `${category}/${unit}`;
        now[rank].set(slot, (now[rank].get(slot) ?? 0) + bytes);
        most.set(slot, Math.max(most.get(slot) ?? 0, now[rank].get(slot)));
      }
    }
  }
  const order = ([slot]) => categories.indexOf(slot.split("/")[0]);
  return [...most].filter(([, bytes]) => bytes).sort((a, b) => order(a) - order(b));
}

/** A row of memory a rank: what of each slot is there, and in outline what is elsewhere. */
function memory(trace, time, all, width, lit, categories) {
  const whole = all.reduce((sum, [, bytes]) => sum + bytes, 0);
  const room = width - gutterOf(width) - RIGHT - all.length;
  const rows = Array.from({ length: trace.ranks }, (_, rank) => {
    const [there, y] = [held(trace, rank, time), rank * 22 + 2];
    let left = gutterOf(width);
    const cells = all.map(([slot, bytes]) => {
      const [[category, unit], now, wide] = [slot.split("/"), there.get(slot), room * bytes / whole];
      const part = Math.min(1, (now?.device ?? 0) / bytes);
      // A shard stands at its own place in the whole.
      const own = left + wide * rank / trace.ranks;
      const from = unit && part * trace.ranks < 1.001 ? own : left;
      const away = ELSEWHERE.find((place) => now?.[place]);
      const kind = lit?.lane === "reduce" ? "gradients" : "parameters";
      const on = lit?.rank === rank && unit && lit.unit === unit && category === kind;
      const box = `<rect class="slot m ${on ? "lit" : ""}" x="${left}" y="${y}" width="${wide}"
        height="17"/><rect class="paint" x="${from}" y="${y}" width="${part * wide}" height="17"
        fill="${categories[category].colour}"/>` + (away ? `<rect class="off ${away}"
        x="${own + 0.6}" y="${y + 2}" width="${Math.max(1, wide / trace.ranks - 1.2)}"
        height="13"/>` : "");
      left += wide + 1;
      return box;
    });
    return `<text x="0" y="${y + 12}">rank ${rank}</text>${cells.join("")}`;
  });
  return { html: rows.join(""), height: trace.ranks * 22 + 2 };
}

/** Arrows of one collective: from each rank's send to where each other has received. */
function flows(trace, call, spots) {
  const alike = trace.slices.filter((s) => s.call === call && spots.has(s));
  return alike.flatMap((from) => alike.filter((to) => to !== from).map((to) => {
    const [[x0, , y0], [, x1, y1]] = [spots.get(from), spots.get(to)];
    const back = y1 > y0 ? -4 : 4;
    return `<path class="arrow" d="M${x0} ${y0}L${x1} ${y1}m-5 ${back}l5 ${-back}l-6 1"/>`;
  })).join("");
}

/** A slice in words, and the line of the package that does it. */
function about(trace, slice) {
  const [path, name, line] = slice.source;
  const moved = slice.bytes ? `, ${amount(slice.bytes)}` : "";
  const until = slice.end > slice.begin ? ` to ${ms(trace, slice.end)}` : "";
  const what = `${says(slice)}, rank ${slice.rank}${moved}, ${ms(trace, slice.begin)}${until}. `;
  if (!name) return [what];
  const root = document.documentElement.dataset.content_root;  // in the book's pages
  const place = root === undefined ? `${path}, ${name}`
    : make("a", { href: `${root}source/${path}.html#${name}` }, `${path}, ${name}`);
  return [what, place, ": ", make("code", {}, line)];
}
