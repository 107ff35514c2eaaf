"""The moves of a schedule, carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .. import comm
from ..comm.collectives import Work
from ..memory import labels
from .flat_buffer import Unit
from .interfaces import Move, Schedule
from .verbs import Verbs


@dataclass(eq=False, slots=True)
class UnderWay:
    """A unit's reduction or publication, launched and not yet waited for."""

    unit: Unit
    works: list[Work]
    then: Callable[[Unit], None] | None = None

    def finish(self) -> None:
        for work in self.works:
            work.wait()
        if self.then is not None:
            self.then(self.unit)


class Moves(Verbs):
    """Launches the verbs, and waits for them, when the schedule says so."""

    schedule: Schedule

    def __init__(self) -> None:
        self._gathering: dict[Unit, list[Work]] = {}
        self._under_way: dict[Unit, list[UnderWay]] = {}

    def carry_out(self, moves: Iterable[Move], of: Unit) -> None:
        """Do these moves, the schedule's answer to what happened to `of`."""
        for verb, unit in moves:
            if verb == "wait":
                self._wait(unit)
            elif verb == "release":
                self._gathering.pop(unit, None)
                self.release(unit)
            else:
                with comm.phase(unit=unit.name):
                    if verb == "gather":
                        self._launch_gather(unit, ahead=unit is not of)
                    else:
                        self._launch(verb, unit)

    def _launch_gather(self, unit: Unit, ahead: bool) -> None:
        if ahead:
            labels.mark("prefetch", unit.name)
        # of a unit that is on its way already, the same works
        self._gathering[unit] = list(self.gather(unit))

    def _launch(self, verb: str, unit: Unit) -> None:
        if verb == "reduce":
            under_way = UnderWay(unit, list(self.reduce(unit)), self.reduced)
        else:
            under_way = UnderWay(unit, list(self.publish(unit)))
        self._under_way.setdefault(unit, []).append(under_way)

    def _wait(self, unit: Unit) -> None:
        for work in self._gathering.pop(unit, ()):
            work.wait()
        self.finish(unit)

    def finish(self, *units: Unit) -> None:
        """Wait for the reductions and publications of these units, or of all."""
        for unit in units or list(self._under_way):
            for under_way in self._under_way.pop(unit, ()):
                under_way.finish()
