"""What each rank is doing, readable while it is blocked, and what that proves of a hang."""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

SOON, LATE = 1.0, 2.0  # seconds of waiting that prove a mismatch


class Report(NamedTuple):
    """One report of a rank: when it was made, and of which collective.

    `number` counts the collectives of its group, and `history` is their checksum: both
    are equal on the ranks that make the same calls. `members`: a bit for each rank of
    the group. `state`: "launched", "waits", "done"; "queued" on a device.
    """

    time: float = 0.0
    number: int = 0
    history: int = 0
    members: int = 0
    state: str = ""
    what: str = ""

    @classmethod
    def now(
        cls, state: str, number: int, what: str, history: int, ranks: Iterable[int]
    ) -> Report:
        members = sum(1 << rank for rank in ranks if rank < 64)
        return cls(time.monotonic(), number, history, members, state, what)

    def __str__(self) -> str:
        if not self.number:
            return "has entered no collective"
        call = f"collective {self.number}, {self.what}"
        if self.state == "waits":
            return f"has waited {time.monotonic() - self.time:.1f} s in {call}"
        return f"has {'finished' if self.state == 'done' else self.state} {call}"


def unlike(reports: Mapping[int, Iterable[Report]]) -> dict[int, Report]:
    """The earliest collective that ranks of a group have called differently, by rank."""
    calls: dict[tuple[int, int], dict[int, Report]] = {}
    for rank, made in reports.items():
        for each in made:
            calls.setdefault((each.number, each.members), {})[rank] = each
    for _, by_rank in sorted(calls.items()):
        if len({each.history for each in by_rank.values()}) > 1:
            return by_rank
    return {}


class Board:
    """A file with the last reports of each rank, mapped by the ranks and their parent.

    A slot has one writer. A reader may meet it half written, and so should act only on
    what it has read twice.
    """

    KEPT = 48
    _slot = struct.Struct("=dqIQ8s220s")

    def __init__(self, path: Path, ranks: int) -> None:
        self.ranks, self._made = ranks, 0
        size = ranks * self.KEPT * self._slot.size
        with open(path, "a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)

    def writer(self, rank: int) -> Callable[[Report], None]:
        """What writes the reports of a rank."""

        def write(report: Report) -> None:
            self._made += 1
            at = (rank * self.KEPT + self._made % self.KEPT) * self._slot.size
            *numbers, state, what = report
            self._slot.pack_into(self._map, at, *numbers, state.encode(), what.encode())

        return write

    def kept(self, rank: int, since: float = 0.0) -> list[Report]:
        """The last reports of a rank, those since a moment, from old to new."""
        found = []
        for slot in range(rank * self.KEPT, (rank + 1) * self.KEPT):
            fields = self._slot.unpack_from(self._map, slot * self._slot.size)
            *numbers, state, what = fields
            texts = (b.rstrip(b"\0").decode(errors="ignore") for b in (state, what))
            found.append(Report(*numbers, *texts))
        return sorted(each for each in found if each.number and each.time >= since)

    def last(self, rank: int, since: float = 0.0) -> Report:
        """The last report of a rank; an empty one if there is none since then."""
        return [Report(), *self.kept(rank, since)][-1]

    def differ(self, since: float) -> dict[int, Report]:
        """The earliest collective since then that ranks have called differently."""
        return unlike({r: self.kept(r, since) for r in range(self.ranks)})

    def verdict(
        self, waiting: set[int], since: float, active: float, timeout: float
    ) -> str | None:
        """Why the ranks that are waited for will never return; None if they may.

        `since`: when their task began. `active`: when they last printed or returned.
        """
        now, ranks = time.monotonic(), range(self.ranks)
        differ = self.differ(since).values()
        if differ and now - max(each.time for each in differ) > SOON:
            return "the ranks are out of step: they have called different collectives."
        last = {r: self.last(r, since) for r in waiting}
        stuck = [each for each in last.values() if each.state == "waits"]
        all_stuck = stuck and len(stuck) == len(waiting)
        if all_stuck and now - max(each.time for each in stuck) > LATE:
            for r in (r for r in ranks if r not in waiting):
                made = [(each.members, each.number) for each in self.kept(r)]
                for call in stuck:
                    here = [n for members, n in made if members == call.members]
                    mine = call.members >> r & 1 and (here or not made)
                    if mine and max(here, default=0) < call.number:
                        return "the ranks are out of step: some wait for one that has returned."
        latest = max([since, active, *(each.time for each in last.values())])
        if now - min([latest, *(each.time for each in stuck)]) > timeout:
            return (
                f"the ranks hang: no progress in {timeout:g} s. "
                "If they were only slow, give a larger timeout."
            )
        return None
