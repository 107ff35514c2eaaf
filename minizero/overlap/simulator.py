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
    `handling`: seconds of the rank's own time to launch one, and `copying`: bytes a
        second at which it hands over what is sent.
    `adding`: bytes a second at which the rank sums what it received; infinite where
        the collective does so on the way.
    `contention`: share of its speed that computation loses while the link is busy; 0
        where copies take no core from it.
    `across`: where these N ranks are one group of several, the groups and the link
        between them; None: there are no others.
    `bus`, `disk`: bytes a second between device and host, each way, and of the rank's
        share of a disk. If infinite, copies take no time.
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
        rates = self.bandwidth, self.copying, self.adding, self.bus, self.disk
        seconds = self.latency, self.handling
        in_range = 0 <= self.contention < 1 <= self.ranks
        if not (in_range and min(rates) > 0 and min(seconds) >= 0):
            raise ValueError(
                "a machine has at least 1 rank, rates above 0, times not below 0 and a "
                f"contention from 0 to below 1, unlike {self}"
            )


@dataclass(eq=False)
class Buffer:
    """A flat buffer: its elements, a multiple of N, and bytes of each.

    `reduced`: bytes of an element of the gradient as it is sent; `itemsize` by default.
    `states`: bytes of optimizer state of each. `coded`: bytes of each on the link,
    gathered and reduced, where these are quantized.
    """

    padded: int
    itemsize: int = 4
    trainable: bool = True
    reduced: int | None = None
    states: int = 0
    coded: tuple[float, ...] | None = None

    @property
    def gradient(self) -> int:
        """Bytes of an element as it is reduced."""
        return self.reduced or self.itemsize


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
    collective, or what a copy does. `nbytes`: how many were sent or copied.
    """

    lane: str
    what: str
    unit: str
    begin: float
    end: float
    nbytes: float = 0


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

    def shifted(self, start: float) -> Timeline:
        """The same, `start` seconds earlier."""
        for interval in self.intervals:
            interval.begin -= start
            interval.end -= start
        self.moments = [m._replace(time=m.time - start) for m in self.moments]
        return self


class Rank:
    """One rank's lanes: its thread, its link, its bus and its disk."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.line, self.now = machine, Timeline(), 0.0
        self._link: list[tuple[float, float]] = []  # its transfers, in order
        self._free: dict[str, float] = {}  # since when: up, down and the disk

    def changed(self, category: str, unit: str, nbytes: int) -> None:
        """Bytes on the device came now, or went if `nbytes` is below 0."""
        if nbytes:
            change = Change("device", category, nbytes, unit)
            self.line.moments.append(Moment(0, self.now, (change,)))

    def spend(self, what: str, unit: str, until: float) -> None:
        """The thread does one thing, such as waiting, up to a time."""
        if until > self.now:
            interval = Interval("compute", what, unit, self.now, until)
            self.line.intervals.append(interval)
            self.now = until

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

    def transfer(self, op: str, unit: str, nbytes: float, since: float) -> Interval:
        """Queue for the link, from `since` on."""
        machine = self.machine
        handed = machine.handling + nbytes / machine.copying
        self.compute("launch", unit, handed if nbytes else 0.0)
        begin = max(self.now, self._link[-1][1] if self._link else 0.0, since)
        held = machine.latency + nbytes / machine.bandwidth
        interval = Interval("link", op, unit, begin, begin, nbytes)
        interval.end += held if nbytes else 0.0
        self._link = [b for b in self._link if b[1] > self.now]
        self._link.append((begin, interval.end))
        self.line.intervals.append(interval)
        return interval


@dataclass
class Transfer:
    """A collective under way; `after`: seconds of the rank when it has arrived."""

    interval: Interval
    after: float
    has_arrived: bool = False

    def wait(self, rank: Rank) -> None:
        """Wait for it, and sum what it brought."""
        if self.has_arrived:
            return
        self.has_arrived, sent = True, self.interval
        rank.spend("wait", sent.unit, max(rank.now, sent.end) + self.after)
        if sent.what == "all_reduce":  # it includes the second exchange, of sums
            sent.end, sent.nbytes = rank.now, 2 * sent.nbytes


