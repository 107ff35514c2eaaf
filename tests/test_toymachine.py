"""A toy machine: its link and its slot are felt, its data sheet is measured."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from bench import planner
from bench.planner import computing

from minizero import comm
from minizero.activations import recompute_units
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.lab.toymachine import TOY, paced, shape_of
from minizero.offload import CopyStream
from minizero.ranks import Pool
from minizero.scale.cost import Candidate, Costs, Job
from minizero.scale.machines import BUS, bus
from minizero.scale.predict import layers_of

SIZES = GPTConfig(2, 32, 2, sequence=16)
# waits that are far longer than what this computer takes
SLOW = replace(TOY, network=TOY.network / 20, pcie=TOY.pcie / 20)


def two_calls() -> tuple[list[float], int, float]:
    """Seconds from the first launch to each end, their bytes; and of a copy."""
    x = torch.ones(40_000)
    with comm.ledger() as calls, paced(SLOW):
        under_way = [comm.all_reduce(x.clone(), async_op=True) for _ in range(2)]
        for work in under_way:
            work.wait()
        begin, stream = time.perf_counter(), CopyStream()
        stream.copy(torch.empty_like(x), x)
        stream.event().wait()
        copied = time.perf_counter() - begin
        begin = time.perf_counter()
        stream.copy(torch.empty_like(x), x)
        stream.event().wait("device")
        comm.all_reduce(x[:1000])  # begins when the copy is there
        assert time.perf_counter() - begin >= 160_000 / (BUS * SLOW.pcie)
    ends = [c.finished - calls[0].launched for c in calls[:2]]
    return ends, calls[0].bytes, copied


def test_calls_queue_for_the_link(two: Pool) -> None:
    latency, speed = bus(SLOW, 2, 1)
    for ends, nbytes, copied in two.run(two_calls):
        for turn, end in enumerate(ends, 1):
            assert end >= turn * (latency + nbytes / speed)
        assert copied >= 160_000 / (BUS * SLOW.pcie)


def waits(how: str) -> tuple[float, float, bool]:
    """Seconds asked for in a step of two blocks, those counted, and equal gradients."""
    torch.manual_seed(0)
    model, tokens = GPT(SIZES), torch.zeros(2, 16, dtype=torch.long)
    model(tokens, tokens).backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    recompute_units(model, how)
    costs = Costs(Job(shape_of(SIZES), TOY, 2, 4, 16, "fp32"), tokens.numel())
    asked: list[float] = []
    with (
        mock.patch.object(planner, "sleep_until", lambda t: asked.append(t)),
        mock.patch.object(planner.time, "thread_time", lambda: 0.0),
        mock.patch.object(planner.time, "perf_counter", lambda: 0.0),
        computing(costs, how),
    ):
        model(tokens, tokens).backward()
    layers = layers_of(costs, Candidate(0, how), 0.0)
    counted = sum(layer.forward + layer.backward for layer in layers)
    same = all(map(torch.equal, plain, (p.grad for p in model.parameters())))
    return sum(asked), counted, same


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_blocks_take_what_the_planner_counts(how: str) -> None:
    asked, counted, same = waits(how)
    assert asked == pytest.approx(counted) and same
