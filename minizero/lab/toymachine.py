"""A toy machine: a data sheet that ranks on this computer are made to feel.

A `ToyGPU` has them feel its memory, `slow_link` its link and its slot to the host: a
plan's bytes cost seconds here too. `measured` writes a data sheet with this computer's
own arithmetic; the planner takes either.
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
from minizero.scale.machines import BUS, NETWORK, STREAM, Machine, bus
from minizero.scale.operators import Costs
from minizero.scale.shapes import Shape

TOY = Machine(
    "toy machine",
    gpus=1,
    peak=50e9,  # so 25e9 in fp32, on half a core
    memory=8.5e6,
    hbm=6e9,
    link=float("inf"),
    network=50e6 / NETWORK,
    pcie=200e6 / BUS,
    host=64e6,
    dram=8e9,
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
def slow_link(machine: Machine) -> Iterator[None]:
    """Collectives, and copies to or from the host, take as long as on `machine`.

    A collective is over when the link has carried it, after those launched before it:
    latency and speed are those of `scale.machines.bus`, as the planner has them. A rank
    that waits for that sleeps, so what it computes meanwhile is hidden as on a GPU.
    """
    latency, speed = bus(machine, world_size(), machine.gpus)
    arrives: dict[int, float] = {}
    free, counted = 0.0, 0
    wait, copy = Work.wait, CopyStream.copy

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

    with (
        comm.ledger() as calls,
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
    timed alone. What a whole block takes longer goes to its passes over memory.
    """
    hidden, sequence = config.hidden, config.sequence
    x = torch.randn(tokens // sequence, sequence, hidden)
    heads = (len(x), config.heads, sequence, hidden // config.heads)
    weight, q = torch.randn(4 * hidden, hidden), torch.randn(heads, requires_grad=True)
    attend = partial(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    block, state = Block(config), torch.randn(3, 1 << 20)
    comm.barrier()
    product = seconds(lambda: F.linear(x, weight))
    scores = seconds(lambda: attend().sum().backward())
    whole = seconds(lambda: block(x).sum().backward())
    update = seconds(lambda: state[0].addcmul_(state[1], state[2]))
    stream = 16 * state.shape[1] / update
    # `Costs` takes 16-bit peaks, and half of them for fp32
    peak = 2 * 8 * hidden * hidden * tokens / product
    found = replace(machine, peak=peak, matmul=1.0, attention=1.0, hbm=1e18)
    costs = Costs(shape_of(config), found, tokens, sequence, precision="fp32")
    found = replace(found, attention=sum(costs.scores()) / scores)
    costs = replace(costs, machine=found)
    rest = max(whole - sum(costs.block("none")), 0.1 * whole)
    hbm = sum(costs.passes()) / rest / STREAM
    return replace(found, hbm=hbm, dram=stream / BUS)


def seconds(function: Callable[[], Any], turns: int = 7) -> float:
    """The median time of a call."""
    times = []
    for _ in range(turns + 1):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[turns // 2]
