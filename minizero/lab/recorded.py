"""What was measured for the book: the files of book/measured, which chapters read.

An installed package is without these files; then there is nothing to read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from minizero.lab.models.gpt import GPTConfig
from minizero.lab.toymachine import TOY, shape_of
from minizero.scale import Job, predict
from minizero.scale.machines import BUS, NETWORK, NVLINK
from minizero.scale.planner import candidates

MEASURED = Path(__file__).parents[2] / "book/measured"

SHEET = replace(
    TOY, peak=3e9, hbm=0.3e9, dram=0.3e9, contention=0.0, host=1e9, reserved=0.0
)
"""The toy machine on which every plan of `CASES` was run."""
MODEL = GPTConfig(layers=3, hidden=64, heads=2, sequence=32)


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


def planner_runs() -> Iterator[tuple[str, float, float]]:
    """Of each recorded run of the planner's benchmark: its case and plan, the tokens a
    second and rank that were measured, and those predicted."""
    path = MEASURED / "planner.json"
    if not path.exists():
        return
    for kept in json.loads(path.read_text("utf-8"))["comparisons"]:
        name = kept["name"].partition(":")[0]
        job = CASES[name].job
        plans = {str(candidate): candidate for candidate in candidates(job)}
        runs = {kept["a"]: kept["a_values"], kept["b"]: kept["b_values"]}
        for plan, seconds in runs.items():
            predicted = predict(job, plans[plan]).tokens_per_second_per_gpu
            measured = job.sequences_per_gpu * job.sequence / median(seconds)
            yield f"{name}; {plan}", measured, predicted
