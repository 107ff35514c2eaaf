"""A training step in simulated time, ordered by the schedule that orders real ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..memory.plan import Plan
from ..zero.interfaces import Move, Schedule
from .machine import Buffer, Interval, Layer, Machine, Timeline


class _Rank:
    """One rank's thread and its link."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now = 0.0
        self.line = Timeline()
        self._busy: list[tuple[float, float]] = []  # the link, in order

    def spend(self, what: str, unit: str, until: float) -> None:
        if until > self.now:
            interval = Interval("compute", what, unit, self.now, until)
            self.line.intervals.append(interval)
            self.now = until

    def compute(self, what: str, unit: str, seconds: float) -> None:
        """Compute; slower while something of the link's queue is moving."""
        now, speed = self.now, 1 - self.machine.contention
        for begin, end in self._busy:
            if end <= now:
                continue
            alone = min(seconds, max(0.0, begin - now))
            seconds, now = seconds - alone, now + alone
            shared = min(seconds, (end - now) * speed) if now >= begin else 0
            seconds, now = seconds - shared, now + shared / speed
        self.spend(what, unit, now + seconds)

    def transfer(self, op: str, unit: str, nbytes: float) -> float:
        """Queue for the link; returns when the transfer ends."""
        machine = self.machine
        handed = machine.handling + nbytes / machine.copying
        self.compute("launch", unit, handed if nbytes else 0.0)
        free = self._busy[-1][1] if self._busy else 0.0
        begin = max(self.now, free)
        held = machine.latency + nbytes / machine.bandwidth
        end = begin + held if nbytes else begin
        self._busy = [b for b in self._busy if b[1] > self.now]
        self._busy.append((begin, end))
        self.line.intervals.append(Interval("link", op, unit, begin, end))
        self.line.calls += 1
        return end


class _Transfer:
    """A collective under way: a transfer, followed by some summing."""

    def __init__(
        self,
        rank: _Rank,
        op: str,
        unit: str,
        sent: float,
        adds: float = 0,
        across: float = 0,
    ) -> None:
        self._rank, self._unit, machine = rank, unit, rank.machine
        self._after = adds / machine.adding
        if op == "all_reduce":  # the sums go round in a second exchange
            self._after += machine.latency + sent / machine.bandwidth
        if machine.across and across:  # a second hop follows on the wait
            other = machine.across
            self._after += 2 * (other.latency + across / other.bandwidth)
        self._end: float | None = rank.transfer(op, unit, sent)

    def wait(self) -> None:
        if self._end is None:
            return
        rank, end, self._end = self._rank, self._end, None
        rank.spend("wait", self._unit, max(rank.now, end) + self._after)


