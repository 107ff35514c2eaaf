"""Overlap: collectives that are under way while the rank computes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from minizero import comm, tracker
from minizero.comm import Work
from minizero.ddp import Verbs
from minizero.flat import Unit
from minizero.ledger import Call
from minizero.seams import Schedule


def exposed(calls: Iterable[Call]) -> float:
    """Exposed communication, in seconds: the time spent inside waits.

    On gloo this is the time that the thread was blocked. On NCCL `wait` only
    orders streams, so there it is the host's time, not the device's.
    """
    return sum(call.finished - call.waited for call in calls)


class Order:
    """The order in which units are needed: as expected, and as it comes."""

    def __init__(self, expected: list[Unit]) -> None:
        self.expected = expected
        self.seen: list[Unit] = []
        self._place = 0

    @property
    def coming(self) -> list[Unit]:
        """The units that are expected from here on, next one first."""
        return self.expected[self._place :]

    def note(self, unit: Unit) -> list[Unit]:
        """Record that `unit` is needed now; returns the units left out.

        A unit that is expected later takes the place up to there. One that
        is not expected any more leaves the place where it is.
        """
        self.seen.append(unit)
        coming = self.coming
        if unit not in coming:
            return []
        skipped = coming[: coming.index(unit)]
        self._place += len(skipped) + 1
        return [left for left in skipped if left not in self.coming]


class Late(Schedule):
    """Launch what follows from gradients at once, and wait for it late.

    A reduction is launched when its unit's gradients are complete, in pieces
    of at most `bucket_size` elements, and waited for when the next unit's
    is launched. So the gradients of one unit are under way while those of
    the next are formed. All others than these two are shards already, where
    the plan shards gradients.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[list[Work], Unit | None]] = []

    def begin_backward(self, net: Verbs) -> None:
        self._finish(net)  # what a backward that failed has left

    def reduce(self, net: Verbs, unit: Unit) -> None:
        """Launch the unit's reduction when the one before has ended."""
        self._finish(net)
        self._under_way.append((list(net.reduce(unit)), unit))

    def settle(self, net: Verbs, unit: Unit) -> None:
        """A late gradient may not join a buffer that is under way."""
        if any(unit is reducing for _, reducing in self._under_way):
            self._finish(net)

    def publish(self, net: Verbs, unit: Unit) -> None:
        """Launch the updated rows' all-gather; `drain` waits for it."""
        self._under_way.append((list(net.send(unit)), None))

    def drain(self, net: Verbs) -> None:
        """Wait for what is under way."""
        self._finish(net)

    def _finish(self, net: Verbs) -> None:
        """Wait for what is under way, in the order of its launch."""
        while self._under_way:
            works, reducing = self._under_way.pop(0)
            for work in works:
                work.wait()
            if reducing is not None:
                net.reduced(reducing)


