"""What a step did, where, when and for which unit: one format for all that draws it.

The simulator of chapter 8 gives a `Trace`, and so does a recorded run, `minizero.trace`.
`chrome` is the format that Perfetto opens: slices, counters, and arrows from sends to
receives (Trace Event Format, Google 2016). The book's timeline draws it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .labels import CATEGORIES
from .tracker import Sample

LANES = ("compute", "gather", "reduce", "to host", "to disk")
ARRIVED = 1e-9
"""Seconds before its end at which an arrow meets a slice: at its end it is outside."""


class Slice(NamedTuple):
    """What a rank did on one of `LANES`, in seconds since the recording began.

    `nbytes`: that it sent or copied. `call`: which collective among all ranks, the same
    number on each; -1 for what is none. `peers`: the ranks that take part in it, if
    those are not all. `source`: the line that does it, as `path#name#line`. A slice
    without duration marks a moment.
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
    """The slices and the live bytes of one rank or of several, each in order of time.

    Arrows are not kept: in a collective each rank's slice sends when it begins, and has
    received from its other ranks when it ends. (A broadcast has none.)
    """

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
        totals = (
            sum(n for (there, _), n in live.items() if there == place)
            for _, live in self.live(rank)
        )
        return max(totals, default=0)

    def chrome(self) -> dict[str, Any]:
        """The Trace Event Format: a process a rank, a thread a lane; microseconds."""
        seen = {s.rank for s in self.slices} | {m.rank for m in self.moments}
        events = [event for rank in sorted(seen) for event in self._of(rank)]
        about = {"made by": "minizero", "ranks": self.ranks}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}

    def _of(self, rank: int) -> Iterator[dict[str, Any]]:
        here = {"pid": rank}
        yield _named("process", f"rank {rank}", here)
        tracks = _tracks(s for s in self.slices if s.rank == rank)
        # Perfetto takes thread 0 for none, and the process's number for its main thread.
        for thread, (lane, slices) in enumerate(tracks, 1000 * rank + 1):
            here = {"pid": rank, "tid": thread}
            yield _named("thread", lane, here)
            sort = {"name": "thread_sort_index", "args": {"sort_index": thread}}
            yield here | {"ph": "M"} | sort
            for s in slices:
                yield from self._events(s, here)
        for time, live in self.live(rank):
            for place in dict.fromkeys(place for place, _ in live):
                args = {
                    category: live.get((place, category), 0) for category in CATEGORIES
                }
                name = f"live bytes, {place}"
                at = {"ph": "C", "pid": rank, "ts": time * 1e6}
                yield at | {"name": name, "args": args}

    def _events(self, s: Slice, here: dict[str, int]) -> Iterator[dict[str, Any]]:
        name = f"{s.verb} {s.unit}".strip()
        told = {"verb": s.verb, "unit": s.unit, "phase": s.phase, "bytes": s.nbytes}
        args = told | {"call": s.call, "source": s.source}
        args |= {"peers": list(s.peers)} if s.peers else {}
        at = here | {"name": name, "cat": s.lane, "ts": s.begin * 1e6}
        if s.end == s.begin:
            yield at | {"ph": "i", "s": "t", "args": args}
            return
        yield at | {"ph": "X", "dur": (s.end - s.begin) * 1e6, "args": args}
        flow = here | {"name": "sent", "cat": "sent"}
        others = set(s.peers or range(self.ranks)) - {s.rank}
        for other in others if s.call >= 0 and s.verb != "broadcast" else ():
            ways = (s.rank, other), (other, s.rank)
            sent, got = ((s.call * self.ranks + a) * self.ranks + b for a, b in ways)
            begins, ends = s.begin * 1e6, max(s.begin, s.end - ARRIVED) * 1e6
            yield flow | {"ph": "s", "id": sent, "ts": begins}
            yield flow | {"ph": "f", "bp": "e", "id": got, "ts": ends}


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
        changes = tuple(
            Change(*key, n - before.get(key, 0))
            for key, n in now.items()
            if n != before.get(key, 0)
        )
        if changes:
            yield Moment(rank, sample.time + shift, changes)
        before = now


def _named(what: str, name: str, here: dict[str, int]) -> dict[str, Any]:
    return here | {"ph": "M", "name": f"{what}_name", "args": {"name": name}}


def _tracks(slices: Iterable[Slice]) -> Iterator[tuple[str, Sequence[Slice]]]:
    """By lane; on a track of its own what is under way beside another slice."""
    lanes: dict[str, list[list[Slice]]] = {lane: [[]] for lane in LANES}
    ends: dict[str, list[float]] = {lane: [0.0] for lane in LANES}
    for s in sorted(slices, key=lambda s: s.begin):
        moment, until = s.begin == s.end, ends[s.lane]
        free = (i for i, end in enumerate(until) if moment or end <= s.begin)
        track = next(free, len(until))
        if track == len(until):
            until.append(0.0)
            lanes[s.lane].append([])
        until[track] = max(until[track], s.end)
        lanes[s.lane][track].append(s)
    for lane, tracks in lanes.items():
        for found in tracks:
            yield lane, found
