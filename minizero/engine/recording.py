"""Records what each rank does and holds, into a file that Perfetto and the book open."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import comm
from ..memory.trace import Slice, Trace, moments
from ..memory.tracker import Tracker
from ..ranks import rank, world_size
from ..zero import DataParallel
from .engine import Engine

QUIET = 2.0
"""Seconds without an event after which a rank writes its part: it may be killed."""

Function = Callable[..., Any]


@contextmanager
def trace(
    engine: Engine | DataParallel,
    path: str | Path | None = None,
    tracker: Tracker | None = None,
) -> Iterator[Recording]:
    """Record the steps inside the block: what a rank does, when, for which unit, in bytes.

    Every rank enters it, at the same moment. Afterwards the result's `trace` is this
    rank's; with `path`, rank 0 has written all ranks' there as Chrome trace JSON. If the
    block fails, or nothing happens in it for `QUIET` seconds, each rank leaves its own
    part, `path` with `.rank0` and so on at its end. Calls that it was waiting for last
    until then, so the parts of a hang show who waited for whom.

    The book's timeline draws the first 50,000 events of a file: a few steps of a model
    with some dozens of units. On a GPU, times of computing and copying are those of
    their launch. `tracker`: one that is running; else a new one counts live bytes.
    """
    net = engine.net if isinstance(engine, Engine) else engine
    record = Recording(net, tracker)
    over = Event()

    def part(of: int) -> Path:
        return Path(f"{path}.rank{of}")

    def write(found: Trace) -> None:
        part(rank()).write_text(json.dumps(found.chrome()))

    def watch() -> None:
        before = written = 0
        while not over.wait(QUIET):
            now = record.events()
            if now == before != written:
                write(record.until(time.perf_counter()))
                written = now
            before = now

    watcher = Thread(target=watch, daemon=True)
    if path is not None:
        watcher.start()
    try:
        with record.recording():
            yield record
    finally:
        over.set()
        if path is not None:
            watcher.join()
            write(record.trace)
    if path is None:
        return
    comm.barrier()
    if rank() == 0:
        parts = [part(r) for r in range(world_size())]
        whole, *others = (json.loads(file.read_text()) for file in parts)
        for other in others:
            whole["traceEvents"] += other["traceEvents"]
        Path(path).write_text(json.dumps(whole))
        for file in parts:
            file.unlink()


class Span(NamedTuple):
    """An operation of a rank for a unit, in seconds of `perf_counter`."""

    begin: float
    end: float
    operation: str
    unit: str = ""


class Recording:
    """What one rank does meanwhile; `trace` has it afterwards.

    `calls`, `tracker`: the ledger and the live bytes that it is made of. `shift`: what is
    added to seconds of `perf_counter` in the trace.
    """

    trace: Trace

    def __init__(self, net: DataParallel, tracker: Tracker | None) -> None:
        # seconds since now, on rank 0's clock
        start = torch.tensor([time.time()], dtype=torch.float64)
        comm.broadcast(start)
        self.net, self.shift = net, time.time() - time.perf_counter() - start.item()
        self.calls, self.tracker = comm.Ledger(), tracker or Tracker()
        self._is_running = tracker is not None
        self._spans: list[Span] = []
        self._copies: list[tuple[Span, int]] = []
        self._files: list[tuple[Any, str, str, int]] = []
        self._backward: list[tuple[float, str]] = []  # the unit whose backward runs
        self._first = 0  # of the tracker's samples

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens inside, and make the trace, whether it fails or not."""
        with ExitStack() as stack:
            self.calls = stack.enter_context(comm.ledger())
            if not self._is_running:
                stack.enter_context(self.tracker)
            self.tracker.mark("")
            self._first = len(self.tracker.samples) - 1
            self._watch(stack)
            try:
                yield
            finally:
                self._next_backward()
                stack.close()
                self.trace = self.until(time.perf_counter())

    def _watch(self, stack: ExitStack) -> None:
        """Hooks on the units' modules, and around the methods that work."""

        def around(owner: Any, name: str, wrapper: Function) -> None:
            setattr(owner, name, partial(wrapper, getattr(owner, name)))
            stack.callback(delattr, owner, name)

        for unit in self.net.units:
            begun: list[float] = []
            before = partial(self._before_forward, begun)
            after = partial(self._after_forward, begun, unit.name)
            for handle in (
                unit.module.register_forward_pre_hook(before),
                unit.module.register_forward_hook(after),
            ):
                stack.callback(handle.remove)
        around(self.net, "backward", partial(self._timed, "backward"))
        around(self.net, "step", partial(self._timed, "update"))
        storage: Any = self.net.storage
        for name, operation in (("up", "load"), ("down", "add")):
            if hasattr(storage, name):
                copied = partial(self._copied, operation)
                around(getattr(storage, name), "copy", copied)
        for operation in ("read", "write") if hasattr(storage, "swap") else ():
            around(storage.swap, operation, partial(self._moved, operation))

    def _before_forward(self, begun: list[float], *_: Any) -> None:
        begun.append(time.perf_counter())

    def _after_forward(
        self, begun: list[float], unit: str, module: nn.Module, args: Any, out: Any
    ) -> None:
        self._spans.append(Span(begun.pop(), time.perf_counter(), "forward", unit))
        for x in tree_leaves(out) if torch.is_grad_enabled() else ():
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(lambda _: self._next_backward(unit))

    def _next_backward(self, unit: str = "") -> None:
        """The backward of one unit ends where that of the next one begins."""
        now = time.perf_counter()
        while self._backward:
            begin, before = self._backward.pop()
            self._spans.append(Span(begin, now, "backward", before))
        if unit:
            self._backward.append((now, unit))

    def _timed(self, operation: str, function: Function, *args: Any, **kw: Any) -> Any:
        self._next_backward()
        begin = time.perf_counter()
        try:
            return function(*args, **kw)
        finally:
            self._next_backward()
            self._spans.append(Span(begin, time.perf_counter(), operation))

    def _last(self) -> tuple[str, str]:
        """The event that was marked last, and its unit."""
        marked = (s for s in reversed(self.tracker.samples) if s.unit)
        last = next(marked, None)
        return (last.event, last.unit) if last else ("", "")

    def _copied(self, other: str, copy: Function, out: Tensor, given: Tensor) -> None:
        begin = time.perf_counter()
        copy(out, given)
        event, unit = self._last()
        operation = event if event in ("in", "out") else other
        span = Span(begin, time.perf_counter(), operation, unit)
        self._copies.append((span, given.nbytes))

    def _moved(self, operation: str, function: Function, at: int, data: Tensor) -> Any:
        transfer = function(at, data)
        self._files.append((transfer, operation, self._last()[1], data.nbytes))
        return transfer

    def events(self) -> int:
        """How many things have happened so far."""
        return len(self.calls) + len(self.tracker.samples) + len(self._spans)

    def until(self, now: float) -> Trace:
        """The trace so far; calls that are not finished end now."""
        here, ranks = rank(), world_size()
        groups = comm.Groups(self.net.plan.group or ranks)
        peers = {g.name: g.ranks for g in (groups.within, groups.across)}

        def cut(lane: str, s: Span, nbytes: int = 0) -> Slice:
            times = s.begin + self.shift, s.end + self.shift
            return Slice(here, lane, *times, s.operation, s.unit, nbytes)

        slices, waits = [], []
        for i, c in enumerate(self.calls):
            span = Span(c.launched, c.finished or now, c.op, c.unit)
            lane = "gather" if c.op in ("all_gather", "broadcast") else "reduce"
            made = cut(lane, span, c.bytes)._replace(call=i, phase=c.phase)
            slices.append(made._replace(peers=peers.get(c.group, ())))
            waits.append(Span(c.launched, c.returned or now, "launch", c.unit))
            if c.waited:
                waits.append(Span(c.waited, c.finished or now, "wait", c.unit))
        slices += [cut("compute", span) for span in innermost(self._spans + waits)]
        slices += [cut("to host", span, nbytes) for span, nbytes in self._copies]
        for transfer, operation, unit, nbytes in self._files:
            span = Span(transfer.started, transfer.finished, operation, unit)
            slices.append(cut("to disk", span, nbytes))
        samples = self.tracker.samples[self._first :]
        for s in samples:
            if s.event == "release":
                slices.append(cut("compute", Span(s.time, s.time, s.event, s.unit)))
        slices.sort(key=lambda s: s.begin)
        return Trace(ranks, slices, [*moments(samples, here, self.shift)])


def innermost(spans: Iterable[Span]) -> Iterator[Span]:
    """Disjoint pieces of time in order, each of the span that began last.

    A span that reaches beyond the one that it began in ends with that.
    """
    now, stack = 0.0, list[Span]()

    def until(time: float) -> Iterator[Span]:
        nonlocal now
        while stack and now < time:
            span = stack[-1]
            end = min(span.end, time)
            if end > now:
                yield span._replace(begin=now, end=end)
                now = end
            if span.end <= time:
                stack.pop()
        now = max(now, time)

    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        yield from until(span.begin)
        outer = stack[-1].end if stack else span.end
        stack.append(span._replace(end=min(span.end, outer)))
    yield from until(float("inf"))
