"""A run recorded on each rank: the ledger's calls, live bytes, what is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import comm
from ..memory.trace import Slice, Trace, moments
from ..memory.tracker import Tracker
from ..offload.swap_file import Transfer
from ..ranks.launch import rank, world_size
from ..zero.autograd_hooks import hook_outputs
from ..zero.data_parallel import DataParallel
from .sources import source

Function = Callable[..., Any]


class Span(NamedTuple):
    """What a rank did for a unit, in seconds of `perf_counter`."""

    begin: float
    end: float
    verb: str
    unit: str = ""


class Recording:
    """What one rank does meanwhile; `trace` has it when it is over.

    `calls`, `tracker`: what that was made of. `shift`: what was added to the seconds of
    `perf_counter` in them.
    """

    trace: Trace

    def __init__(self, net: DataParallel, tracker: Tracker | None) -> None:
        self.net, self.shift = net, _shift()
        self.calls, self.tracker = comm.Ledger(), tracker or Tracker()
        self._running = tracker is not None
        self._spans: list[Span] = []
        self._copies: list[tuple[Span, int]] = []
        self._files: list[tuple[Transfer, str, str, int]] = []
        self._backward: list[tuple[float, str]] = []  # the unit's that is under way
        self._first = 0  # of the tracker's samples

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens inside, and make the trace, whether it fails or not."""
        with ExitStack() as stack:
            self.calls = stack.enter_context(comm.ledger())
            if not self._running:
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
        net = self.net
        home: Any = net.home
        for unit in net.units:
            before, after = self._around(unit.name)
            for module in unit.modules:
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after).remove)
        for verb, name in (("backward", "backward"), ("update", "step")):
            stack.enter_context(_instead(net, name, partial(self._timed, verb)))
        for stream in ("up", "down"):
            if hasattr(home, stream):
                copied = partial(self._copied, stream)
                stack.enter_context(_instead(getattr(home, stream), "copy", copied))
        for verb in ("read", "write") if hasattr(home, "swap") else ():
            stack.enter_context(_instead(home.swap, verb, partial(self._moved, verb)))

    def _around(self, unit: str) -> tuple[Function, Function]:
        """Hooks before and after the forward of a unit's module."""
        begun: list[float] = []

        def before(*_: Any) -> None:
            begun.append(time.perf_counter())

        def after(module: nn.Module, args: Any, out: Any) -> None:
            self._spans.append(Span(begun.pop(), time.perf_counter(), "forward", unit))
            if torch.is_grad_enabled():
                hook_outputs(lambda _: self._next_backward(unit), out)

        return before, after

    def _next_backward(self, unit: str = "") -> None:
        """The backward of one unit ends where that of the next one begins."""
        now = time.perf_counter()
        while self._backward:
            begin, before = self._backward.pop()
            self._spans.append(Span(begin, now, "backward", before))
        if unit:
            self._backward.append((now, unit))

    def _timed(self, verb: str, function: Function) -> Function:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._next_backward()
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._next_backward()
                self._spans.append(Span(begin, time.perf_counter(), verb))

        return timed

    def _last(self) -> tuple[str, str]:
        """The event that was marked last, and its unit."""
        marked = (s for s in reversed(self.tracker.samples) if s.unit)
        last = next(marked, None)
        return (last.event, last.unit) if last else ("", "")

    def _copied(self, stream: str, copy: Function) -> Function:
        def timed(out: Tensor, given: Tensor) -> None:
            begin = time.perf_counter()
            copy(out, given)
            event, unit = self._last()
            other = "load" if stream == "up" else "add"
            verb = event if event in ("in", "out") else other
            span = Span(begin, time.perf_counter(), verb, unit)
            self._copies.append((span, given.nbytes))

        return timed

    def _moved(self, verb: str, function: Function) -> Function:
        def noted(at: int, data: Tensor) -> Transfer:
            transfer: Transfer = function(at, data)
            self._files.append((transfer, verb, self._last()[1], data.nbytes))
            return transfer

        return noted

    def events(self) -> int:
        """How many things have happened so far."""
        return len(self.calls) + len(self.tracker.samples) + len(self._spans)

    def until(self, now: float) -> Trace:
        """What there is so far; calls that nobody has finished are taken to end now."""
        kind, shift, here = type(self.net), self.shift, rank()
        groups = comm.Groups(self.net.plan.group or world_size())
        scopes = {s.name: s.ranks for s in (groups.within, groups.across)}

        def cut(
            lane: str, s: Span, nbytes: int = 0, call: int = -1, phase: str = ""
        ) -> Slice:
            code = source(kind, s.verb, s.unit, phase)
            times = s.begin + shift, s.end + shift
            return Slice(here, lane, *times, s.verb, s.unit, nbytes, call, phase, code)

        slices, waits = [], []
        for i, c in enumerate(self.calls):
            span = Span(c.launched, c.finished or now, c.op, c.unit)
            lane = "gather" if c.op in ("all_gather", "broadcast") else "reduce"
            made = cut(lane, span, c.bytes, i, c.phase)
            slices.append(made._replace(peers=scopes.get(c.group, ())))
            waits.append(Span(c.launched, c.returned or now, "launch", c.unit))
            if c.waited:
                waits.append(Span(c.waited, c.finished or now, "wait", c.unit))
        slices += [cut("compute", span) for span in innermost(self._spans + waits)]
        slices += [cut("to host", span, nbytes) for span, nbytes in self._copies]
        for transfer, verb, unit, nbytes in self._files:
            span = Span(transfer.started, transfer.finished, verb, unit)
            slices.append(cut("to disk", span, nbytes))
        samples = self.tracker.samples[self._first :]
        for s in samples:
            if s.event == "release":
                slices.append(cut("compute", Span(s.time, s.time, s.event, s.unit)))
        slices.sort(key=lambda s: s.begin)
        return Trace(world_size(), slices, [*moments(samples, here, shift)])


def innermost(spans: Iterable[Span]) -> Iterator[Span]:
    """Pieces of time one after the other, each of the span that began last.

    What reaches beyond the span that it began in ends with that.
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


def _shift() -> float:
    """From this rank's `perf_counter` to seconds since now, on rank 0's clock."""
    start = torch.tensor([time.time()], dtype=torch.float64)
    comm.broadcast(start)
    return time.time() - time.perf_counter() - start.item()


@contextmanager
def _instead(
    owner: object, name: str, wrap: Callable[[Function], Function]
) -> Iterator[None]:
    """Meanwhile a method of one object is what `wrap` makes of it."""
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)
