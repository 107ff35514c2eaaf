"""What `Overlap` may hold: settings that count elements, and the units that are whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..memory.plan import Plan
from ..zero.flat_buffer import Unit


class Limits:
    """Which units are whole, in use or ahead of their use, and which more may be.

    The settings are those of `Overlap`. `in_use`: units between their gather and their
    release. A unit is whole from the launch of its gather on.
    """

    def __init__(self, **settings: int) -> None:
        for name, value in settings.items():
            least = 1 if name == "max_live_parameters" else 0
            if isinstance(value, bool) or value < least or value % 1:
                raise ValueError(
                    f"{name} counts elements: it must be a whole number of at least "
                    f"{least}, not {value!r}"
                )
        self._bucket = int(settings["prefetch_bucket_size"])
        self._most = int(settings["max_live_parameters"])
        self._small = int(settings["param_persistence_threshold"])
        self._elements: dict[Unit, int] = {}
        self._live: dict[Unit, None] = {}  # whole, in the order of their launch
        self._ahead: set[Unit] = set()  # launched, and not yet needed
        self.in_use: set[Unit] = set()
        # their elements: counted anew for each unit, a step would be quadratic
        self._live_size = self._ahead_size = 0

    def attach(self, units: Sequence[Unit], plan: Plan) -> None:
        """Measure the units; ValueError for a second net, or for one too large."""
        if self._elements:
            raise ValueError(
                "this Overlap belongs to another net already; make one for each call "
                "of parallelize"
            )
        sharded = plan.parameters.sharded
        for unit in units:
            whole = sum(flat.padded for flat in unit.flats) if sharded else 0
            self._elements[unit] = whole
            if whole > self._most:
                raise ValueError(
                    f"unit {unit.name!r} has {whole:,} elements, and "
                    f"max_live_parameters is {self._most:,}; raise that, or make "
                    "smaller units"
                )

    def keeps(self, unit: Unit) -> bool:
        """Whether the unit is so small that it stays whole."""
        return self._elements[unit] < self._small

    def whole(self, unit: Unit) -> bool:
        """Whether the unit is whole, or about to be."""
        return unit in self._live

    def use(self, unit: Unit, passed: Iterable[Unit]) -> list[Unit]:
        """`unit` is used now, `passed` are not; returns what is to be freed for it.

        First what was gathered ahead in vain, then as much as `unit` needs of what is
        not in use: of what was gathered ahead, the last one first, then of what is
        kept.
        """
        freed = [u for u in passed if u in self._ahead]
        for u in freed:
            self.free(u)
        missing = 0 if unit in self._live else self._elements[unit]
        if self._live_size + missing > self._most:
            busy = self.in_use | {unit}
            idle = [u for u in self._live if u not in busy]
            idle.sort(key=lambda u: u in self._ahead)
            while self._live_size + missing > self._most:
                freed.append(idle.pop())
                self.free(freed[-1])
        self._add(unit)
        self._arrived(unit)
        self.in_use.add(unit)
        return freed

    def check(self, unit: Unit) -> None:
        """Raise ValueError if the unit does not fit beside those in use."""
        size, used = self._elements[unit], self._sum(self.in_use - {unit})
        if used + size > self._most:
            names = ", ".join(repr(u.name) for u in self._live if u in self.in_use)
            raise ValueError(
                f"unit {unit.name!r} has {size:,} elements and is needed while {names} "
                f"with {used:,} are in use, but max_live_parameters is "
                f"{self._most:,}; set it to {used + size:,} or more"
            )

    def gather_ahead(self, coming: Iterable[Unit]) -> list[Unit]:
        """Those of the coming units that may be gathered now.

        It ends at the first that would break a limit: order matters more than filling
        the last bytes.
        """
        chosen: list[Unit] = []
        for unit in coming:
            if unit in self._live:
                continue
            size = self._elements[unit]
            fits = self._ahead_size + size <= self._bucket
            if not fits or self._live_size + size > self._most:
                break
            self._add(unit)
            self._ahead.add(unit)
            self._ahead_size += size
            chosen.append(unit)
        return chosen

    def _add(self, unit: Unit) -> None:
        if unit not in self._live:
            self._live[unit] = None
            self._live_size += self._elements[unit]

    def _arrived(self, unit: Unit) -> None:
        if unit in self._ahead:
            self._ahead.remove(unit)
            self._ahead_size -= self._elements[unit]

    def free(self, unit: Unit) -> None:
        """The unit is not whole any more."""
        if unit in self._live:
            del self._live[unit]
            self._live_size -= self._elements[unit]
        self._arrived(unit)

    def _sum(self, units: Iterable[Unit]) -> int:
        return sum(self._elements[unit] for unit in units)