class _Net:
    """Carries moves out in simulated time, on buffers that have no storage."""

    def __init__(
        self, rank: _Rank, plan: Plan, schedule: Schedule, bucket_size: int
    ) -> None:
        self.plan, self.schedule, self.bucket_size = plan, schedule, bucket_size
        self.rank = rank
        self._whole: dict[Buffer, _Transfer] = {}
        self._under_way: list[tuple[Layer, list[_Transfer]]] = []

    def carry_out(self, moves: Iterable[Move]) -> None:
        for verb, unit in moves:
            layer: Any = unit
            if verb == "gather":
                self._gather(layer)
            elif verb == "release":
                self._release(layer)
            elif verb == "wait":
                for flat in layer.flats:
                    if flat in self._whole:
                        self._whole[flat].wait()
                self.finish(layer)
            else:
                transfers = self._reduce if verb == "reduce" else self._publish
                self._under_way.append((layer, transfers(layer)))

    def finish(self, *layers: Layer) -> None:
        """Wait for reductions and publications of these layers, or of all."""
        for entry in list(self._under_way):
            if not layers or entry[0] in layers:
                self._under_way.remove(entry)
                for transfer in entry[1]:
                    transfer.wait()

    def _launch(self, op: str, unit: Layer, flat: Buffer, elements: int) -> _Transfer:
        ranks = self.rank.machine.ranks
        gathers = op == "all_gather"
        itemsize = flat.itemsize if gathers else flat.reduced or flat.itemsize
        shard = elements * itemsize / ranks
        adds = 0 if gathers else shard * (ranks - 1)
        others, across = self.rank.machine.across, 0.0
        if others and not gathers:
            across = shard * (others.ranks - 1) / others.ranks
        return _Transfer(self.rank, op, unit.name, shard * (ranks - 1), adds, across)

    def _gather(self, unit: Layer) -> None:
        for flat in unit.flats:
            if flat not in self._whole:
                gathered = self._launch("all_gather", unit, flat, flat.padded)
                self._whole[flat] = gathered
                live = sum(whole.padded for whole in self._whole)
                line = self.rank.line
                line.most_live = max(line.most_live, live)

    def _release(self, unit: Layer) -> None:
        for flat in unit.flats:
            gathered = self._whole.pop(flat, None)
            if gathered is not None:
                gathered.wait()

    def _reduce(self, unit: Layer) -> list[_Transfer]:
        ranks = self.rank.machine.ranks
        op = "reduce_scatter" if self.plan.optimizer.sharded else "all_reduce"
        width = max(1, self.bucket_size // ranks)
        return [
            self._launch(op, unit, flat, min(width, flat.padded // ranks - a) * ranks)
            for flat in unit.trainable
            for a in range(0, flat.padded // ranks, width)
        ]

    def _publish(self, unit: Layer) -> list[_Transfer]:
        replicated = not self.plan.parameters.sharded
        if not (replicated and self.plan.optimizer.sharded):
            return []
        return [
            self._launch("all_gather", unit, flat, flat.padded)
            for flat in unit.trainable
        ]


def simulate(
    layers: list[Layer],
    machine: Machine,
    plan: Plan,
    schedule: Schedule,
    bucket_size: int = 500_000_000,
    boundary: bool = True,
) -> Timeline:
    """One step of training, as `schedule` orders it on `machine`.

    `layers`: the root first, then the blocks in the order of the forward. `schedule`: a
    new `minizero.zero.Schedule` or `minizero.Overlap`, as a net would be given: only the
    net is simulated. The second step counts: by then the order is recorded. `boundary`:
    whether the micro-batch is the last of its step, after which there is an update.
    """
    rank = _Rank(machine)
    net = _Net(rank, plan, schedule, bucket_size)
    units: Any = layers
    schedule.attach(units, plan)
    _step(net, layers, boundary)
    start, rank.line = rank.now, Timeline()
    _step(net, layers, boundary)
    for interval in rank.line.intervals:
        interval.begin -= start
        interval.end -= start
    rank.line.duration = rank.now - start
    return rank.line


def _step(net: _Net, layers: list[Layer], boundary: bool) -> None:
    schedule: Any = net.schedule
    rank, root, blocks = net.rank, layers[0], layers[1:]
    sharded = net.plan.parameters.sharded
    owned = 1 / rank.machine.ranks if net.plan.optimizer.sharded else 1.0
    reduces = boundary or net.plan.gradients.sharded

    def enter(unit: Layer) -> None:
        net.carry_out(schedule.needed(unit) if sharded else [])

    def leave(unit: Layer) -> None:
        net.carry_out(schedule.done(unit) if sharded else [])

    def compute(what: str, unit: Layer, share: float = 1.0) -> None:
        rank.compute(what, unit.name, getattr(unit, what) * share)

    schedule.forward_begins()
    enter(root)
    for unit in blocks:
        enter(unit)
        compute("forward", unit)
        leave(unit)
    compute("forward", root)
    leave(root)
    schedule.backward_begins()
    enter(root)
    compute("backward", root)
    for unit in reversed(blocks):
        enter(unit)
        compute("backward", unit)
        leave(unit)
        net.carry_out(schedule.grads_ready(unit) if reduces else [])
    leave(root)
    net.carry_out(schedule.grads_ready(root) if reduces else [])
    net.finish()
    schedule.backward_ends()
    for unit in layers if boundary else ():
        compute("update", unit, owned)
    for unit in layers if boundary else ():
        net.carry_out(schedule.updated(unit))
    net.finish()
