"""A toy machine: a data sheet that ranks on this computer are made to feel.

A `ToyGPU` has them feel how much memory there is, `paced` how fast bytes move: over the
link, over the slot to the host, and through memory in an update. So what a plan moves
costs seconds here too. `measured` writes a data sheet with this computer's own
arithmetic; the planner takes either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from minizero import comm
from minizero.comm.collectives import Work
from minizero.lab.models.gpt import Block, GPTConfig
from minizero.offload.copy_streams import CopyStream
from minizero.ranks.launch import world_size
from minizero.scale.machines import BUS, NETWORK, Machine, bus
from minizero.scale.operators import Costs
from minizero.scale.predict import update_seconds
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


@contextmanager
def paced(machine: Machine) -> Iterator[None]:
    """Collectives, copies to or from the host, and updates take as on `machine`.

    As the planner counts them: a collective is over when the link has carried it, after
    those launched before it, and an update when its bytes have passed through the
    memory of where it is made. A rank sleeps as long, so others can compute.
    """
    latency, speed = bus(machine, world_size(), machine.gpus)
    arrives: dict[int, float] = {}
    free, counted = 0.0, 0
    wait, copy, update = Work.wait, CopyStream.copy, Home.update

    def waiting(work: Work) -> None:
        nonlocal free, counted
        for call in calls[counted:]:
            free = max(free, call.launched) + latency + call.bytes / speed
            arrives[id(call)] = free
        counted = len(calls)
        if work._finish is not None:
            until = arrives.get(id(work.call), 0.0)
            work._finish = partial(_not_before, until, work._finish)
        wait(work)

    def copying(stream: CopyStream, out: Tensor, source: Tensor) -> None:
        until = time.perf_counter() + source.nbytes / (BUS * machine.pcie)
        _not_before(until, partial(copy, stream, out, source))

    def updating(home: Home, near: Near, *rest: Any) -> None:
        elements = sum(shard.master.numel() for shard in near.shards)
        seconds = elements * update_seconds(machine, machine.gpus, home.plan)
        _not_before(time.perf_counter() + seconds, partial(update, home, near, *rest))

    with (
        comm.ledger() as calls,
        mock.patch.object(Home, "update", updating),
        mock.patch.object(Work, "wait", waiting),
        mock.patch.object(CopyStream, "copy", copying),
    ):
        yield


def _not_before(until: float, function: Callable[[], Any]) -> None:
    function()
    left = until - time.perf_counter()
    if left > 0:
        time.sleep(left)


def measured(config: GPTConfig, tokens: int, machine: Machine = TOY) -> Machine:
    """`machine` with this computer's arithmetic, in fp32, for a block of `config`.

    All ranks call it at once, since they share the cores. Products and attention are
    timed alone; what a whole block takes longer than these, and than its passes over
    memory would at `machine`'s speed, goes to its products.
    """
    hidden, sequence = config.hidden, config.sequence
    x = torch.randn(tokens // sequence, sequence, hidden)
    heads = (len(x), config.heads, sequence, hidden // config.heads)
    weight, q = torch.randn(4 * hidden, hidden), torch.randn(heads, requires_grad=True)
    attend = partial(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    block = Block(config)
    comm.barrier()
    product = seconds(lambda: F.linear(x, weight))
    scores = seconds(lambda: attend().sum().backward())
    whole = seconds(lambda: block(x).sum().backward())
    # `Costs` takes 16-bit peaks, and half of them for fp32
    peak = 2 * 8 * hidden * hidden * tokens / product
    found = replace(machine, peak=peak, matmul=1.0, attention=1.0)
    costs = Costs(shape_of(config), found, tokens, sequence, precision="fp32")
    passes = sum(map(costs.memory, costs.passes()))
    products = sum(costs.block("none")) - passes - sum(costs.scores())
    slower = max(whole - passes - scores, product) / products
    attention = sum(costs.scores()) / scores
    return replace(found, matmul=1 / slower, attention=attention)


def seconds(function: Callable[[], Any], turns: int = 20) -> float:
    """The shortest time of a call: what others take from a core adds to the rest."""
    times = []
    for _ in range(turns):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)
