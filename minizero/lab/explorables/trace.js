// Traces, from the lists that packing.py makes.
// A trace is { ranks, tick, total, slices, moments }; times are whole ticks. Slices of one
// rank more, if there are any, are the step as it was simulated.

const LANES = ["compute", "gather", "reduce", "to host", "to disk"];

/** Numbers the calls of each rank, which have one number on every rank then; `alike`: what
 *  one rank does, each does. */
function complete({ ranks, tick, slices, moments, alike = false }) {
  const all = (list) => alike
    ? list.flatMap((s) => Array.from({ length: ranks }, (_, rank) => ({ ...s, rank }))) : list;
  const trace = { ranks, tick, alike, slices: all(slices), moments: all(moments) };
  trace.slices.sort((a, b) => a.begin - b.begin);
  const calls = Array(ranks + 1).fill(0);
  for (const s of trace.slices) s.call ??= s.joined ? calls[s.rank]++ : -1;
  trace.simulated = trace.slices.some((s) => s.rank === ranks);
  trace.total = [...slices.map((s) => s.end), ...moments.map((m) => m.time)]
    .reduce((most, end) => Math.max(most, end), 1);
  return trace;
}

/** Tables and lists of packing.py; blocks `wide` times as wide as the stored ones have its
 *  square of their parameters, and take as many times as long. */
function unpack(tables, packed, wide = 1) {
  const sized = ([place, category, unit, bytes]) =>
    [place, category, unit, Math.trunc(bytes * (category === "activations" ? wide : wide * wide))];
  const known = tables.changes.map(sized);
  const [slices, moments] = [[], []];
  let [all, time] = [packed.slices, 0];
  for (let i = 0; i < all.length; i += 4) {
    const [lane, verb, unit, bytes, code, joined] = tables.slices[all[i + 1]];
    time += all[i + 2];
    slices.push({ rank: all[i], lane, verb, unit, joined, source: tables.sources[code],
      bytes: bytes * wide * wide, peers: joined.length ? joined : null, begin: time, end: time + all[i + 3] });
  }
  [all, time] = [packed.moments, 0];
  for (let i = 0; i < all.length; i += 3 + all[i + 2]) {
    time += all[i + 1];
    const changes = all.slice(i + 3, i + 3 + all[i + 2]).map((k) => known[k]);
    moments.push({ rank: all[i], time, changes });
  }
  const alike = packed.ranks > 1 && new Set([...slices, ...moments].map((s) => s.rank)).size === 1;
  return complete({ ranks: packed.ranks, tick: tables.tick * wide * wide, slices, moments, alike });
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