class Overlap(Late):
    """Launch early, wait late; every setting counts elements.

    Reductions are those of `Late`. Sharded parameters are gathered ahead of
    their use: in the order of the forward before, and in backward in the
    reverse of this forward, or as recorded after a forward like this one.

    `prefetch_bucket_size`: most elements gathered ahead of their use. A unit
        goes as a whole or not at all; 0 gathers nothing ahead.
    `max_live_parameters`: most elements whole at once, padding included,
        whether in use, gathered ahead or kept. Never exceeded; units that do
        not fit together raise ValueError. (What `zero.GatheredParameters`
        holds is not counted.)
    `param_persistence_threshold`: units with fewer elements stay whole; they
        are gathered once a step, after the update. 0 keeps none.

    The names and defaults are DeepSpeed's (`stage3_prefetch_bucket_size`,
    ...), which tests its threshold against single parameters, not units.
    The most elements of one reduction are `bucket_size` of `parallelize`.
    """

    def __init__(
        self,
        prefetch_bucket_size: int = 50_000_000,
        max_live_parameters: int = 1_000_000_000,
        param_persistence_threshold: int = 100_000,
    ) -> None:
        for name, value, least in (
            ("prefetch_bucket_size", prefetch_bucket_size, 0),
            ("max_live_parameters", max_live_parameters, 1),
            ("param_persistence_threshold", param_persistence_threshold, 0),
        ):
            if isinstance(value, bool) or value < least or value % 1:
                raise ValueError(
                    f"{name} counts elements: it must be a whole number of "
                    f"at least {least}, not {value!r}"
                )
        super().__init__()
        self.prefetch_bucket_size = int(prefetch_bucket_size)
        self.max_live_parameters = int(max_live_parameters)
        self.param_persistence_threshold = int(param_persistence_threshold)
        self._elements: dict[Unit, int] = {}
        # units that are whole or about to be, in the order of their launch
        self._live: list[Unit] = []
        self._in_use: set[Unit] = set()
        self._ahead: list[Unit] = []  # launched, and not yet needed
        self._order = Order([])
        self._forward: list[Unit] = []
        self._left: list[Unit] = []  # as this step's forward left them
        self._phase = ""  # "forward", "backward", or neither
        self._backward: tuple[list[Unit], list[Unit]] = ([], [])

    def attach(self, net: Verbs) -> None:
        """Measure the units; one Overlap serves one net."""
        if self._elements:
            raise ValueError(
                "this Overlap belongs to another net already; make one for "
                "each call of parallelize"
            )
        sharded = net.plan.parameters.sharded
        for unit in net.units:
            whole = sum(flat.padded for flat in unit.flats) if sharded else 0
            self._elements[unit] = whole
            if whole > self.max_live_parameters:
                raise ValueError(
                    f"unit {unit.name!r} has {whole:,} elements, and "
                    f"max_live_parameters is {self.max_live_parameters:,}; "
                    "raise that, or make smaller units"
                )
        self._forward = list(net.units)  # a first guess

    def live(self) -> int:
        """Elements of all units that are whole or about to be."""
        return sum(self._elements[unit] for unit in self._live)

    def keeps(self, unit: Unit) -> bool:
        """Whether the unit is so small that it stays whole."""
        return self._elements[unit] < self.param_persistence_threshold

    def begin_forward(self, net: Verbs) -> None:
        self._end()
        self._phase, self._order = "forward", Order(self._forward)

    def begin_backward(self, net: Verbs) -> None:
        super().begin_backward(net)
        self._end()
        left, recorded = self._backward
        expected = recorded if left == self._left else self._left[::-1]
        self._phase, self._order = "backward", Order(expected)

    def _end(self) -> None:
        """Remember in which order the units of the pass were needed."""
        if self._phase == "forward":
            self._forward = self._order.seen
        elif self._phase == "backward":
            self._backward = (self._left, self._order.seen)
            self._left = []
        # gathers by `state_dict` are of no pass
        self._phase, self._order = "", Order([])

    def gather(self, net: Verbs, unit: Unit) -> None:
        """Launch what is missing, then the next units; wait for this one."""
        if unit not in self._in_use:
            for skipped in self._order.note(unit):
                if skipped in self._ahead:
                    self._free(net, skipped)
        if unit in self._ahead:
            self._ahead.remove(unit)
        if unit not in self._live:
            self._make_room(net, unit)
        self._in_use.add(unit)
        works = self._launch(net, unit)
        self._gather_ahead(net)
        for work in works:
            work.wait()

    def release(self, net: Verbs, unit: Unit) -> None:
        """Free the unit, unless it is small or about to be used."""
        if unit in self._in_use:
            self._in_use.remove(unit)
            if self._phase == "forward" and torch.is_grad_enabled():
                self._left.append(unit)
            if self._phase == "forward" and not self._in_use:
                self._end()
        if not self.keeps(unit):
            self._free(net, unit)

    def _launch(self, net: Verbs, unit: Unit) -> list[Work]:
        if unit not in self._live:
            self._live.append(unit)
        with comm.phase(unit=unit.name):
            return list(net.gather(unit))

    def _free(self, net: Verbs, unit: Unit) -> None:
        """Free a unit; one that is still on its way is waited for."""
        for units in (self._live, self._ahead):
            if unit in units:
                units.remove(unit)
        net.release(unit)

    def _gather_ahead(self, net: Verbs) -> None:
        """Launch the next units, as far as both limits let them."""
        ahead = sum(self._elements[unit] for unit in self._ahead)
        live = self.live()
        for unit in self._order.coming:
            if unit in self._live:
                continue
            size = self._elements[unit]
            ahead, live = ahead + size, live + size
            if ahead > self.prefetch_bucket_size:
                break
            if live > self.max_live_parameters:
                break
            tracker.mark("prefetch", unit.name)
            self._ahead.append(unit)
            self._launch(net, unit)

    def _make_room(self, net: Verbs, unit: Unit) -> None:
        """Free what is not in use until `unit` fits.

        First what was gathered ahead, the last one first, then what is kept.
        """
        size = self._elements[unit]
        idle = [u for u in self._live if u not in self._in_use]
        idle.sort(key=lambda u: u in self._ahead)
        while self.live() + size > self.max_live_parameters:
            if not idle:
                names = ", ".join(repr(u.name) for u in self._live)
                raise ValueError(
                    f"unit {unit.name!r} has {size:,} elements and is needed "
                    f"while {names} with {self.live():,} are in use, but "
                    f"max_live_parameters is {self.max_live_parameters:,}; "
                    f"set it to {self.live() + size:,} or more"
                )
            self._free(net, idle.pop())

    # after the backward, and after the update

    def drain(self, net: Verbs) -> None:
        super().drain(net)
        if self._phase == "backward":
            self._end()

    def publish(self, net: Verbs, unit: Unit) -> None:
        """As `Late`; and a unit that is kept has old values now.

        It is gathered anew, and waited for where it is used next.
        """
        super().publish(net, unit)
        if unit in self._live and unit.trainable:
            net.release(unit)
            self._launch(net, unit)
