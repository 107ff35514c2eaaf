"""Reports of what each rank is doing, and what they prove when ranks are stuck."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

SOON, LATE = 1.0, 2.0  # seconds of waiting that prove a mismatch
DIFFERENT = "the ranks are out of step: they have called different collectives."
ALONE = "the ranks are out of step: some wait for one that has returned."


class Report(NamedTuple):
    """The state of a collective on a rank: "launched", "waits", "done"; "queued" on a
    device.

    `number` counts the collectives of its group of `ranks`, and `history` is their
    checksum: both are equal on ranks that make the same calls. `what`: it in words.
    """

    time: float = 0.0  # of the monotonic clock
    state: str = ""
    number: int = 0
    what: str = ""
    history: int = 0
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.number:
            return "has entered no collective"
        call = f"collective {self.number}, {self.what}"
        if self.state == "waits":
            return f"has waited {time.monotonic() - self.time:.1f} s in {call}"
        return f"has {'finished' if self.state == 'done' else self.state} {call}"


Reports = Mapping[int, Iterable[Report]]  # of each rank, from old to new


def unlike(reports: Reports) -> dict[int, Report]:
    """The earliest collective that ranks of a group have called differently, by rank."""
    calls: dict[tuple[int, tuple[int, ...]], dict[int, Report]] = {}
    for rank, made in reports.items():
        for each in made:
            calls.setdefault((each.number, each.ranks), {})[rank] = each
    for _, by_rank in sorted(calls.items()):
        if len({each.history for each in by_rank.values()}) > 1:
            return by_rank
    return {}


def verdict(reports: Reports, waiting: set[int], active: float, timeout: float) -> str:
    """Why the ranks that are waited for will never return; "" if they may.

    `active`: when ranks last printed or returned, or when the task began.
    """
    now, last = (
        time.monotonic(),
        {r: [Report(), *reports.get(r, ())][-1] for r in waiting},
    )
    differ = unlike(reports).values()
    if differ and now - max(each.time for each in differ) > SOON:
        return DIFFERENT
    stuck = [each for each in last.values() if each.state == "waits"]
    if stuck and len(stuck) == len(waiting) and now - max(s.time for s in stuck) > LATE:
        for call in stuck:
            for rank in set(call.ranks) - waiting:
                made = [
                    r.number for r in reports.get(rank, ()) if r.ranks == call.ranks
                ]
                if max(made, default=0) < call.number:
                    return ALONE
    latest = max([active, *(each.time for each in last.values())])
    if now - min([latest, *(each.time for each in stuck)]) > timeout:
        return (
            f"the ranks hang: no progress in {timeout:g} s. "
            "If they were only slow, give a larger timeout."
        )
    return ""
