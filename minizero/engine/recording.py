"""Records what each rank does and holds, in a file that Perfetto and the book open."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .. import comm
from ..memory.trace import Slice, Trace, moments
from ..memory.tracker import Tracker
from ..ranks import rank, world_size
from ..zero import DataParallel
from .engine import Engine

Function = Callable[..., Any]


@contextmanager
def trace(
    engine: Engine | DataParallel, path: str | Path | None = None
) -> Iterator[Recording]:
    """Record the steps inside the block: what a rank does, when, for which unit.

    Every rank enters it, between the same two steps. Then the result's `trace` is this
    rank's; with `path`, rank 0 has written all ranks' there as Chrome trace JSON.

    The book's timeline draws the first 50,000 events of a file: a few steps of a model
    with some dozens of units. On a GPU, times of computing and copying are those of
    their launch.
    """
    record = Recording(engine.net if isinstance(engine, Engine) else engine)
    with record.recording():
        yield record
    if path is not None:
        merged, *others = comm.gather_objects(record.trace.chrome())
        for other in others:
            merged["traceEvents"] += other["traceEvents"]
        if rank() == 0:
            Path(path).write_text(json.dumps(merged))


class Recording:
    """Collects what one rank does inside `recording()`; `trace` has it afterwards.

    `shift`: what is added to seconds of `perf_counter` in the trace.
    """

    trace: Trace

    def __init__(self, net: DataParallel) -> None:
        # seconds since now, on rank 0's clock
        start = torch.tensor([time.time()], dtype=torch.float64)
        comm.broadcast(start)
        self.net, self.shift = net, time.time() - time.perf_counter() - start.item()
        self._computed: list[Slice] = []  # forwards, backwards, updates; may overlap
        self._copies: list[Slice] = []
        self._files: list[tuple[Any, Slice]] = []  # a transfer has its own times
        self._forward: list[float] = []  # starts of the forwards under way
        self._backward: tuple[float, str] | None = None  # under way: start and unit

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens inside, and make the trace."""
        with ExitStack() as stack:
            calls = stack.enter_context(comm.ledger())
            self._tracker = stack.enter_context(Tracker())
            self._tracker.mark("")
            self._watch(stack)
            yield
            self._next_backward()
            stack.close()
            self.trace = self._put_together(calls)

    def _watch(self, stack: ExitStack) -> None:
        """Hook the units' modules, and wrap the methods that compute, copy and read."""

        def wrap(owner: Any, name: str, wrapper: Function, *args: Any) -> None:
            wrapped = partial(wrapper, *args, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, wrapped))

        def begin(*_: Any) -> None:
            self._forward.append(time.perf_counter())

        for unit in self.net.units:
            end = partial(self._end_forward, unit.name)
            stack.callback(unit.module.register_forward_pre_hook(begin).remove)
            stack.callback(unit.module.register_forward_hook(end).remove)
        wrap(self.net, "backward", self._time_call, "backward")
        wrap(self.net, "step", self._time_call, "update")
        storage: Any = self.net.storage
        for name, operation in (("up", "load"), ("down", "add")):
            if hasattr(storage, name):
                wrap(getattr(storage, name), "copy", self._time_copy, operation)
        for operation in ("read", "write") if hasattr(storage, "swap") else ():
            wrap(storage.swap, operation, self._note_transfer, operation)

    def _slice(
        self, lane: str, begin: float, operation: str, unit: str = "", nbytes: int = 0
    ) -> Slice:
        """A slice from `begin` until now."""
        return Slice(rank(), lane, begin, time.perf_counter(), operation, unit, nbytes)

    def _end_forward(self, unit: str, module: Any, args: Any, out: Any) -> None:
        begin = self._forward.pop()
        self._computed.append(self._slice("compute", begin, "forward", unit))
        for x in tree_leaves(out) if torch.is_grad_enabled() else ():
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(lambda _: self._next_backward(unit))

    def _next_backward(self, unit: str = "") -> None:
        """The backward of one unit ends where that of the next one begins."""
        if self._backward is not None:
            begin, before = self._backward
            self._computed.append(self._slice("compute", begin, "backward", before))
        self._backward = (time.perf_counter(), unit) if unit else None

    def _time_call(self, operation: str, fn: Function, *args: Any, **kw: Any) -> Any:
        """Time a call of the net's backward or step."""
        self._next_backward()
        begin = time.perf_counter()
        result = fn(*args, **kw)
        self._next_backward()
        self._computed.append(self._slice("compute", begin, operation))
        return result

    def _current_mark(self) -> tuple[str, str]:
        """What the tracker marked last, and for which unit: a copy is part of it."""
        samples = reversed(self._tracker.samples)
        return next(((s.event, s.unit) for s in samples if s.unit), ("", ""))

    def _time_copy(self, other: str, copy: Function, out: Tensor, x: Tensor) -> None:
        """Time a copy to or from the host; `other` names one that no update makes."""
        begin = time.perf_counter()
        copy(out, x)
        event, unit = self._current_mark()
        operation = event if event in ("in", "out") else other
        self._copies += [self._slice("to host", begin, operation, unit, x.nbytes)]

    def _note_transfer(self, operation: str, fn: Function, at: int, x: Tensor) -> Any:
        """Note a transfer of a file, which goes on and keeps its own times."""
        transfer, unit = fn(at, x), self._current_mark()[1]
        made = self._slice("to disk", 0.0, operation, unit, x.nbytes)
        self._files.append((transfer, made))
        return transfer

    def _put_together(self, calls: comm.Ledger) -> Trace:
        """The trace; a call that nothing has waited for ends now."""
        now, samples = time.perf_counter(), self._tracker.samples
        groups = comm.Groups(self.net.plan.group or world_size())
        peers = {g.name: g.ranks for g in (groups.within, groups.across)}
        slices, computed = self._copies, self._computed
        for i, c in enumerate(calls):
            lane = "gather" if c.op in ("all_gather", "broadcast") else "reduce"
            end, among = c.finished or now, peers.get(c.group, ())
            made = Slice(rank(), lane, c.launched, end, c.op, c.unit, c.bytes)
            slices.append(made._replace(call=i, phase=c.phase, peers=among))
            waits = {"launch": (c.launched, c.returned or now)}
            waits |= {"wait": (c.waited, end)} if c.waited else {}
            for operation, times in waits.items():
                computed.append(Slice(rank(), "compute", *times, operation, c.unit))
        slices += innermost(computed)
        for transfer, made in self._files:
            slices.append(made._replace(begin=transfer.started, end=transfer.finished))
        for s in samples:
            if s.event == "release":
                at = rank(), "compute", s.time, s.time
                slices.append(Slice(*at, s.event, s.unit))
        shift, slices = self.shift, sorted(slices, key=lambda s: s.begin)
        slices = [s._replace(begin=s.begin + shift, end=s.end + shift) for s in slices]
        return Trace(world_size(), slices, [*moments(samples, rank(), shift)])


def innermost(slices: Iterable[Slice]) -> Iterator[Slice]:
    """Disjoint pieces of time in order, each of the slice that began last.

    A slice that reaches beyond the one that it began in ends with that.
    """
    now, stack = 0.0, list[Slice]()
    for s in (*sorted(slices, key=lambda s: (s.begin, -s.end)), None):
        until = float("inf") if s is None else s.begin
        while stack and now < until:
            running = stack[-1]
            end = min(running.end, until)
            if end > now:
                yield running._replace(begin=now, end=end)
                now = end
            if running.end <= until:
                stack.pop()
        now = max(now, until)
        if s is not None:
            end = min(s.end, stack[-1].end) if stack else s.end
            stack.append(s._replace(end=end))
