"""A training step on a machine that need not be there, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from minizero.memory import Plan


@dataclass(frozen=True)
class Machine:
    """N equal ranks and the link between them, as one rank sees both.

    A collective in which a rank sends b bytes holds the link for
    `latency` + b / `bandwidth` seconds; collectives queue for the link.
    `handling`: seconds of the rank's own time to launch one, and `copying`:
        bytes a second at which that hands over what is sent.
    `adding`: bytes a second at which the rank sums what it received; infinite
        where the collective does it on the way.
    `contention`: share of its speed that computation loses while the link is
        busy. It is 0 where copies take no core from it.
    """

    ranks: int
    latency: float
    bandwidth: float
    handling: float = 0.0
    copying: float = float("inf")
    adding: float = float("inf")
    contention: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {self.ranks!r}")
        rates = (self.bandwidth, self.copying, self.adding)
        if not min(rates) > 0:
            raise ValueError(
                "bandwidth, copying and adding are bytes a second and must "
                f"be above 0, not {rates}"
            )
        if not 0 <= self.contention < 1:
            raise ValueError(
                "contention is a share of the speed, from 0 to below 1, "
                f"not {self.contention!r}"
            )
        if self.latency < 0 or self.handling < 0:
            raise ValueError(
                "latency and handling are seconds and may not be below 0, "
                f"like {self.latency!r} and {self.handling!r}"
            )


@dataclass(eq=False)
class Buffer:
    """A flat buffer: its elements, a multiple of N, and bytes of each."""

    padded: int
    itemsize: int = 4
    trainable: bool = True


@dataclass(eq=False)
class Layer:
    """A unit: its buffers, and the seconds that one rank computes for it.

    `update` is for all elements; a rank that owns 1/N takes 1/N of it.
    """

    name: str
    flats: list[Buffer]
    forward: float
    backward: float
    update: float = 0.0

    @property
    def trainable(self) -> list[Buffer]:
        return [flat for flat in self.flats if flat.trainable]


@dataclass
class Interval:
    """What one lane, "compute" or "link", did from `begin` to `end`.

    `what` is a phase, "wait", or the op of a collective. Seconds since the
    start of the step.
    """

    lane: str
    what: str
    unit: str
    begin: float
    end: float


@dataclass
class Timeline:
    """The intervals of one step, and how long it took, in seconds."""

    intervals: list[Interval] = field(default_factory=list)
    duration: float = 0.0
    calls: int = 0
    most_live: int = 0  # elements of sharded parameters, whole at once

    @property
    def exposed(self) -> float:
        """Seconds in waits: exposed communication."""
        waits = (i for i in self.intervals if i.what == "wait")
        return sum(i.end - i.begin for i in waits)


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


class _Work:
    """A collective under way: transfers, each followed by some summing."""

    def __init__(
        self, rank: _Rank, op: str, unit: str, sent: float, adds: float = 0
    ) -> None:
        self._rank, self._unit, self._sent = rank, unit, sent
        self._again = op == "all_reduce"
        self._adds = adds / rank.machine.adding
        self._end: float | None = rank.transfer(op, unit, sent)

    def wait(self) -> None:
        if self._end is None:
            return
        rank, end, self._end = self._rank, self._end, None
        until = max(rank.now, end) + self._adds
        if self._again:  # the sums go round in a second exchange
            machine = rank.machine
            until += machine.latency + self._sent / machine.bandwidth
        rank.spend("wait", self._unit, until)


class _Net:
    """What a schedule sees of a net, with buffers that have no storage."""

    def __init__(
        self, rank: _Rank, layers: list[Layer], plan: Plan, bucket_size: int
    ) -> None:
        self.units, self.plan, self.bucket_size = layers, plan, bucket_size
        self._rank = rank
        self._whole: dict[Buffer, _Work] = {}

    def _launch(
        self, op: str, unit: Layer, flat: Buffer, elements: int
    ) -> _Work:
        ranks = self._rank.machine.ranks
        row = elements * flat.itemsize / ranks
        adds = 0 if op == "all_gather" else row * (ranks - 1)
        return _Work(self._rank, op, unit.name, row * (ranks - 1), adds)

    def gather(self, unit: Layer) -> Iterator[_Work]:
        for flat in unit.flats:
            if flat not in self._whole:
                work = self._launch("all_gather", unit, flat, flat.padded)
                self._whole[flat] = work
                live = sum(f.padded for f in self._whole)
                line = self._rank.line
                line.most_live = max(line.most_live, live)
            yield self._whole[flat]

    def release(self, unit: Layer) -> None:
        for flat in unit.flats:
            work = self._whole.pop(flat, None)
            if work is not None:
                work.wait()

    def reduce(self, unit: Layer) -> Iterator[_Work]:
        sharded = self.plan.optimizer.sharded
        op = "reduce_scatter" if sharded else "all_reduce"
        ranks = self._rank.machine.ranks
        width = max(1, self.bucket_size // ranks)
        for flat in unit.trainable:
            size = flat.padded // ranks
            for a in range(0, size, width):
                piece = min(width, size - a) * ranks
                yield self._launch(op, unit, flat, piece)

    def reduced(self, unit: Layer) -> None:
        """The sums are there; dividing them is in the backward's time."""

    def send(self, unit: Layer) -> Iterator[_Work]:
        replicated = not self.plan.parameters.sharded
        if replicated and self.plan.optimizer.sharded:
            for flat in unit.trainable:
                yield self._launch("all_gather", unit, flat, flat.padded)


def simulate(
    layers: list[Layer],
    machine: Machine,
    plan: Plan,
    schedule: Any,
    bucket_size: int = 500_000_000,
) -> Timeline:
    """One step of training, as `schedule` orders it on `machine`.

    `layers`: the root first, then the blocks in the order of the forward.
    `schedule`: a new `minizero.seams.Schedule` or `minizero.Overlap`. It is
        the very object that orders real steps; only the net is simulated.

    The second step counts: by then the order is recorded.
    """
    rank = _Rank(machine)
    net = _Net(rank, layers, plan, bucket_size)
    schedule.attach(net)
    _step(net, rank, schedule)
    start, rank.line = rank.now, Timeline()
    _step(net, rank, schedule)
    for interval in rank.line.intervals:
        interval.begin -= start
        interval.end -= start
    rank.line.duration = rank.now - start
    return rank.line


def _step(net: _Net, rank: _Rank, schedule: Any) -> None:
    root, *blocks = net.units
    sharded = net.plan.parameters.sharded
    owned = 1 / rank.machine.ranks if net.plan.optimizer.sharded else 1.0

    def within(unit: Layer, compute: Callable[[], None]) -> None:
        if sharded:
            schedule.gather(net, unit)
        compute()
        if sharded:
            schedule.release(net, unit)

    def compute(what: str, unit: Layer) -> None:
        rank.compute(what, unit.name, getattr(unit, what))

    def forward() -> None:
        for unit in blocks:
            within(unit, partial(compute, "forward", unit))
        compute("forward", root)

    def backward() -> None:
        compute("backward", root)
        for unit in reversed(blocks):
            within(unit, partial(compute, "backward", unit))
            schedule.reduce(net, unit)

    schedule.begin_forward(net)
    within(root, forward)
    schedule.begin_backward(net)
    within(root, backward)
    schedule.reduce(net, root)
    schedule.drain(net)
    for unit in net.units:
        rank.compute("update", unit.name, unit.update * owned)
    for unit in net.units:
        schedule.publish(net, unit)
    schedule.drain(net)
