"""A training step in simulated time, ordered by the schedule that orders real ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..memory.plan import Plan
from ..zero.interfaces import Move, Schedule
from .machine import Buffer, Layer, Machine, Timeline
from .simulated_home import SimulatedHome
from .simulated_rank import Rank, Transfer


class _Net:
    """Carries moves out in simulated time, on buffers that have no storage."""

    def __init__(
        self, rank: Rank, plan: Plan, schedule: Schedule, bucket_size: int
    ) -> None:
        self.plan, self.schedule, self.bucket_size = plan, schedule, bucket_size
        self.rank = rank
        self.home = SimulatedHome(rank, plan)
        # of the parameters alone (hpZ): the rest is sharded over all ranks
        self.secondary = bool(plan.parameters.group and not plan.optimizer.group)
        self._whole: dict[Buffer, Transfer] = {}
        self._under_way: list[tuple[Layer, list[Transfer]]] = []

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
                if entry[1] and entry[1][0].op != "all_gather":
                    self._reduced(entry[0])

    def _reduced(self, unit: Layer) -> None:
        """The means are there: they are kept, and the whole gradients are not."""
        if self.plan.gradients.sharded:
            self.grads(unit, -1)
        self.home.add(unit)

    def grads(self, unit: Layer, sign: int = 1) -> None:
        """The unit's whole gradients come, or go."""
        nbytes = sum(flat.padded * flat.gradient for flat in unit.trainable)
        self.rank.line.changed(self.rank.now, "gradients", unit.name, sign * nbytes)

    def _launch(
        self, op: str, unit: Layer, flat: Buffer, elements: int, since: float = 0.0
    ) -> Transfer:
        ranks = self.rank.machine.ranks
        gathers = op == "all_gather"
        gathered, reduced = flat.coded or (flat.itemsize, flat.gradient)
        shard = elements * (gathered if gathers else reduced) / ranks
        adds = 0 if gathers else shard * (ranks - 1)
        sent, more = shard * (ranks - 1), 0.0
        if not gathers:  # among copies: all-reduced, or only reduced to its owner
            more = (1 if self.secondary else 2) * self._across(shard)
        return Transfer(self.rank, op, unit.name, sent, adds, since, more)

    def _across(self, shard: float) -> float:
        """Seconds of one exchange of a group's shard with the other groups."""
        others = self.rank.machine.across
        if others is None:
            return 0.0
        sent = shard * (others.ranks - 1) / others.ranks
        return others.latency + sent / others.bandwidth

    def _gather(self, unit: Layer) -> None:
        for flat in unit.flats:
            if flat not in self._whole:
                self._whole_bytes(unit, flat, 1)
                loaded = self.home.load(unit, flat)
                gathered = self._launch("all_gather", unit, flat, flat.padded, loaded)
                self._whole[flat] = gathered
                live = sum(whole.padded for whole in self._whole)
                line = self.rank.line
                line.most_live = max(line.most_live, live)

    def _release(self, unit: Layer) -> None:
        for flat in unit.flats:
            gathered = self._whole.pop(flat, None)
            if gathered is not None:
                gathered.wait()
                self._whole_bytes(unit, flat, -1)

    def _whole_bytes(self, unit: Layer, flat: Buffer, sign: int) -> None:
        nbytes = sign * flat.padded * flat.itemsize
        self.rank.line.changed(self.rank.now, "parameters", unit.name, nbytes)

    def _reduce(self, unit: Layer) -> list[Transfer]:
        ranks = self.rank.machine.ranks
        op = "reduce_scatter" if self.plan.optimizer.sharded else "all_reduce"
        width = max(1, self.bucket_size // ranks)
        return [
            self._launch(op, unit, flat, min(width, flat.padded // ranks - a) * ranks)
            for flat in unit.trainable
            for a in range(0, flat.padded // ranks, width)
        ]

    def _publish(self, unit: Layer) -> list[Transfer]:
        if self.secondary:  # each group's copy is made of its owners' shards
            sizes = (
                flat.padded * (flat.coded or (flat.itemsize,))[0]
                for flat in unit.trainable
            )
            more = self._across(sum(sizes) / self.rank.machine.ranks)
            return [Transfer(self.rank, "all_gather", unit.name, 0.0, 0, 0.0, more)]
        replicated = not self.plan.parameters.sharded
        if not (replicated and self.plan.optimizer.sharded):
            return []
        since = self.home.arrives(unit)
        return [
            self._launch("all_gather", unit, flat, flat.padded, since)
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
    rank = Rank(machine)
    net = _Net(rank, plan, schedule, bucket_size)
    units: Any = layers
    schedule.attach(units, plan)
    _step(net, layers, boundary)
    start, rank.line = rank.now, Timeline()
    _step(net, layers, boundary)
    rank.line.duration = rank.now - start
    return rank.line.shifted(start)


def _step(net: _Net, layers: list[Layer], boundary: bool) -> None:
    schedule: Any = net.schedule
    rank, root, blocks = net.rank, layers[0], layers[1:]
    sharded = net.plan.parameters.sharded
    owned = 1 / rank.machine.ranks if net.plan.optimizer.sharded else 1.0
    if net.secondary and rank.machine.across:
        owned /= rank.machine.across.ranks
    reduces = boundary or net.plan.gradients.sharded

    def enter(unit: Layer) -> None:
        net.carry_out(schedule.needed(unit) if sharded else [])

    def leave(unit: Layer) -> None:
        net.carry_out(schedule.done(unit) if sharded else [])

    def compute(what: str, unit: Layer) -> None:
        forward, line = what == "forward", rank.line
        kept, more = unit.saved, unit.inside - unit.saved
        line.changed(rank.now, "activations", unit.name, more + kept * forward)
        if net.plan.gradients.sharded and not forward:
            net.grads(unit)
        rank.compute(what, unit.name, getattr(unit, what))
        line.changed(rank.now, "activations", unit.name, -more - kept * (not forward))

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
    for unit in net.home.update(layers, owned) if boundary else ():
        net.carry_out(schedule.updated(unit))
    net.finish()
