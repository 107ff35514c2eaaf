"""A toy machine: its link and its slot are felt, its data sheet is measured."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from minizero import comm
from minizero.lab.models.gpt import GPTConfig
from minizero.lab.toymachine import TOY, measured, paced, shape_of
from minizero.offload.copy_streams import CopyStream
from minizero.ranks.launch import Pool
from minizero.scale.machines import BUS, bus
from minizero.scale.planner import Job, choose, ds_config

GPT = GPTConfig(2, 32, 2, sequence=16)


def two_calls() -> tuple[list[float], int, float]:
    """Seconds from the first launch to each end, their bytes; and of a copy."""
    x = torch.ones(40_000)
    with comm.ledger() as calls, paced(TOY):
        under_way = [comm.all_reduce(x.clone(), async_op=True) for _ in range(2)]
        for work in under_way:
            work.wait()
        begin = time.perf_counter()
        CopyStream().copy(torch.empty_like(x), x)
        copied = time.perf_counter() - begin
    return [c.finished - calls[0].launched for c in calls], calls[0].bytes, copied


def test_calls_queue_for_the_link(two: Pool) -> None:
    latency, speed = bus(TOY, 2, 1)
    for ends, nbytes, copied in two.run(two_calls):
        for turn, end in enumerate(ends, 1):
            assert end >= turn * (latency + nbytes / speed)
        assert copied >= 160_000 / (BUS * TOY.pcie)


def plain(slow: bool) -> torch.Tensor:
    x = torch.arange(10.0)
    if slow:
        with paced(TOY):
            comm.all_reduce(x)
    comm.all_reduce(x)  # outside, as before
    return x


def test_results_are_the_same_and_nothing_stays_patched(two: Pool) -> None:
    before = comm.Work.wait
    once, twice = two.run(plain, False)[0], two.run(plain, True)[0]
    assert torch.equal(2 * once, twice)
    assert comm.Work.wait is before


def test_a_measured_machine_can_be_planned_with(two: Pool) -> None:
    machine = two.run(measured, GPT, 64, replace(TOY, memory=1e6))[0]
    assert min(machine.peak, machine.hbm, machine.attention, machine.dram) > 0
    assert (machine.memory, machine.network) == (1e6, TOY.network)
    choice = choose(Job(shape_of(GPT), machine, 2, 4, 16, "fp32"))
    assert "fp32" not in ds_config(choice)  # no key of a config
