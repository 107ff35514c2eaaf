"""What a step did, where, when and for which unit: one format for all that draws it.

The simulator of chapter 8 makes a `Trace`, and so does the recorder `minizero.trace`.
`chrome` is the format that Perfetto opens: slices and counters (Trace Event Format,
Google 2016). The book's timeline draws it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .labels import CATEGORIES
from .tracker import Sample

LANES = ("compute", "gather", "reduce", "to host", "to disk")


class Slice(NamedTuple):
    """What a rank did on one of `LANES`, in seconds since the recording began.

    `nbytes`: how many it sent or copied. `call`: the number of the collective, the same
    on each rank; -1 if it is none. `peers`: the ranks that take part in it, if those
    are not all. `source`: the line that does it, as `path#name#line`, for a link to it.
    A slice without duration marks a moment.
    """

    rank: int
    lane: str
    begin: float
    end: float
    verb: str
    unit: str
    nbytes: int = 0
    call: int = -1
    phase: str = ""
    source: str = ""
    peers: tuple[int, ...] = ()


class Change(NamedTuple):
    """Live bytes that came or went: on the "device", the "host" or the "disk"."""

    place: str
    category: str
    nbytes: int
    unit: str = ""


class Moment(NamedTuple):
    """Changes that happened at once, in seconds since the recording began."""

    rank: int
    time: float
    changes: tuple[Change, ...]


@dataclass
class Trace:
    """What `ranks` ranks did, in order of time; a rank from `ranks` on is simulated."""

    ranks: int
    slices: list[Slice] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    def live(self, rank: int) -> Iterator[tuple[float, dict[tuple[str, str], int]]]:
        """After each moment of a rank, the live bytes by (place, category)."""
        now: dict[tuple[str, str], int] = {}
        for moment in self.moments:
            if moment.rank == rank:
                for change in moment.changes:
                    key = change.place, change.category
                    now[key] = now.get(key, 0) + change.nbytes
                yield moment.time, dict(now)

    def peak(self, rank: int, place: str = "device") -> int:
        """The most live bytes of a rank at once."""
        lives = (live.items() for _, live in self.live(rank))
        totals = (sum(n for (at, _), n in live if at == place) for live in lives)
        return max(totals, default=0)

    def chrome(self) -> dict[str, Any]:
        """The Trace Event Format: a process a rank, a thread a lane; microseconds."""
        seen = {s.rank for s in self.slices} | {m.rank for m in self.moments}
        events = [event for rank in sorted(seen) for event in self._events(rank)]
        about = {"made by": "minizero", "ranks": self.ranks}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}

    def _events(self, rank: int) -> Iterator[dict[str, Any]]:
        name = f"rank {rank}" if rank < self.ranks else "simulated"
        yield {"pid": rank} | _meta("process_name", name=name)
        tracks = _tracks([s for s in self.slices if s.rank == rank])
        # Perfetto takes thread 0 for none, and the process's number for its main thread
        for thread, (lane, slices) in enumerate(tracks, 1000 * rank + 1):
            at: dict[str, Any] = {"pid": rank, "tid": thread}
            yield at | _meta("thread_name", name=lane)
            yield at | _meta("thread_sort_index", sort_index=thread)
            for s in slices:
                args: dict[str, Any] = {"verb": s.verb, "unit": s.unit, "phase": s.phase}
                args |= {"bytes": s.nbytes, "call": s.call, "source": s.source}
                args |= {"peers": list(s.peers)} if s.peers else {}
                event = at | {"name": f"{s.verb} {s.unit}".strip(), "cat": s.lane}
                event |= {"ts": s.begin * 1e6, "args": args}
                duration = {"ph": "X", "dur": (s.end - s.begin) * 1e6}
                yield event | (duration if s.end > s.begin else {"ph": "i", "s": "t"})
        for time, live in self.live(rank):
            for place in dict.fromkeys(place for place, _ in live):
                args = {name: live.get((place, name), 0) for name in CATEGORIES}
                event = {"ph": "C", "pid": rank, "ts": time * 1e6}
                yield event | {"name": f"live bytes, {place}", "args": args}


def _meta(name: str, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": name, "args": args}


def _tracks(slices: list[Slice]) -> Iterator[tuple[str, list[Slice]]]:
    """By lane; what is under way beside another slice has a track of its own."""
    for lane in LANES:
        tracks: list[list[Slice]] = [[]]
        ends = [0.0]
        for s in sorted(slices, key=lambda s: s.begin):
            if s.lane == lane:
                free = [i for i, end in enumerate(ends) if end <= s.begin]
                track = 0 if s.begin == s.end else [*free, len(ends)][0]
                if track == len(ends):
                    tracks.append([])
                    ends.append(0.0)
                ends[track] = max(ends[track], s.end)
                tracks[track].append(s)
        yield from ((lane, track) for track in tracks)


def joined(traces: Iterable[Trace]) -> Trace:
    """One trace of several ranks' own, such as `minizero.trace` gives each."""
    every = list(traces)
    slices = [s for trace in every for s in trace.slices]
    return Trace(every[0].ranks, slices, [m for trace in every for m in trace.moments])


def moments(samples: Iterable[Sample], rank: int, shift: float) -> Iterator[Moment]:
    """What changed from one sample of a tracker to the next, `shift` seconds later."""
    before: dict[tuple[str, str], int] = {}
    for sample in samples:
        now = {("device", c): n for c, n in sample.live.items()}
        now |= {("host", c): n for c, n in sample.host.items()}
        delta = {key: n - before.get(key, 0) for key, n in now.items()}
        changes = tuple(Change(*key, n) for key, n in delta.items() if n)
        if changes:
            yield Moment(rank, sample.time + shift, changes)
        before = now
