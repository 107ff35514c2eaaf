"""Chapter 16: is the planner's choice the fastest that fits? Every candidate is run.

Two gloo ranks with one thread each, on a toy machine: a budget of bytes, and a link, a
slot and a memory that take their time. What fits is what a `ToyGPU` has seen. All that
fits is timed once; then the fastest and the planner's choice take turns.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

import minizero
from minizero import comm, zero
from minizero.activations.recompute import recompute_units
from minizero.engine import Engine
from minizero.lab.bench.runner import Comparison, interleaved
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.lab.toygpu import ToyGPU
from minizero.lab.toymachine import TOY, measured, paced, shape_of
from minizero.ranks.launch import Pool, rank
from minizero.scale.machines import BUS, NETWORK, Machine
from minizero.scale.planner import (
    Candidate,
    Choice,
    Job,
    Result,
    candidates,
    choose,
    ds_config,
)

RANKS, SEQUENCES = 2, 4
SHEET = replace(TOY, hbm=10e9, dram=5e9)
WIDE = GPTConfig(layers=4, hidden=192, heads=4, sequence=64)
DEEP = GPTConfig(layers=8, hidden=128, heads=4, sequence=64)
NOISE = 1.05
"""Two runs of one plan differ by as much."""


@dataclass(frozen=True)
class Case:
    """A model and a toy machine: bytes of a device, and bytes a second."""

    model: GPTConfig
    memory: float
    network: float
    pcie: float = 400e6

    def machine(self, node: Machine) -> Machine:
        """The toy machine, with the arithmetic of `node`."""
        return replace(
            node,
            memory=self.memory,
            network=self.network / NETWORK,
            pcie=self.pcie / BUS,
            host=1e9,
        )


CASES = {
    "wide, all fits": Case(WIDE, 60e6, 40e6),
    "wide, 32 MB": Case(WIDE, 32e6, 40e6),
    "wide, 26 MB": Case(WIDE, 26e6, 40e6),
    "wide, 22 MB, slow slot": Case(WIDE, 22e6, 40e6, 20e6),
    "wide, 17 MB": Case(WIDE, 17e6, 40e6),
    "wide, 12 MB": Case(WIDE, 12e6, 60e6),
    "deep, all fits": Case(DEEP, 60e6, 40e6),
    "deep, 24 MB": Case(DEEP, 24e6, 40e6),
    "deep, 17 MB, slow slot": Case(DEEP, 17e6, 60e6, 20e6),
    "deep, 9 MB": Case(DEEP, 9e6, 60e6),
}


def build(job: Job, model: GPTConfig, candidate: Candidate) -> Engine:
    """The engine that trains so, on this rank, with one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = Result(candidate, candidate.predict(job), True)
    config = ds_config(Choice(job, result, []))
    with zero.Init(config=config):
        net = GPT(model)
    engine = minizero.initialize(model=net, config=config)[0]
    recompute_units(net, candidate.checkpointing)
    return engine


def step(engine: Engine, candidate: Candidate, sequence: int) -> float:
    """Seconds of a step, after a barrier."""
    tokens = torch.full((candidate.micro_batch, sequence), rank())
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(candidate.accumulation):
        engine.backward(engine(tokens, tokens))
        engine.step()
    return time.perf_counter() - begin


def peak(job: Job, model: GPTConfig, candidate: Candidate) -> int:
    """Bytes on the device at most, in two steps."""
    gc.collect()
    with ToyGPU(1e18) as gpu:
        engine = build(job, model, candidate)
        for _ in range(2):
            step(engine, candidate, model.sequence)
    return gpu.peak


def timed(job: Job, model: GPTConfig, candidate: Candidate, steps: int = 3) -> float:
    """Seconds of the quickest of some steps, after a first one."""
    gc.collect()
    engine = build(job, model, candidate)
    with paced(job.machine):
        every = [step(engine, candidate, model.sequence) for _ in range(steps + 1)]
    return min(every[1:])


def job_of(case: Case, node: Machine) -> Job:
    shape, machine = shape_of(case.model), case.machine(node)
    return Job(shape, machine, RANKS, SEQUENCES, case.model.sequence, "fp32")


def fitting(
    job: Job, peaks: dict[tuple[GPTConfig, Candidate], int], model: GPTConfig
) -> Iterator[Candidate]:
    """The candidates whose peak is within the budget."""
    for candidate in candidates(job):
        if peaks[model, candidate] <= job.machine.memory:
            yield candidate


def compare(repeats: int) -> list[Comparison]:
    """The planner's choice against the fastest of all that fit, case by case."""
    found, peaks = [], dict[tuple[GPTConfig, Candidate], int]()
    with Pool(RANKS) as pool:
        nodes = {}
        for model in (WIDE, DEEP):
            tokens = model.sequence * SEQUENCES // RANKS
            nodes[model] = pool.run(measured, model, tokens, SHEET)[0]
            job = job_of(Case(model, 1e12, 1e9), nodes[model])
            for candidate in candidates(job):
                peaks[model, candidate] = pool.run(peak, job, model, candidate)[0]
        for name, case in CASES.items():
            job = job_of(case, nodes[case.model])

            def run(candidate: Candidate, case: Case = case, job: Job = job) -> float:
                found: float = pool.run(timed, job, case.model, candidate)[0]
                return found

            seconds = {c: run(c) for c in fitting(job, peaks, case.model)}
            best = choose(job).best.candidate
            fastest = min(seconds, key=seconds.__getitem__)
            if best not in seconds:  # it does not fit: no time would be good enough
                turns = {"planner": [float("inf")], "fastest": [seconds[fastest]]}
            elif best == fastest:
                turns = dict.fromkeys(("planner", "fastest"), [seconds[best]])
            else:
                both = {"planner": best, "fastest": fastest}
                turns = interleaved(
                    {name: partial(run, each) for name, each in both.items()},
                    repeats,
                    warmup=0,
                )
            found.append(
                Comparison(
                    f"{name}: one of {len(seconds)} that fit",
                    "s",
                    str(best),
                    str(fastest),
                    turns["planner"],
                    turns["fastest"],
                    at_most=NOISE,
                )
            )
    return found
