// Traces: from the lists that packing.py makes, or from Chrome trace JSON.
// A trace is { ranks, tick, total, slices, moments }; times are whole ticks.

const LANES = ["compute", "gather", "reduce", "to host", "to disk"];

const MOST = 50_000;  // events of a file that are drawn: its first

// What the words of the text ask for, and which slices are that.
const PHASES = {
  gather: (s) => s.lane === "gather",
  compute: (s) => s.verb === "forward" || s.verb === "backward",
  release: (s) => s.verb === "release",
  reduce: (s) => s.lane === "reduce",
  update: (s) => s.verb === "update",
};

/** Numbers the calls of each rank, which have one number on every rank then; `alike`: what
 *  one rank does, each does. */
function complete({ ranks, tick, slices, moments, alike = false }) {
  const all = (list) => alike
    ? list.flatMap((s) => Array.from({ length: ranks }, (_, rank) => ({ ...s, rank }))) : list;
  const trace = { ranks, tick, slices: all(slices), moments: all(moments) };
  trace.slices.sort((a, b) => a.begin - b.begin);
  const calls = Array(ranks).fill(0);
  for (const s of trace.slices) s.call ??= s.joined ? calls[s.rank]++ : -1;
  trace.total = [...slices.map((s) => s.end), ...moments.map((m) => m.time)]
    .reduce((most, end) => Math.max(most, end), 1);
  return trace;
}

/** Tables and lists of packing.py. */
function unpack(tables, packed) {
  const [slices, moments] = [[], []];
  let [all, time] = [packed.slices, 0];
  for (let i = 0; i < all.length; i += 4) {
    const [lane, verb, unit, bytes, code, joined] = tables.slices[all[i + 1]];
    time += all[i + 2];
    slices.push({ rank: all[i], lane, verb, unit, bytes, joined, source: tables.sources[code],
      peers: joined.length ? joined : null, begin: time, end: time + all[i + 3] });
  }
  [all, time] = [packed.moments, 0];
  for (let i = 0; i < all.length; i += 3 + all[i + 2]) {
    time += all[i + 1];
    const changes = all.slice(i + 3, i + 3 + all[i + 2]).map((k) => tables.changes[k]);
    moments.push({ rank: all[i], time, changes });
  }
  const alike = new Set([...slices, ...moments].map((s) => s.rank)).size === 1;
  return complete({ ranks: packed.ranks, tick: tables.tick, slices, moments, alike });
}

/** Chrome trace JSON, of one file or of the parts of several ranks. */
function fromChrome(...files) {
  const events = files.flatMap((file) => (Array.isArray(file) ? file : file?.traceEvents));
  if (!events.length || events.some((event) => typeof event?.ph !== "string"))
    throw new Error("it has no traceEvents");
  const all = events.filter(({ ph }) => ph === "X" || ph === "C" || ph === "i");
  if (all.some(({ ph, ts, dur }) => !Number.isFinite(ts) || (ph === "X" && !Number.isFinite(dur))))
    throw new Error("an event of it has no time, a number of microseconds");
  const shown = all.length > MOST ? all.sort((a, b) => a.ts - b.ts).slice(0, MOST) : all;
  const seen = [...new Set(shown.map((event) => event.pid))].sort((a, b) => a - b);
  // A part of our own knows how many ranks there were, and which of them it is of.
  const told = files.find((file) => file?.otherData?.ranks <= 1024)?.otherData.ranks ?? 0;
  const pids = seen.every((pid) => pid < told) ? Array.from({ length: told }, (_, i) => i) : seen;
  const lanes = new Map(events.filter((e) => e.ph === "M" && e.name === "thread_name")
    .map((e) => [`${e.pid}/${e.tid}`, e.args?.name]));
  const start = shown.reduce((least, event) => Math.min(least, event.ts), Infinity);
  const [slices, moments, before] = [[], [], {}];
  for (const { ph, pid, tid, ts, dur, name, cat, args } of shown) {
    const [rank, begin] = [pids.indexOf(pid), Math.round(ts - start)];
    if (ph === "C") {
      const place = /^live bytes, (\w+)$/.exec(name)?.[1];
      if (!place) continue;
      const changes = Object.entries(args ?? {}).map(([category, bytes]) => {
        const key = `${pid}/${place}/${category}`;
        const more = bytes - (before[key] ?? 0);
        before[key] = bytes;
        return [place, category, "", more];
      });
      moments.push({ rank, time: begin, changes: changes.filter((c) => c[3]) });
    } else {
      const lane = lanes.get(`${pid}/${tid}`) ?? cat;
      const end = begin + (dur ? Math.max(1, Math.round(dur)) : 0);
      slices.push({ rank, begin, end, verb: String(args?.verb ?? name),
        lane: LANES.includes(lane) ? lane : "compute", unit: String(args?.unit ?? ""),
        bytes: args?.bytes ?? 0, call: args?.call ?? -1, peers: [args?.peers ?? []].flat().length ? [args.peers].flat() : null,
        phase: args?.phase ?? "", source: String(args?.source ?? "").split("#") });
    }
  }
  if (!slices.length) throw new Error("it has no slices");
  const trace = complete({ ranks: pids.length, tick: 1e-6, slices, moments });
  return { ...trace, dropped: all.length - shown.length };
}

/** After each moment of a rank: its time, device bytes by category, and those elsewhere. */
function live(trace, rank, categories) {
  const now = { device: categories.map(() => 0), host: 0, disk: 0 };
  return trace.moments.filter((m) => m.rank === rank).map(({ time, changes }) => {
    for (const [place, category, , bytes] of changes) {
      if (place === "device") now.device[categories.indexOf(category)] += bytes;
      else now[place] += bytes;
    }
    return { time, ...now, device: [...now.device] };
  });
}

/** What a rank holds at a time: by category and unit, bytes in each place. */
function held(trace, rank, time) {
  const found = new Map();
  for (const moment of trace.moments) {
    if (moment.rank !== rank || moment.time > time) continue;
    for (const [place, category, unit, bytes] of moment.changes) {
      const key = `${category}/${unit}`;
      const there = found.get(key) ?? { device: 0, host: 0, disk: 0 };
      there[place] += bytes;
      found.set(key, there);
    }
  }
  return found;
}
