"""A machine that need not be there, and what one step does on it."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """

    ranks: int
    latency: float
    bandwidth: float
    handling: float = 0.0
    copying: float = float("inf")
    adding: float = float("inf")
    contention: float = 0.0
    across: Machine | None = None

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
    """A flat buffer: its elements, a multiple of N, and bytes of each.

    `reduced`: bytes of each as a gradient is sent; `itemsize` unless given.
    """

    padded: int
    itemsize: int = 4
    trainable: bool = True
    reduced: int | None = None


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
