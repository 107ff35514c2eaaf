"""A training step in simulated time, ordered by the schedule that orders real ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..memory.plan import Plan
from ..memory.trace import Change, Moment
from ..zero.seams import Action, Schedule


@dataclass(frozen=True)
class Machine:
    """N equal ranks and the link between them, as one rank sees both.

    A collective in which a rank sends b bytes occupies the link for
    `latency` + b / `bandwidth` seconds; collectives queue for the link.
    `handling`: seconds that the rank spends to launch one; `copying`, `adding`: bytes a
        second at which it hands over what is sent and sums what it received.
    `contention`: share of its speed that computation loses while the link is busy.
    `across`: if these N ranks are one group of several, the groups and their link.
    `bus`, `disk`: bytes a second between device and host, each way, and of the rank's
        share of a disk.
    """

    ranks: int
    latency: float
    bandwidth: float
    handling: float = 0.0
    copying: float = float("inf")
    adding: float = float("inf")
    contention: float = 0.0
    across: Machine | None = None
    bus: float = float("inf")
    disk: float = float("inf")

    def __post_init__(self) -> None:
        if not 0 <= self.contention < 1:
            raise ValueError(f"contention is a share below 1, not {self.contention!r}")


@dataclass(eq=False)
class Buffer:
    """A flat buffer: its elements, a multiple of N, and bytes of each.

    `reduced`: of the gradient as it is reduced (default: `itemsize`). `states`: of the
    optimizer state. `sent`: on the link, as (gathered, reduced), if quantized.
    """

    padded: int
    itemsize: int = 4
    trainable: bool = True
    reduced: int = 0
    states: int = 0
    sent: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.reduced = self.reduced or self.itemsize
        self.sent = self.sent or (self.itemsize, self.reduced)


@dataclass(eq=False)
class Layer:
    """A unit: its buffers, and the seconds that one rank computes for it.

    `update` is for all elements; a rank that owns 1/N takes 1/N of it. `saved`: bytes
    of activations from its forward to its backward, and `inside`: while it computes.
    """

    name: str
    flats: list[Buffer]
    forward: float
    backward: float
    update: float = 0.0
    saved: int = 0
    inside: int = 0

    @property
    def trainable(self) -> list[Buffer]:
        return [flat for flat in self.flats if flat.trainable]


@dataclass
class Interval:
    """What one lane did from `begin` to `end`, in seconds since the step began.

    `lane`: "compute", "link", "bus" or "disk". `what`: a phase, "wait", the op of a
    collective, or what a copy does. `after`: seconds that the rank spends when a
    collective has arrived; None: it has spent them.
    """

    lane: str
    what: str
    unit: str
    begin: float
    end: float
    nbytes: float = 0
    after: float | None = None


@dataclass
class Timeline:
    """The intervals of one step, and how long it took, in seconds.

    `moments`: when live bytes that exist for a part of the step came and went.
    """

    intervals: list[Interval] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    duration: float = 0.0
    most_live: int = 0  # elements of sharded parameters, unsharded at once

    @property
    def exposed(self) -> float:
        """Seconds in waits: exposed communication."""
        return sum(i.end - i.begin for i in self.intervals if i.what == "wait")

    def shift(self, start: float) -> None:
        """Count times from `start` on."""
        for interval in self.intervals:
            interval.begin -= start
            interval.end -= start
        self.moments = [m._replace(time=m.time - start) for m in self.moments]


class Simulation:
    """One rank in simulated time, which carries out a schedule's actions without data.

    `now`: the time of its thread. `line`: what its lanes have done so far.
    """

    def __init__(
        self, machine: Machine, plan: Plan, schedule: Schedule, bucket_size: int
    ) -> None:
        self.machine, self.plan, self.bucket_size = machine, plan, bucket_size
        self.ranks = machine.ranks
        self.schedule: Any = schedule  # it gets layers in place of units
        # hpZ (ZeRO++): groups copy parameters only, the rest is sharded by all ranks
        self.is_hpz = bool(plan.parameters.group and not plan.optimizer.group)
        self.now, self.line = 0.0, Timeline()
        self._link: list[tuple[float, float]] = []  # its transfers, in order
        self._free: dict[str, float] = {}  # since when: up, down and the disk
        self._unsharded: dict[Buffer, Interval] = {}
        self._under_way: dict[Layer, list[Interval]] = {}
        self._arrives: dict[Layer, float] = {}  # gradients on the host, then parameters

    def step(self, layers: list[Layer], boundary: bool) -> None:
        """One forward, one backward and, at a boundary, the update."""
        schedule, plan, (root, *blocks) = self.schedule, self.plan, layers

        def reduce(unit: Layer) -> None:
            reduces = boundary or plan.gradients.sharded
            self.run(schedule.grads_ready(unit) if reduces else [])

        def process(what: str, unit: Layer) -> None:
            forward, inside = what == "forward", unit.inside - unit.saved
            self.record("activations", unit.name, inside + unit.saved * forward)
            if plan.gradients.sharded and not forward:
                self.record("gradients", unit.name, self._full_grads(unit))
            self.compute(what, unit.name, getattr(unit, what))
            self.record("activations", unit.name, -inside - unit.saved * (not forward))

        schedule.pass_begins("forward")
        self.run(schedule.needed(root))
        for unit in blocks:
            self.run(schedule.needed(unit))
            process("forward", unit)
            self.run(schedule.done(unit))
        process("forward", root)
        self.run(schedule.done(root))
        schedule.pass_begins("backward")
        self.run(schedule.needed(root))
        process("backward", root)
        for unit in reversed(blocks):
            self.run(schedule.needed(unit))
            process("backward", unit)
            self.run(schedule.done(unit))
            reduce(unit)
        self.run(schedule.done(root))
        reduce(root)
        self.wait(*self._under_way)
        schedule.backward_ends()
        for unit in self.update(layers) if boundary else ():
            self.run(schedule.updated(unit))
        self.run(Action("wait", u) for u in layers)  # type: ignore[arg-type]

    # ---- operations

    def run(self, actions: Iterable[Action]) -> None:
        """Do what the schedule answered."""
        for operation, unit in actions:
            layer: Any = unit
            gathered = [flat for flat in layer.flats if flat in self._unsharded]
            if operation == "gather":
                for flat in layer.flats if self.plan.parameters.sharded else ():
                    if flat not in gathered:
                        self._gather(layer, flat)
            elif operation == "release":
                for flat in gathered:
                    self._arrive(self._unsharded.pop(flat))
                    nbytes = flat.padded * flat.itemsize
                    self.record("parameters", layer.name, -nbytes)
            elif operation == "wait":
                for flat in gathered:
                    self._arrive(self._unsharded[flat])
                self.wait(layer)
            else:
                launch = self._reduce if operation == "reduce" else self._publish
                self._under_way[layer] = launch(layer)

    def _gather(self, unit: Layer, flat: Buffer) -> None:
        on, nbytes, loaded = self.plan.parameters.on, flat.padded * flat.itemsize, self.now
        self.record("parameters", unit.name, nbytes)
        if on == "nvme":
            loaded = self.copy("read", unit.name, nbytes / self.ranks, loaded)
        if on != "device":
            loaded = self.copy("up", unit.name, nbytes / self.ranks, loaded)
        gathered = self._launch("all_gather", unit, flat, flat.padded, loaded)
        self._unsharded[flat] = gathered
        live = sum(f.padded for f in self._unsharded)
        self.line.most_live = max(self.line.most_live, live)

    def _reduce(self, unit: Layer) -> list[Interval]:
        op = "reduce_scatter" if self.plan.optimizer.sharded else "all_reduce"
        width, ranks = max(1, self.bucket_size // self.ranks), self.ranks
        return [
            self._launch(op, unit, flat, min(width, flat.padded // ranks - a) * ranks)
            for flat in unit.trainable
            for a in range(0, flat.padded // ranks, width)
        ]

    def _publish(self, unit: Layer) -> list[Interval]:
        if self.is_hpz:  # each group's copy is made of its owners' shards
            sent = sum(f.padded * f.sent[0] / self.ranks for f in unit.trainable)
            flat, after = unit.flats[0], self._across(sent)
            return [self._launch("all_gather", unit, flat, 0, after=after)]
        if self.plan.parameters.sharded or not self.plan.optimizer.sharded:
            return []
        args, since = ("all_gather", unit), self._arrives.get(unit, 0.0)
        return [self._launch(*args, f, f.padded, since) for f in unit.trainable]

    def wait(self, *units: Layer) -> None:
        """Wait for the reductions and publications of these units."""
        for unit in units:
            transfers = self._under_way.pop(unit, [])
            for transfer in transfers:
                self._arrive(transfer)
            if transfers and transfers[0].what != "all_gather":  # reductions
                if self.plan.gradients.sharded:
                    self.record("gradients", unit.name, -self._full_grads(unit))
                if self.plan.gradients.on != "device":
                    self._to_host(unit)

    def _arrive(self, transfer: Interval) -> None:
        """Wait for a transfer, unless it has arrived, and sum what it brought."""
        if transfer.after is not None:
            end, transfer.after = max(self.now, transfer.end) + transfer.after, None
            self.spend("wait", transfer.unit, end)
            if transfer.what == "all_reduce":  # with the second exchange, of sums
                transfer.end, transfer.nbytes = self.now, 2 * transfer.nbytes

    def update(self, layers: list[Layer]) -> Iterator[Layer]:
        """Update this rank's shards where their states are stored.

        Off the device each unit is yielded when it is updated; else all at the end.
        """
        plan, on, machine = self.plan, self.plan.optimizer.on, self.machine
        n = self.ranks
        owned = 1 / machine.ranks if plan.optimizer.sharded else 1.0
        if self.is_hpz and machine.across:
            owned /= machine.across.ranks
        for unit in layers if on != plan.gradients.on == "device" else ():
            self._to_host(unit)
        states = [sum(f.padded * f.states / n for f in u.trainable) for u in layers]
        ready = [self.now] * len(layers)
        for i, unit in enumerate(layers):
            if on == "nvme":  # this one and the next are read while others are updated
                for j in range(i + 1 if i else 0, min(i + 2, len(layers))):
                    ready[j] = self.copy("read", layers[j].name, states[j], self.now)
            self.spend("wait", unit.name, max(ready[i], self._arrives.get(unit, 0.0)))
            self.compute("update", unit.name, unit.update * owned)
            if on == "nvme":
                self.copy("write", unit.name, states[i], self.now)
            if on != "device" and plan.parameters.on == "device":
                nbytes = sum(f.padded * f.itemsize / self.ranks for f in unit.trainable)
                self._arrives[unit] = self.copy("up", unit.name, nbytes, self.now)
            if on != "device":
                yield unit
        if on == "device":
            yield from layers

    def _to_host(self, unit: Layer) -> None:
        """The mean of this rank's shard is copied to the host."""
        nbytes = self._full_grads(unit) / self.ranks
        self._arrives[unit] = self.copy("down", unit.name, nbytes, self.now)

    # ---- bytes and seconds

    def _full_grads(self, unit: Layer) -> int:
        return sum(flat.padded * flat.reduced for flat in unit.trainable)

    def _across(self, shard: float) -> float:
        """Seconds in which a group's shard is exchanged with the other groups."""
        others = self.machine.across
        if others is None:
            return 0.0
        sent = shard * (others.ranks - 1) / others.ranks
        return others.latency + sent / others.bandwidth

    def _launch(
        self, op: str, unit: Layer, flat: Buffer, elements: int,
        since: float = 0.0, after: float = 0.0,
    ) -> Interval:  # fmt: skip
        """Queue a collective of so many elements; it starts at `since` or later.

        A rank sends N-1 shards. On arrival a reduction adds what has come, and an
        all-reduce sends the sums as well. Copies in several groups are then summed: by
        an all-reduce, or under hpZ by a reduction to their owner, half as long.
        """
        machine, gathers = self.machine, op == "all_gather"
        shard = elements * flat.sent[not gathers] / machine.ranks
        nbytes = shard * (machine.ranks - 1)
        seconds = machine.latency + nbytes / machine.bandwidth
        if not gathers:
            after += nbytes / machine.adding
            after += seconds * (op == "all_reduce")  # the sums are exchanged as well
            # among copies: all-reduced, or only reduced to its owner
            after += (1 if self.is_hpz else 2) * self._across(shard)
        if nbytes:
            handed = machine.handling + nbytes / machine.copying
            self.compute("launch", unit.name, handed)
        begin = max(self.now, self._link[-1][1] if self._link else 0.0, since)
        end = begin + seconds * bool(nbytes)
        self._link = [b for b in self._link if b[1] > self.now] + [(begin, end)]
        self.line.intervals.append(
            Interval("link", op, unit.name, begin, end, nbytes, after)
        )
        return self.line.intervals[-1]

    def copy(self, what: str, unit: str, nbytes: float, since: float) -> float:
        """Queue for the bus, "up" or "down", or to "read" or "write" the disk.

        The copy begins at `since` or later; returns when it ends.
        """
        lane, queue = ("bus", what) if what in ("up", "down") else ("disk", "disk")
        seconds = nbytes / getattr(self.machine, lane)
        if not seconds:
            return since
        begin = max(since, self._free.get(queue, 0.0))
        self._free[queue] = end = begin + seconds
        self.line.intervals.append(Interval(lane, what, unit, begin, end, nbytes))
        return end

    def compute(self, what: str, unit: str, seconds: float) -> None:
        """The thread computes; more slowly while the link is busy."""
        now, speed = self.now, 1 - self.machine.contention
        for begin, end in self._link:
            if end <= now:
                continue
            alone = min(seconds, max(0.0, begin - now))
            seconds, now = seconds - alone, now + alone
            shared = min(seconds, (end - now) * speed) if now >= begin else 0
            seconds, now = seconds - shared, now + shared / speed
        self.spend(what, unit, now + seconds)

    def spend(self, what: str, unit: str, until: float) -> None:
        """The thread does one thing, such as waiting, up to a time."""
        if until > self.now:
            interval = Interval("compute", what, unit, self.now, until)
            self.line.intervals.append(interval)
            self.now = until

    def record(self, category: str, unit: str, nbytes: int) -> None:
        """Bytes on the device came now, or went if `nbytes` is below 0."""
        if nbytes:
            change = Change("device", category, nbytes, unit)
            self.line.moments.append(Moment(0, self.now, (change,)))


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
    new `minizero.zero.Schedule` or `minizero.Overlap`. `boundary`: whether an update
    follows the micro-batch. The second step counts: by then the order is recorded.
    """
    simulation = Simulation(machine, plan, schedule, bucket_size)
    simulation.schedule.attach(layers, plan)
    simulation.step(layers, boundary)
    start, simulation.line = simulation.now, Timeline()
    simulation.step(layers, boundary)
    simulation.line.duration = simulation.now - start
    simulation.line.shift(start)
    return simulation.line
