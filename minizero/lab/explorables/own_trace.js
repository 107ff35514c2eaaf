// Traces of the reader's own, from Chrome trace JSON, and where their time goes.

const MOST = 50_000;  // events of a file that are drawn: its first

// What the words of the text ask for, and which slices are that.
const PHASES = {
  gather: (s) => s.lane === "gather",
  compute: (s) => s.verb === "forward" || s.verb === "backward",
  release: (s) => s.verb === "release",
  reduce: (s) => s.lane === "reduce",
  update: (s) => s.verb === "update",
};

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
  const pids = told && seen.every((pid) => pid <= told) ? Array.from({ length: told }, (_, i) => i) : seen;
  const lanes = new Map(events.filter((e) => e.ph === "M" && e.name === "thread_name")
    .map((e) => [`${e.pid}/${e.tid}`, e.args?.name]));
  const start = shown.reduce((least, event) => Math.min(least, event.ts), Infinity);
  const [slices, moments, before] = [[], [], {}];
  for (const { ph, pid, tid, ts, dur, name, cat, args } of shown) {
    const at = pids.indexOf(pid);  // the simulated step is that of one rank more
    const [rank, begin] = [at < 0 ? told : at, Math.round(ts - start)];
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

// What keeps a rank from computing, and the chapter that says what to do about it.
const GAPS = {
  gather: ["waits for parameters", "08_overlap"],
  reduce: ["waits for sums of gradients", "08_overlap"],
  publish: ["waits for updated parameters", "05_zero1"],
  late: ["waits for a rank that makes its call later", "02_ranks"],
  host: ["waits for copies to or from the host", "10_offload"],
  disk: ["waits for the disk", "11_nvme"],
  launch: ["launches calls: the fewer units, the less", "03_data_parallel"],
  idle: ["does nothing of the step: data, logging, Python", "13_engine"],
};

/** The gaps of a rank: [kind, begin, end]. */
function gaps(trace, rank) {
  const own = trace.slices.filter((s) => s.rank === rank && s.end > s.begin);
  const turn = own.findLast((s) => s.verb === "backward")?.end ?? 0;
  const found = [];
  const add = (kind, begin, end) => { if (end > begin) found.push([kind, begin, end]); };
  let now = Infinity;
  for (const s of own.filter((s) => s.lane === "compute")) {
    add("idle", now, s.begin);
    now = s.end;
    if (s.verb === "launch") add("launch", s.begin, s.end);
    if (s.verb !== "wait") continue;
    const during = own.filter((c) => c.lane !== "compute" && c.unit === s.unit
      && c.begin < s.end && c.end > s.begin);
    const call = during.find((c) => c.call >= 0);
    const made = trace.slices.filter((c) => call && c.call === call.call && c.rank < trace.ranks);
    const last = rank < trace.ranks
      ? Math.min(s.end, made.reduce((most, c) => Math.max(most, c.begin), s.begin)) : s.begin;
    add("late", s.begin, last);
    const kind = !call ? during[0]?.lane.slice(3) ?? "reduce" : call.lane === "reduce"
      ? "reduce" : call.begin >= turn ? "publish" : "gather";
    add(kind, last, s.end);
    s.chapter = parseInt(GAPS[last - s.begin > s.end - last ? "late" : kind][1]);
  }
  return found;
}

/** Ticks of each kind of gap of a rank, the longest first: [kind, of the rank, simulated]. */
function lost(trace, rank) {
  const sum = (of, kind) => gaps(trace, of).reduce((all, [one, begin, end]) =>
    all + (one === kind ? end - begin : 0), 0);
  return Object.keys(GAPS).map((kind) => [kind, sum(rank, kind),
    trace.simulated ? sum(trace.ranks, kind) : null])
    .filter(([, there, other]) => there || other).sort(([, a], [, b]) => b - a);
}
