"""Traces as lists of whole numbers, for a page: `trace.js` unpacks them."""

from __future__ import annotations

from typing import Any

from minizero.memory.trace import Change, Moment, Trace


class Pack:
    """Traces that share tables: what a slice or a change is, beside when it was.

    tick: seconds; times are rounded to them.
    """

    def __init__(self, tick: float) -> None:
        self.tick = tick
        self._slices: dict[tuple[Any, ...], int] = {}
        self._changes: dict[tuple[Any, ...], int] = {}
        self._sources: dict[str, int] = {}

    def add(self, trace: Trace) -> dict[str, Any]:
        """A trace: its ranks, and two lists of numbers.

        `slices`: rank, kind, begin, duration. `moments`: rank, time, and how many
        changes of which kinds. A time counts from the one before it.
        """
        slices, before = [], 0
        for s in sorted(trace.slices, key=lambda s: s.begin):
            code = self._sources.setdefault(s.source, len(self._sources))
            joined = s.peers or int(s.call >= 0)
            what = s.lane, s.verb, s.unit, s.nbytes, code, joined
            kind = self._slices.setdefault(what, len(self._slices))
            begin, end = (round(t / self.tick) for t in (s.begin, s.end))
            slices += [s.rank, kind, begin - before, end - begin]
            before = begin
        moments, before = [], 0
        for m in sorted(trace.moments, key=lambda m: m.time):
            kinds = [
                self._changes.setdefault(
                    (c.place, c.category, c.unit, c.nbytes), len(self._changes)
                )
                for c in m.changes
            ]
            time = round(m.time / self.tick)
            moments += [m.rank, time - before, len(kinds), *kinds]
            before = time
        return {"ranks": trace.ranks, "slices": slices, "moments": moments}

    def tables(self) -> dict[str, Any]:
        """What the numbers of kinds stand for.

        A slice is lane, verb, unit, bytes, source, and which ranks take part: 1 is all,
        0 its own; a change is place, category, unit and bytes.
        """
        return {
            "tick": self.tick,
            "slices": list(self._slices),
            "changes": list(self._changes),
            "sources": [source.split("#", 2) for source in self._sources],
        }


def unpacked(
    tables: dict[str, Any], packed: dict[str, Any], wide: float = 1
) -> tuple[Trace, int]:
    """The moments of a packed trace, and when its step ends: in ticks.

    wide: how many times the hidden size; activations take so many times the bytes, all
        else the square of it.
    """
    numbers, moments, time = iter(packed["moments"]), [], 0
    for rank in numbers:
        time += next(numbers)
        kinds = [next(numbers) for _ in range(next(numbers))]
        changes = []
        for place, category, unit, nbytes in (
            tables["changes"][kind] for kind in kinds
        ):
            nbytes *= wide if category == "activations" else wide * wide
            changes.append(Change(place, category, int(nbytes), unit))
        moments.append(Moment(rank, time, tuple(changes)))
    begin, total = 0, time
    slices = packed["slices"]
    for later, duration in zip(slices[2::4], slices[3::4], strict=True):
        begin += later
        total = max(total, begin + duration, 1)
    return Trace(packed["ranks"], [], moments), total
