"""Chapter 16: is the planner's choice the fastest that fits? Every candidate is run.

Gloo ranks on a toy machine: a budget of bytes, and arithmetic, a link, a slot and a
memory that take their time by waiting. What fits is what a `ToyGPU` has seen of the
engine, and the planner chooses among these. All that fits is timed; then the planner's
choice and the fastest take turns. They count as equal within the difference that runs
of one plan have.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import minizero
from bench.runner import Comparison, interleaved
from minizero import comm, zero
from minizero.activations.recompute import recompute_units
from minizero.engine import Engine
from minizero.lab.models.gpt import GPT, Block
from minizero.lab.recorded import CASES, MODEL, Case
from minizero.lab.toygpu import ToyGPU
from minizero.lab.toymachine import paced, sleep_until
from minizero.ranks import Pool, rank
from minizero.scale.cost import Candidate, Costs, Job, layers_of
from minizero.scale.planner import candidates, choose, ds_config


class _Clock:
    """Waits for a time, less what this thread has computed since the last wait."""

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
    """The identity; `hook` is called when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hook: Callable[[], None]) -> Tensor:
        ctx.hook = hook
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.hook()
        return grad, None


@contextmanager
def computing(costs: Costs, how: str) -> Iterator[None]:
    """Blocks and the head of a `GPT` take as long as `costs` says, or longer.

    A rank waits when it begins with a block; the time that it has computed since the
    last wait is subtracted. how: what is recomputed, as for `predict`.
    """
    root, block = layers_of(costs, Candidate(0, how), 0.0)[:2]
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


def build(job: Job, candidate: Candidate) -> Engine:
    """The engine that trains so, on this rank, with one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = ds_config(job, candidate)
    with zero.Init(config=config):
        net = GPT(MODEL)
    engine = minizero.initialize(model=net, config=config)[0]
    recompute_units(net, candidate.checkpointing)
    return engine


def step(engine: Engine, candidate: Candidate) -> float:
    """Seconds of a step, after a barrier."""
    tokens = torch.full((candidate.micro_batch, MODEL.sequence), rank())
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(candidate.accumulation):
        engine.backward(engine(tokens, tokens))
        engine.step()
    return time.perf_counter() - begin


def peak(job: Job, candidate: Candidate) -> int:
    """Bytes on the device at most, in two steps."""
    gc.collect()
    with ToyGPU(1e18) as gpu:
        engine = build(job, candidate)
        for _ in range(2):
            step(engine, candidate)
    return gpu.peak


def timed(job: Job, candidate: Candidate, steps: int = 2) -> float:
    """Seconds of the quickest of some steps, after a first one."""
    gc.collect()
    engine = build(job, candidate)
    costs = Costs(job, candidate.micro_batch * MODEL.sequence)
    group = candidate.group or candidate.secondary
    with (
        paced(job.machine, group),
        computing(costs, candidate.checkpointing),
    ):
        every = [step(engine, candidate) for _ in range(steps + 1)]
    return min(every[1:])


Peaks = dict[tuple[int, Candidate], int]


def fitting(pool: Pool, case: Case, peaks: Peaks) -> Iterator[Candidate]:
    """The candidates whose peak is within the budget: those that change no loss."""
    job = case.job
    for candidate in candidates(job):
        if candidate.weight_bits:
            continue
        key = case.ranks, candidate
        if key not in peaks:
            peaks[key] = max(pool.run(peak, job, candidate))
        if peaks[key] <= job.machine.memory:
            yield candidate


def spread(values: list[float]) -> float:
    """By which share the runs of one plan differ at most."""
    return max(values) / min(values) - 1


def compare_case(pool: Pool, name: str, peaks: Peaks, repeats: int) -> Comparison:
    """The planner's choice against the fastest of all that fit, in one case."""
    case = CASES[name]
    job = case.job

    def run(candidate: Candidate) -> float:
        return max(pool.run(timed, job, candidate))

    seconds = {c: run(c) for c in fitting(pool, case, peaks)}
    roomy = replace(job, machine=replace(job.machine, memory=1e18))
    best = choose(roomy, list(seconds)).best.candidate
    fastest = min(seconds, key=seconds.__getitem__)
    if best == fastest:
        turns = dict.fromkeys(("planner", "fastest"), [seconds[best]])
    else:
        both = {"planner": partial(run, best), "fastest": partial(run, fastest)}
        turns = interleaved(both, repeats, warmup=0)
    within = max(map(spread, turns.values()))
    return Comparison(
        f"{name}: one of {len(seconds)} that fit",
        "s",
        str(best),
        str(fastest),
        turns["planner"],
        turns["fastest"],
        at_most=round(1 + within, 4),
    )


def compare(repeats: int) -> list[Comparison]:
    """All cases."""
    found, peaks = [], Peaks()
    for ranks in sorted({case.ranks for case in CASES.values()}):
        with Pool(ranks) as pool:
            for name, case in CASES.items():
                if case.ranks == ranks:
                    print(f"  {name}", flush=True)
                    found.append(compare_case(pool, name, peaks, repeats))
    return found
