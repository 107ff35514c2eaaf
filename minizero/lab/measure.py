"""A step of a rank, timed by its ledger: between the calls it computes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from minizero import comm
from minizero.comm.ledger import Call
from minizero.overlap.simulator import Interval
from minizero.zero import DataParallel


@dataclass
class Step:
    """One step of one rank; times in seconds of `perf_counter`."""

    begin: float
    forward_end: float
    backward_end: float
    end: float
    calls: list[Call]

    @property
    def duration(self) -> float:
        return self.end - self.begin

    @property
    def exposed(self) -> float:
        """Seconds in which the rank waits for a call."""
        return sum(call.finished - call.waited for call in self.calls)

    def intervals(self) -> list[Interval]:
        """The step as the simulator gives it: a lane of computation, a lane of calls.

        A call's interval ends when the wait for it does, because nobody records when
        its data arrived.
        """
        lanes = []
        launches = [(c.launched, c.returned, "launch", c.unit) for c in self.calls]
        waits = [(c.waited, c.finished, "wait", c.unit) for c in self.calls]
        spent = sorted(launches + waits)
        phases = (
            ("forward", self.begin, self.forward_end),
            ("backward", self.forward_end, self.backward_end),
            ("update", self.backward_end, self.end),
        )
        for phase, begin, end in phases:
            now = begin
            for since, until, what, unit in spent:
                if begin <= since < end:
                    lanes.append(Interval("compute", phase, "", now, since))
                    lanes.append(Interval("compute", what, unit, since, until))
                    now = until
            lanes.append(Interval("compute", phase, "", now, end))
        lanes += [
            Interval("link", c.op, c.unit, c.launched, c.finished) for c in self.calls
        ]
        for lane in lanes:
            lane.begin -= self.begin
            lane.end -= self.begin
        return lanes


def timed_step(net: DataParallel, x: Tensor, y: Tensor) -> Step:
    """Forward, backward and update of one batch, after a barrier."""
    comm.barrier()
    with comm.ledger() as calls:
        begin = time.perf_counter()
        loss = net(x, y)
        forward_end = time.perf_counter()
        net.backward(loss)
        backward_end = time.perf_counter()
        net.step()
        end = time.perf_counter()
    return Step(begin, forward_end, backward_end, end, list(calls))
