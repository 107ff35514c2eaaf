"""A machine that need not be there, and what one step does on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..memory.trace import Change, Moment


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
    `across`: where these N ranks are one group of several, the groups and the link
        between them; None: there are no others.
    `bus`, `disk`: bytes a second between device and host, each way, and of the
        rank's part of a disk, for what rests there. Infinite, they take no time.
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
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {self.ranks!r}")
        names = ("bandwidth", "copying", "adding", "bus", "disk")
        rates = tuple(getattr(self, name) for name in names)
        if not min(rates) > 0:
            raise ValueError(
                f"{', '.join(names)} are bytes a second and must be above 0, not {rates}"
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
    """A flat buffer: its elements, a multiple of N, and bytes of each.

    `reduced`: bytes of each as a gradient is sent; `itemsize` unless given. `states`:
    bytes of optimizer state of each. `coded`: bytes of each on the link, gathered and
    reduced, where these are quantized.
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
    collective, or what a copy does. `nbytes`: that were sent or copied.
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

    `moments`: when live bytes came and went that are there for a part of the step.
    """

    intervals: list[Interval] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    duration: float = 0.0
    calls: int = 0
    most_live: int = 0  # elements of sharded parameters, whole at once

    @property
    def exposed(self) -> float:
        """Seconds in waits: exposed communication."""
        waits = (i for i in self.intervals if i.what == "wait")
        return sum(i.end - i.begin for i in waits)

    def shifted(self, start: float) -> Timeline:
        """The same, `start` seconds earlier."""
        for interval in self.intervals:
            interval.begin -= start
            interval.end -= start
        self.moments = [m._replace(time=m.time - start) for m in self.moments]
        return self

    def changed(self, time: float, category: str, unit: str, nbytes: int) -> None:
        """Note that bytes on the device came, or went if `nbytes` is below 0."""
        if nbytes:
            change = Change("device", category, nbytes, unit)
            self.moments.append(Moment(0, time, (change,)))
