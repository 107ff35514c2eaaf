"""The Python time of a step: linear in units and in parameters.

One process trains models of small layers, so that next to no time goes by in kernels.
What is left is what a framework costs for each unit, where each block is one, and for
each parameter: under plain PyTorch, FSDP2, and stages 0 and 3 here.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from bench.runner import Comparison, interleaved
from minizero.memory.plan import Plan
from minizero.overlap import Overlap
from minizero.ranks import Pool
from minizero.zero import Schedule
from minizero.zero.parallelize import parallelize

Step = Callable[[], object]
# blocks, and layers of two parameters of two elements in each: a small and a large
ROWS = {
    "units": {100: (100, 1), 1_000: (1_000, 1)},
    "parameters": {20_000: (10, 1_000), 100_000: (10, 5_000)},
}
BOUNDS = {"stage 0": 2.0, "stage 3": 3.0}  # times plain PyTorch, at 100,000 parameters


def build(blocks: int, layers: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(*map(nn.LayerNorm, [2] * layers)) for _ in range(blocks))
    )


def plain(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(2, 2)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2(model: nn.Module) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for unit in (*model.children(), model):
        fully_shard(unit, mesh=mesh)
    return plain(model)


def ours(stage: int, schedule: Callable[[], Schedule], model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    units = set(model.children()).__contains__
    net = parallelize(
        model, optimizer, Plan.stage(stage), schedule=schedule(), units=units
    )
    x = torch.randn(2, 2)

    def step() -> None:
        net.backward(net(x).sum())
        net.step()

    return step


CASES: dict[str, Callable[[nn.Module], Step]] = {
    "PyTorch": plain,
    "FSDP2": fsdp2,
    "stage 0": partial(ours, 0, Schedule),
    "stage 3": partial(ours, 3, Schedule),
    "stage 3, overlap": partial(
        ours, 3, partial(Overlap, param_persistence_threshold=0)
    ),
}


def measure(blocks: int, layers: int, repeats: int) -> dict[str, list[float]]:
    """On one rank: seconds of a step, of each case."""
    torch.set_num_threads(1)
    names = [name for name in CASES if name != "FSDP2" or layers < 5_000]
    steps = {name: CASES[name](build(blocks, layers)) for name in names}

    def timed(step: Step) -> float:
        gc.collect()
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    # the first turns allocate what later ones find
    cases = {name: partial(timed, step) for name, step in steps.items()}
    return interleaved(cases, repeats, warmup=2)


def compare(repeats: int) -> list[Comparison]:
    """Growth from the small to the large model; the large one against the others."""
    results = []
    for what, ((few, small), (many, large)) in (
        (what, sizes.items()) for what, sizes in ROWS.items()
    ):
        with Pool(1) as pool:
            below, found = (pool.run(measure, *s, repeats)[0] for s in (small, large))
        times, name = math.log(many / few), f"{many:,} {what}"
        for case in (case for case in found if case.startswith("stage")):
            mine = found[case]
            pairs = zip(mine, below[case], strict=True)
            growth = [math.log(b / a) / times for b, a in pairs]
            title = f"growth exponent, {few:,} to {name}"
            linear = [1.0] * len(growth)
            results += [
                Comparison(title, "", case, "linear", growth, linear, at_most=1.2)
            ]
            # PyTorch has no units, so nothing is asked of their cost beside it
            bounds = {"PyTorch": BOUNDS.get(case) if what == "parameters" else None}
            results += [
                Comparison(name, "s", case, other, mine, found[other], at_most=bound)
                for other, bound in (bounds | {"FSDP2": 1.1}).items()
                if other in found
            ]
    return results