class SimulatedNet:
    """Carries out a schedule's actions on buffers that have no memory."""

    def __init__(
        self, rank: Rank, plan: Plan, schedule: Schedule, bucket_size: int
    ) -> None:
        self.rank, self.plan, self.schedule = rank, plan, schedule
        self.bucket_size = bucket_size
        # copies of the parameters alone (hpZ): the rest is sharded over all ranks
        self.secondary = bool(plan.parameters.group and not plan.optimizer.group)
        self._unsharded: dict[Buffer, Transfer] = {}
        self._under_way: list[tuple[Layer, list[Transfer]]] = []
        self._arrives: dict[Layer, float] = {}  # gradients on the host, then parameters

    def run(self, actions: Iterable[Action]) -> None:
        """Do what the schedule answered."""
        for operation, unit in actions:
            layer: Any = unit
            if operation == "gather":
                self._gather(layer)
            elif operation == "release":
                for flat in layer.flats:
                    if flat in self._unsharded:
                        self._unsharded.pop(flat).wait(self.rank)
                        nbytes = flat.padded * flat.itemsize
                        self.rank.changed("parameters", layer.name, -nbytes)
            elif operation == "wait":
                for flat in layer.flats:
                    if flat in self._unsharded:
                        self._unsharded[flat].wait(self.rank)
                self.wait(layer)
            else:
                launch = self._reduce if operation == "reduce" else self._publish
                self._under_way.append((layer, launch(layer)))

    def wait(self, *layers: Layer) -> None:
        """Wait for reductions and publications of these layers, or of all."""
        for entry in list(self._under_way):
            unit, transfers = entry
            if layers and unit not in layers:
                continue
            self._under_way.remove(entry)
            for transfer in transfers:
                transfer.wait(self.rank)
            if transfers and transfers[0].interval.what != "all_gather":
                if self.plan.gradients.sharded:
                    self.full_grads(unit, -1)
                if self.plan.gradients.on != "device":
                    self._to_host(unit)

    def full_grads(self, unit: Layer, sign: int = 1) -> None:
        """The unit's full gradients are allocated, or freed."""
        nbytes = sum(flat.padded * flat.gradient for flat in unit.trainable)
        self.rank.changed("gradients", unit.name, sign * nbytes)

    def _gather(self, unit: Layer) -> None:
        rank, on = self.rank, self.plan.parameters.on
        for flat in unit.flats:
            if flat in self._unsharded:
                continue
            rank.changed("parameters", unit.name, flat.padded * flat.itemsize)
            loaded, nbytes = rank.now, self._shard(flat, flat.itemsize)
            if on == "nvme":
                loaded = rank.copy("read", unit.name, nbytes, loaded)
            if on != "device":
                loaded = rank.copy("up", unit.name, nbytes, loaded)
            gathered = self._launch("all_gather", unit, flat, flat.padded, loaded)
            self._unsharded[flat] = gathered
            live = sum(f.padded for f in self._unsharded)
            rank.line.most_live = max(rank.line.most_live, live)

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
        plan = self.plan
        if self.secondary:  # each group's copy is made of its owners' shards
            sent = sum(self._shard(f, self._coded(f)[0]) for f in unit.trainable)
            nothing = self.rank.transfer("all_gather", unit.name, 0.0, 0.0)
            return [Transfer(nothing, self._across(sent))]
        if plan.parameters.sharded or not plan.optimizer.sharded:
            return []
        since = self._arrives.get(unit, 0.0)
        return [
            self._launch("all_gather", unit, flat, flat.padded, since)
            for flat in unit.trainable
        ]

    def _launch(
        self, op: str, unit: Layer, flat: Buffer, elements: int, since: float = 0.0
    ) -> Transfer:
        machine, gathers = self.rank.machine, op == "all_gather"
        shard = elements * self._coded(flat)[not gathers] / machine.ranks
        sent, after = shard * (machine.ranks - 1), 0.0
        if not gathers:
            after += sent / machine.adding
        if op == "all_reduce":  # the sums are exchanged as well
            after += machine.latency + sent / machine.bandwidth
        if not gathers:  # among copies: all-reduced, or only reduced to its owner
            after += (1 if self.secondary else 2) * self._across(shard)
        return Transfer(self.rank.transfer(op, unit.name, sent, since), after)

    def _shard(self, flat: Buffer, itemsize: float) -> float:
        """Bytes of this rank's shard."""
        return flat.padded * itemsize / self.rank.machine.ranks

    def _coded(self, flat: Buffer) -> tuple[float, ...]:
        """Bytes of an element on the link, gathered and reduced."""
        return flat.coded or (flat.itemsize, flat.gradient)

    def _across(self, shard: float) -> float:
        """Seconds in which a group's shard is exchanged with the other groups."""
        others = self.rank.machine.across
        if others is None:
            return 0.0
        sent = shard * (others.ranks - 1) / others.ranks
        return others.latency + sent / others.bandwidth

    def _to_host(self, unit: Layer) -> None:
        """The mean of this rank's shard is copied to the host."""
        nbytes = sum(self._shard(flat, flat.gradient) for flat in unit.trainable)
        self._arrives[unit] = self.rank.copy("down", unit.name, nbytes, self.rank.now)

    def update(self, layers: list[Layer], owned: float) -> Iterator[Layer]:
        """Update where the states are stored; `owned` is the share of this rank.

        Off the device each unit is yielded when it is updated; else all at the end.
        """
        rank, plan, on = self.rank, self.plan, self.plan.optimizer.on
        if on != "device" and plan.gradients.on == "device":
            for unit in layers:
                self._to_host(unit)
        states = [sum(self._shard(f, f.states) for f in u.trainable) for u in layers]
        ready = [rank.now] * len(layers)
        for i, unit in enumerate(layers):
            if on == "nvme":  # this one and the next are read while others are updated
                for j in range(i and i + 1, min(i + 2, len(layers))):
                    ready[j] = rank.copy("read", layers[j].name, states[j], rank.now)
            arrived = max(ready[i], self._arrives.get(unit, 0.0))
            rank.spend("wait", unit.name, arrived)
            rank.compute("update", unit.name, unit.update * owned)
            if on == "nvme":
                rank.copy("write", unit.name, states[i], rank.now)
            if on != "device" and plan.parameters.on == "device":
                nbytes = sum(self._shard(f, f.itemsize) for f in unit.trainable)
                self._arrives[unit] = rank.copy("up", unit.name, nbytes, rank.now)
            if on != "device":
                yield unit
        if on == "device":
            yield from layers


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
    net = SimulatedNet(rank, plan, schedule, bucket_size)
    units: Any = layers
    schedule.attach(units, plan)
    _step(net, layers, boundary)
    start, rank.line = rank.now, Timeline()
    _step(net, layers, boundary)
    rank.line.duration = rank.now - start
    return rank.line.shifted(start)


