"""Traces as short text, for a page: `trace.js` unpacks them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from minizero.memory.trace import Trace

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def base36(number: int) -> str:
    """As JavaScript's parseInt(text, 36) reads it."""
    sign, number = "-" * (number < 0), abs(number)
    text = DIGITS[number % 36]
    while number := number // 36:
        text = DIGITS[number % 36] + text
    return sign + text


class Pack:
    """Traces that share tables: what a slice or a change is, beside when it was.

    tick: seconds; times are rounded to them.
    """

    def __init__(self, tick: float) -> None:
        self.tick = tick
        self._slices: dict[tuple[Any, ...], int] = {}
        self._changes: dict[tuple[Any, ...], int] = {}
        self._sources: dict[str, int] = {}

    def ticks(self, seconds: float) -> int:
        return round(seconds / self.tick)

    def add(self, trace: Trace) -> dict[str, Any]:
        """A trace: its ranks, and two texts of numbers, each time after the one before.

        `slices`: rank, kind, begin, duration. `moments`: rank, time, and how many
        changes of which kinds.
        """
        return {
            "ranks": trace.ranks,
            "slices": _text(self._packed_slices(trace)),
            "moments": _text(self._packed_moments(trace)),
        }

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

    def _packed_slices(self, trace: Trace) -> Iterator[Iterable[int]]:
        before = 0
        for s in sorted(trace.slices, key=lambda s: s.begin):
            code = self._sources.setdefault(s.source, len(self._sources))
            joined = s.peers or int(s.call >= 0)
            what = s.lane, s.verb, s.unit, s.nbytes, code, joined
            kind = self._slices.setdefault(what, len(self._slices))
            begin, end = self.ticks(s.begin), self.ticks(s.end)
            yield s.rank, kind, begin - before, end - begin
            before = begin

    def _packed_moments(self, trace: Trace) -> Iterator[Iterable[int]]:
        before = 0
        for m in sorted(trace.moments, key=lambda m: m.time):
            kinds = [
                self._changes.setdefault(
                    (c.place, c.category, c.unit, c.nbytes), len(self._changes)
                )
                for c in m.changes
            ]
            time = self.ticks(m.time)
            yield m.rank, time - before, len(kinds), *kinds
            before = time


def _text(lines: Iterable[Iterable[int]]) -> str:
    return " ".join(map(base36, chain.from_iterable(lines)))
