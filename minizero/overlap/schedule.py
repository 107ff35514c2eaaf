"""Launch collectives early and wait for them late, within limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..comm.ledger import Call
from ..memory.plan import Plan
from ..zero.flat import Unit
from ..zero.seams import Action, Schedule


def exposed(calls: Iterable[Call]) -> float:
    """Exposed communication, in seconds: the time spent inside waits.

    On gloo this is the time that the thread was blocked. On NCCL `wait` only
    orders streams, so there it is the host's time, not the device's.
    """
    return sum(call.finished - call.waited for call in calls)


class Order:
    """Predicts the order in which units are needed, one pass at a time.

    A pass is a forward or a backward. A forward is expected to be like the
    one before, at first in the order of the units. A backward is expected to
    be as it was after a forward like this one; if there was none, it is
    expected to be the reverse of this forward.

    `running`: "forward", "backward", or "" outside of both.
    `left`: the units in the order in which a forward leaves them.
    """

    def __init__(self, units: Sequence[Unit] = ()) -> None:
        self.running = ""
        self.left: list[Unit] = []
        self._expected: Sequence[Unit] = ()
        self._place = 0  # in `_expected`: everything before it is past
        self._seen: list[Unit] = []
        self._forward: Sequence[Unit] = units
        self._backward: tuple[list[Unit], list[Unit]] = ([], [])

    def begin(self, running: str) -> None:
        """A pass begins; predict its order."""
        self.end()
        left, followed = self._backward
        backward = followed if left == self.left else self.left[::-1]
        self.running = running
        self._expected = self._forward if running == "forward" else backward

    def end(self) -> None:
        """The pass has ended; remember the order in which it needed units."""
        if self.running == "forward":
            self._forward = self._seen
        elif self.running == "backward":
            self._backward, self.left = (self.left, self._seen), []
        self.running, self._expected, self._place, self._seen = "", (), 0, []

    def upcoming(self) -> list[Unit]:
        """The units that are expected from here on, next one first."""
        return list(self._expected[self._place :])

    def note(self, unit: Unit) -> list[Unit]:
        """Record that `unit` is needed now; returns the units left out.

        If the unit is expected later, the pass continues behind it. A unit
        that is not expected any more leaves the prediction as it is.
        """
        self._seen.append(unit)
        try:
            found = self._expected.index(unit, self._place)
        except ValueError:
            return []
        skipped = self._expected[self._place : found]
        self._place = found + 1
        return [u for u in skipped if u not in self._expected[self._place :]]


class Overlap(Schedule):
    """Launch early, wait late; every setting counts elements.

    A unit's gradients are reduced while those of the next unit are computed.
    Sharded parameters are gathered ahead of their use, in the order that
    `Order` predicts.

    `prefetch_bucket_size`: most elements gathered ahead of their use. A unit
        is gathered as a whole or not at all; 0 gathers nothing ahead.
    `max_live_parameters`: most unsharded elements at a time, padding
        included: of units in use, gathered ahead or kept. Never exceeded;
        units that do not fit together raise ValueError. (What
        `zero.GatheredParameters` holds is not counted.)
    `param_persistence_threshold`: units with fewer elements stay unsharded;
        they are gathered once a step, after the update. 0 keeps none.

    The names and defaults are DeepSpeed's (`stage3_prefetch_bucket_size`,
    ...), which compares its threshold with single parameters, not units.
    The most elements of one reduction are `bucket_size` of `parallelize`.
    """

    def __init__(
        self,
        prefetch_bucket_size: int = 50_000_000,
        max_live_parameters: int = 1_000_000_000,
        param_persistence_threshold: int = 100_000,
    ) -> None:
        self.prefetch_bucket_size = prefetch_bucket_size
        self.max_live_parameters = max_live_parameters
        self.param_persistence_threshold = param_persistence_threshold
        for name, value in vars(self).items():
            least = int(name == "max_live_parameters")
            if isinstance(value, bool) or value < least or value % 1:
                raise ValueError(
                    f"{name} counts elements: it must be a whole number of at "
                    f"least {least}, not {value!r}"
                )
        self.order = Order()
        self._elements: dict[Unit, int] = {}  # of each unit, unsharded
        self._live: dict[Unit, None] = {}  # unsharded, in order of launch
        self._ahead: set[Unit] = set()  # of these: gathered, not yet needed
        self._in_use: set[Unit] = set()  # of these: needed, not yet done
        self._reducing: list[Unit] = []  # at most one

    def attach(self, units: Sequence[Unit], plan: Plan) -> None:
        """Measure the units; ValueError if this schedule has a net already."""
        if self._elements:
            raise ValueError(
                "this Overlap belongs to another net already; make one for "
                "each call of parallelize"
            )
        self.order = Order(units)
        for unit in units:
            size = sum(flat.padded for flat in unit.flats)
            self._elements[unit] = size * plan.parameters.sharded

    # ---- gradients and updates

    def grads_ready(self, unit: Unit) -> list[Action]:
        """Launch the unit's reduction when the one before has ended.

        So the gradients of at most two units exist unsharded: one unit's are
        being reduced, the next one's are being computed.
        """
        before, self._reducing = self._reducing, [unit]
        return [*(Action("wait", u) for u in before), Action("reduce", unit)]

    def updated(self, unit: Unit) -> list[Action]:
        """Publish the updated shards; the step waits at its end.

        A unit that is kept unsharded has old values now: gather it again, and
        wait for it where it is used next.
        """
        actions = [Action("publish", unit)]
        if unit in self._live and unit.trainable:
            actions += [Action("release", unit), Action("gather", unit)]
        return actions

    # ---- parameters

    def needed(self, unit: Unit) -> list[Action]:
        """Gather the unit and the next ones; wait for this one only."""
        self._check_fits(unit)
        skipped = [] if unit in self._in_use else self.order.note(unit)
        freed = self._make_room(unit, skipped)
        self._live[unit] = None
        self._ahead.discard(unit)
        self._in_use.add(unit)
        return [
            *(Action("release", u) for u in freed),
            *(Action("gather", u) for u in (unit, *self._gather_ahead())),
            Action("wait", unit),
        ]

    def done(self, unit: Unit) -> list[Action]:
        """Free the unit, unless it is small."""
        order = self.order
        if unit in self._in_use:
            self._in_use.remove(unit)
            if order.running == "forward":
                if torch.is_grad_enabled():
                    order.left.append(unit)
                if not self._in_use:
                    order.end()
        if self._elements[unit] < self.param_persistence_threshold:
            return []
        self._free(unit)
        return [Action("release", unit)]

    def _check_fits(self, unit: Unit) -> None:
        """Raise ValueError if the unit does not fit beside those in use."""
        size, used = self._elements[unit], self._sum(self._in_use - {unit})
        if used + size > self.max_live_parameters:
            busy = [u.name for u in self._live if u in self._in_use - {unit}]
            raise ValueError(
                f"unit {unit.name!r} has {size:,} elements, and {used:,} of "
                f"other units are in use {busy}, but max_live_parameters is "
                f"{self.max_live_parameters:,}; set it to {used + size:,} or "
                "more, or make smaller units"
            )

    def _make_room(self, unit: Unit, skipped: list[Unit]) -> list[Unit]:
        """Choose what is freed before `unit` is gathered.

        First units that were gathered ahead in vain. Then, if the limit
        demands it, the last units gathered ahead, and then kept ones.
        """
        freed = [u for u in skipped if u in self._ahead]
        for u in freed:
            self._free(u)
        missing = 0 if unit in self._live else self._elements[unit]
        idle = [u for u in self._live if u not in self._in_use | {unit}]
        idle.sort(key=lambda u: u in self._ahead)
        while self._sum(self._live) + missing > self.max_live_parameters:
            freed.append(idle.pop())
            self._free(freed[-1])
        return freed

    def _gather_ahead(self) -> list[Unit]:
        """Choose the next units that may be gathered now.

        Stop at the first that would break a limit: a later, smaller one would
        take its place.
        """
        chosen: list[Unit] = []
        ahead, live = self._sum(self._ahead), self._sum(self._live)
        for unit in self.order.upcoming():
            if unit in self._live:
                continue
            size = self._elements[unit]
            ahead, live = ahead + size, live + size
            if ahead > self.prefetch_bucket_size or live > self.max_live_parameters:
                break
            self._live[unit] = None
            self._ahead.add(unit)
            chosen.append(unit)
        return chosen

    def _free(self, unit: Unit) -> None:
        """The unit is sharded again."""
        self._live.pop(unit, None)
        self._ahead.discard(unit)

    def _sum(self, units: Iterable[Unit]) -> int:
        return sum(self._elements[unit] for unit in units)

    # ---- where the step is

    def upcoming(self) -> list[Unit]:
        """The units expected next; a disk may read their shards ahead."""
        return self.order.upcoming()

    def forward_begins(self) -> None:
        self.order.begin("forward")

    def backward_begins(self) -> None:
        self.order.begin("backward")

    def backward_ends(self) -> None:
        self._reducing = []
        self.order.end()