def _step(net: SimulatedNet, layers: list[Layer], boundary: bool) -> None:
    """One forward, one backward and, at a boundary, the update."""
    schedule: Any = net.schedule
    rank, root, blocks, plan = net.rank, layers[0], layers[1:], net.plan
    owned = 1 / rank.machine.ranks if plan.optimizer.sharded else 1.0
    if net.secondary and rank.machine.across:
        owned /= rank.machine.across.ranks

    def enter(unit: Layer) -> None:
        net.run(schedule.needed(unit) if plan.parameters.sharded else [])

    def leave(unit: Layer) -> None:
        net.run(schedule.done(unit) if plan.parameters.sharded else [])

    def reduce(unit: Layer) -> None:
        reduces = boundary or plan.gradients.sharded
        net.run(schedule.grads_ready(unit) if reduces else [])

    def compute(what: str, unit: Layer) -> None:
        forward, kept, more = what == "forward", unit.saved, unit.inside - unit.saved
        rank.changed("activations", unit.name, more + kept * forward)
        if plan.gradients.sharded and not forward:
            net.full_grads(unit)
        rank.compute(what, unit.name, getattr(unit, what))
        rank.changed("activations", unit.name, -more - kept * (not forward))

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
        reduce(unit)
    leave(root)
    reduce(root)
    net.wait()
    schedule.backward_ends()
    for unit in net.update(layers, owned) if boundary else ():
        net.run(schedule.updated(unit))
    net.wait()
