"""The Python time of a step: it grows linearly with units and with parameters.

One process trains models of tiny layers, two elements a parameter, so that next to no
time goes by in kernels. What is left is what a framework costs for each unit and for
each parameter: under plain PyTorch, FSDP2, and stages 0 and 3 here.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from minizero.lab.bench.runner import Comparison, interleaved
from minizero.memory.plan import Plan
from minizero.overlap.prefetch import Overlap
from minizero.ranks.launch import Pool
from minizero.zero.interfaces import Schedule
from minizero.zero.parallelize import parallelize

Step = Callable[[], object]
UNITS = {f"{units:,} units": (units, 2) for units in (10, 100, 1_000)}
# the same ten units, and more parameters in each
PARAMETERS = {f"{n:,} parameters": (10, n // 10) for n in (1_000, 10_000, 100_000)}
# at the largest size: seconds of a step, at most so many times plain PyTorch's
BOUNDS = {"stage 0": 2.0, "stage 3": 3.0}


def model_of(units: int, parameters: int) -> nn.Module:
    """So many units, each with so many parameters of two elements."""
    layers = max(1, parameters // 2)
    return nn.Sequential(
        *(nn.Sequential(*map(nn.LayerNorm, [2] * layers)) for _ in range(units))
    )


def _plain(units: int, parameters: int) -> Step:
    model = model_of(units, parameters)
    return _loop(model, torch.optim.SGD(model.parameters(), lr=0.01))


def _fsdp2(units: int, parameters: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of(units, parameters)
    mesh = init_device_mesh("cpu", (1,))
    for unit in model.children():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(model, torch.optim.SGD(model.parameters(), lr=0.01))


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    x = torch.randn(2, 2)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _staged(stage: int, schedule: Callable[[], Schedule]) -> Callable[[int, int], Step]:
    def build(units: int, parameters: int) -> Step:
        model = model_of(units, parameters)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        net = parallelize(model, optimizer, Plan.stage(stage), schedule=schedule())
        x = torch.randn(2, 2)

        def step() -> None:
            loss: Tensor = net(x).sum()
            net.backward(loss)
            net.step()

        return step

    return build


# FSDP2 makes an object of each shard: of 100,000 parameters it takes minutes
MOST_FSDP2 = 10_000

CASES: dict[str, Callable[[int, int], Step]] = {
    "PyTorch": _plain,
    "FSDP2": _fsdp2,
    "stage 0": _staged(0, Schedule),
    "stage 3": _staged(3, Schedule),
    "stage 3, overlap": _staged(3, lambda: Overlap(param_persistence_threshold=0)),
}


def _timed(make: Callable[[], Step]) -> Callable[[], float]:
    """Seconds of a step; the first turn builds the model, and is not counted."""
    built: list[Step] = []

    def case() -> float:
        if not built:
            built.append(make())
        gc.collect()
        start = time.perf_counter()
        built[0]()
        return time.perf_counter() - start

    return case


def measure(repeats: int) -> dict[str, dict[str, list[float]]]:
    """On one rank: seconds of each case at each size."""
    torch.set_num_threads(1)
    found = {}
    for size, (units, parameters) in {**UNITS, **PARAMETERS}.items():
        cases = {
            name: _timed(partial(make, units, parameters))
            for name, make in CASES.items()
            if name != "FSDP2" or units * parameters <= MOST_FSDP2
        }
        # the first two turns build, and allocate what later ones find
        found[size] = interleaved(cases, repeats, warmup=2)
    return found


def compare(repeats: int) -> list[Comparison]:
    """Steps against PyTorch's and FSDP2's, and how they grow; prints all medians."""
    with Pool(1) as pool:
        (found,) = pool.run(measure, repeats)
    print(f"{'seconds a step':22}" + "".join(f"{name:>18}" for name in CASES))
    for size, cases in found.items():
        row = (f"{median(cases[c]):18.4f}" if c in cases else f"{'':18}" for c in CASES)
        print(f"{size:22}{''.join(row)}")
    return [
        comparison
        for sizes in (UNITS, PARAMETERS)
        for name in CASES
        for comparison in (
            _growth(found, sizes, name),
            *(_against(found, sizes, name, other) for other in ("PyTorch", "FSDP2")),
        )
        if name.startswith("stage") or comparison.b == "linear"
    ]


Found = dict[str, dict[str, list[float]]]
Sizes = dict[str, tuple[int, int]]


def _growth(found: Found, sizes: Sizes, name: str) -> Comparison:
    """The exponent between the two largest sizes of a case."""
    small, large = [size for size in sizes if name in found[size]][-2:]
    times = math.log(math.prod(sizes[large]) / math.prod(sizes[small]))
    pairs = zip(found[large][name], found[small][name], strict=True)
    exponents = [math.log(b / a) / times for b, a in pairs]
    return Comparison(
        f"growth exponent, {small} to {large}",
        "",
        name,
        "linear",
        exponents,
        [1.0] * len(exponents),
        at_most=1.2 if name.startswith("stage") else None,
    )


def _against(found: Found, sizes: Sizes, name: str, other: str) -> Comparison:
    """A step at the largest size that both have."""
    size = [size for size in sizes if other in found[size]][-1]
    seconds, others = found[size][name], found[size][other]
    # with many units, what a unit costs is what counts: FSDP2 has units too
    bound = (
        1.0 if other == "FSDP2" else BOUNDS.get(name) if sizes is PARAMETERS else None
    )
    return Comparison(
        f"a step, {size}", "s", name, other, seconds, others, at_most=bound
    )
