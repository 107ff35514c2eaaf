"""One rank in simulated time: its thread, its link, its bus and its disk."""

from __future__ import annotations

from .machine import Interval, Machine, Timeline


class Rank:
    """One rank's thread, and what moves its bytes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now = 0.0
        self.line = Timeline()
        self._busy: list[tuple[float, float]] = []  # the link, in order
        self._free: dict[str, float] = {}  # since when: up, down and the disk

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

    def transfer(self, op: str, unit: str, nbytes: float, since: float = 0.0) -> float:
        """Queue for the link, from `since` on; returns when the transfer ends."""
        machine = self.machine
        handed = machine.handling + nbytes / machine.copying
        self.compute("launch", unit, handed if nbytes else 0.0)
        free = self._busy[-1][1] if self._busy else 0.0
        begin = max(self.now, free, since)
        held = machine.latency + nbytes / machine.bandwidth
        end = begin + held if nbytes else begin
        self._busy = [b for b in self._busy if b[1] > self.now]
        self._busy.append((begin, end))
        self.line.intervals.append(Interval("link", op, unit, begin, end, nbytes))
        self.line.calls += 1
        return end


class Transfer:
    """A collective under way: a transfer, followed by some summing."""

    def __init__(
        self,
        rank: Rank,
        op: str,
        unit: str,
        sent: float,
        adds: float = 0,
        since: float = 0.0,
        more: float = 0.0,
    ) -> None:
        self._rank, self._unit, self.op = rank, unit, op
        machine = rank.machine
        self._after = adds / machine.adding
        if op == "all_reduce":  # the sums go round in a second exchange
            self._after += machine.latency + sent / machine.bandwidth
        self._after += more  # seconds of a second hop, which follows the wait
        self._end: float | None = rank.transfer(op, unit, sent, since)
        self._drawn = rank.line.intervals[-1]

    def wait(self) -> None:
        if self._end is None:
            return
        rank, end, self._end = self._rank, self._end, None
        rank.spend("wait", self._unit, max(rank.now, end) + self._after)
        if self.op == "all_reduce":
            self._drawn.end, self._drawn.nbytes = rank.now, 2 * self._drawn.nbytes
