"""Chapter 16: is the planner's choice the fastest that fits? Every candidate is run.

Gloo ranks on a toy machine: a budget of bytes, and arithmetic, a link, a slot and a
memory that take their time by waiting. What fits is what a `ToyGPU` has seen of the
engine; the planner has dry runs of it (`exactly`). All that fits is timed; then
the planner's choice and the fastest take turns. They are equal within what runs of one
plan differ by.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

import minizero
from minizero import comm, zero
from minizero.activations.recompute import recompute_units
from minizero.engine import Engine
from minizero.lab.bench.runner import Comparison, interleaved
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.lab.toygpu import ToyGPU
from minizero.lab.toymachine import TOY, computing, paced, shape_of
from minizero.ranks.launch import Pool, rank
from minizero.scale.candidates import Candidate, Job, candidates
from minizero.scale.exact import exactly
from minizero.scale.machines import BUS, NETWORK, NVLINK
from minizero.scale.operators import Costs
from minizero.scale.planner import Choice, Result, choose, ds_config

SHEET = replace(
    TOY, peak=3e9, hbm=0.3e9, dram=0.3e9, contention=0.0, host=1e9, reserved=0.0
)
MODEL = GPTConfig(layers=3, hidden=64, heads=2, sequence=32)
MEASURED = Path(__file__).parents[3] / "book/measured/planner.json"
"""What was measured for the book; an installed package is without it."""


@dataclass(frozen=True)
class Case:
    """So many ranks of a toy machine, each with `each` sequences a step.

    memory: bytes of a device. network, slot: bytes a second. gpus: of a node, whose
    link is ten times as fast as `network`.
    """

    memory: float
    network: float
    slot: float = 40e6
    ranks: int = 2
    gpus: int = 1
    each: int = 2

    @property
    def job(self) -> Job:
        """What the planner is asked."""
        machine = replace(
            SHEET,
            gpus=self.gpus,
            memory=self.memory,
            link=10 * self.network / NVLINK,
            network=self.network / NETWORK,
            pcie=self.slot / BUS,
        )
        count, length = self.ranks * self.each, MODEL.sequence
        return Job(shape_of(MODEL), machine, self.ranks, count, length, "fp32")


CASES = {
    "all fits": Case(60e6, 20e6),
    "3.6 MB, fast link": Case(3.6e6, 80e6),
    "3 MB": Case(3e6, 20e6),
    "2.6 MB, slow slot": Case(2.6e6, 20e6, 4e6),
    "2.2 MB": Case(2.2e6, 20e6),
    "1.9 MB, slow link": Case(1.9e6, 5e6),
    "1.6 MB, slow slot": Case(1.6e6, 20e6, 8e6),
    "two nodes, all fits": Case(60e6, 3e6, ranks=4, gpus=2, each=1),
    "two nodes, 2.6 MB": Case(2.6e6, 3e6, ranks=4, gpus=2, each=1),
    "two nodes, 1.7 MB": Case(1.7e6, 10e6, ranks=4, gpus=2, each=1),
}


def build(job: Job, candidate: Candidate) -> Engine:
    """The engine that trains so, on this rank, with one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = ds_config(Choice(job, Result(job, candidate), []))
    with zero.Init(config=config):
        net = GPT(MODEL)
    engine = minizero.initialize(model=net, config=config)[0]
    recompute_units(net, candidate.recompute)
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
    tokens, length = candidate.micro_batch * MODEL.sequence, MODEL.sequence
    costs = Costs(job.shape, job.machine, tokens, length, precision=job.precision)
    group = candidate.group or candidate.secondary
    with (
        paced(job.machine, group),
        computing(costs, job.gpus, candidate.checkpointing),
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
    best = choose(exactly(job, partial(GPT, MODEL), "cpu")).best.candidate
    fastest = min(seconds, key=seconds.__getitem__)
    if best not in seconds:  # it does not fit: no time would be good enough
        turns = {"planner": [float("inf")], "fastest": [seconds[fastest]]}
    elif best == fastest:
        turns = dict.fromkeys(("planner", "fastest"), [seconds[best]])
    else:
        both = {"planner": partial(run, best), "fastest": partial(run, fastest)}
        turns = interleaved(both, repeats, warmup=0)
    within = max(map(spread, turns.values())) if best in seconds else 0.0
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


def measured() -> Iterator[tuple[str, float, float]]:
    """By run that is kept: case and plan, tokens a second and rank, and predicted."""
    if not MEASURED.exists():
        return
    for kept in json.loads(MEASURED.read_text("utf-8"))["comparisons"]:
        name = kept["name"].partition(":")[0]
        job = CASES[name].job
        plans = {str(candidate): candidate for candidate in candidates(job)}
        runs = {kept["a"]: kept["a_values"], kept["b"]: kept["b_values"]}
        for plan, seconds in runs.items():
            told = Result(job, plans[plan]).prediction.tokens_per_second_per_gpu
            yield f"{name}; {plan}", job.each * job.sequence / median(seconds), told
