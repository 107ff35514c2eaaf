"""A toy machine: a data sheet that ranks on this computer are made to feel.

A `ToyGPU` has them feel how much memory there is, `paced` how fast bytes move: over the
link, over the slot to the host, and through memory in an update; `computing` how long
a block takes. They wait for it, which needs no core: what a plan costs is felt in
seconds, whatever else this computer does. The engine, its schedule, its bytes and its
calls are the real ones; only their speeds are the data sheet's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from minizero import comm
from minizero.comm.collectives import Work
from minizero.comm.ledger import Call
from minizero.lab.models.gpt import GPT, Block, GPTConfig
from minizero.offload.copy_streams import CopyStream
from minizero.offload.host import HostStorage
from minizero.ranks.launch import world_size
from minizero.scale.machines import BUS, NETWORK, Machine, bus
from minizero.scale.operators import Costs
from minizero.scale.predict import adam_seconds, layers_of
from minizero.scale.shapes import Shape
from minizero.zero.interfaces import Home, Near

TOY = Machine(
    "toy machine",
    gpus=1,
    peak=50e9,  # so 25e9 in fp32, on half a core
    memory=8.5e6,
    hbm=2e9,
    link=float("inf"),
    network=50e6 / NETWORK,
    pcie=200e6 / BUS,
    host=64e6,
    dram=1e9,
    drives=1,
    drive=1e9,
    matmul=1.0,
    attention=0.4,
)
"""Each rank a node of its own: 8.5 MB, a link of 50 MB/s, a slot of 200 MB/s."""


def shape_of(config: GPTConfig) -> Shape:
    """The planner's shape of a `GPT`; it does not count positions."""
    return Shape(config.layers, config.hidden, config.heads, config.vocabulary)


def sleep_until(moment: float) -> None:
    """Wait, without a core, until `perf_counter` shows so much."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


class _Links:
    """When each collective of a ledger would have been over on a machine."""

    def __init__(self, machine: Machine, group: int | None, calls: list[Call]) -> None:
        ranks, node = world_size(), machine.gpus
        self.calls, self.counted = calls, 0
        self.speeds = {"all": bus(machine, ranks, node)}
        if group:
            self.speeds["within"] = bus(machine, group, node)
            self.speeds["across"] = bus(machine, ranks // group, 1)
        self.free = dict.fromkeys(self.speeds, 0.0)
        self.over: dict[int, float] = {}
        self.holds: dict[int, float] = {}  # calls that begin no earlier

    def hold(self, until: float) -> None:
        """The next call waits for a copy."""
        i = len(self.calls)
        self.holds[i] = max(until, self.holds.get(i, 0.0))

    def until(self, call: Call) -> float:
        """When it is over: its link has carried what was launched before it."""
        for i, new in enumerate(self.calls[self.counted :], self.counted):
            latency, speed = self.speeds[new.scope]
            begin = max(self.free[new.scope], new.launched, self.holds.pop(i, 0.0))
            self.free[new.scope] = begin + latency + new.bytes / speed
            self.over[id(new)] = self.free[new.scope]
        self.counted = len(self.calls)
        return self.over.get(id(call), 0.0)


@dataclass
class _Copied:
    """The moment when a stream's copies are done, as `CopyEvent`.

    The host sleeps until then; where the device waits, only its next call does.
    """

    until: float
    hold: Callable[[float], None]

    def wait(self, on: str = "cpu") -> None:
        (sleep_until if on == "cpu" else self.hold)(self.until)

    def over(self) -> bool:
        return time.perf_counter() >= self.until


@contextmanager
def paced(machine: Machine, group: int | None = None) -> Iterator[None]:
    """Collectives, copies to or from the host, and updates take as on `machine`.

    As the planner counts them: a collective is over when the link has carried it, after
    those launched before it, and an update when its bytes have passed through the
    memory of where it is made. group: ranks that share a copy, if there are groups.
    """
    links: _Links
    frees: dict[int, float] = {}
    slot = machine.slot(machine.gpus)
    wait, copy, follow = Work.wait, CopyStream.copy, CopyStream.follow
    load, update = HostStorage.load, Home.update

    def waiting(work: Work) -> None:
        if work._finish is not None:
            work._finish = partial(_not_before, links.until(work.call), work._finish)
        wait(work)

    def free(stream: CopyStream) -> float:
        return frees.get(id(stream), 0.0)

    def copying(stream: CopyStream, out: Tensor, source: Tensor) -> None:
        copy(stream, out, source)
        begin = max(free(stream), time.perf_counter())
        frees[id(stream)] = begin + source.nbytes / slot

    def following(stream: CopyStream, *others: CopyStream) -> None:
        follow(stream, *others)
        frees[id(stream)] = max(map(free, (stream, *others)))

    def loading(home: HostStorage, shard: Tensor, into: Tensor) -> Tensor:
        found = load(home, shard, into)
        if found is into:
            links.hold(free(home.up))
        return found

    def updating(home: Home, near: Near, *rest: Any) -> None:
        elements = sum(shard.master.numel() for shard in near.shards)
        where = home.plan.optimizer.on
        seconds = elements * adam_seconds(machine, machine.gpus, where)
        _not_before(time.perf_counter() + seconds, partial(update, home, near, *rest))

    with (
        comm.ledger() as calls,
        mock.patch.object(Home, "update", updating),
        mock.patch.object(Work, "wait", waiting),
        mock.patch.object(CopyStream, "copy", copying),
        mock.patch.object(CopyStream, "follow", following),
        mock.patch.object(CopyStream, "event", lambda s: _Copied(free(s), links.hold)),
        mock.patch.object(HostStorage, "load", loading),
    ):
        links = _Links(machine, group, calls)
        yield


def _not_before(until: float, function: Callable[[], Any]) -> None:
    function()
    sleep_until(until)


class _Clock:
    """Waits, less what this thread has really worked since the last one."""

    def __init__(self) -> None:
        self.worked = time.thread_time()
        self.ahead = 0.0

    def spend(self, seconds: float) -> None:
        begin = time.perf_counter()
        taken = self.ahead + time.thread_time() - self.worked
        self.ahead = max(0.0, taken - seconds)
        sleep_until(begin + seconds - taken)
        self.worked = time.thread_time()


class _Around(torch.autograd.Function):
    """What it is given; `hook` is called when its gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hook: Callable[[], None]) -> Tensor:
        ctx.hook = hook
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.hook()
        return grad, None


@contextmanager
def computing(costs: Costs, ranks: int, how: str) -> Iterator[None]:
    """Blocks and the head of a `GPT` take as long as `costs` says, or longer.

    A rank waits when it begins with a block, and less by what it has really worked
    since the last time. how: what is recomputed, as for `predict`.
    """
    root, block = layers_of(costs, ranks, how, costs.itemsize, 0.0)[:2]
    again = costs.block(how)[1] - costs.block("none")[1]
    clock, run, whole = _Clock(), Block.forward, GPT.forward

    def block_forward(module: Block, x: Tensor) -> Tensor:
        recomputes = torch._C._current_autograd_node() is not None
        clock.spend(again if recomputes else block.forward)
        y = run(module, x)
        return _Around.apply(y, partial(clock.spend, block.backward - again))

    def gpt_forward(module: GPT, *batch: Tensor) -> Tensor:
        loss = whole(module, *batch)
        clock.spend(root.forward)
        return _Around.apply(loss, partial(clock.spend, root.backward))

    with (
        mock.patch.object(Block, "forward", block_forward),
        mock.patch.object(GPT, "forward", gpt_forward),
    ):
        yield
