"""The Python time of a step, and of its construction: linear in layers and parameters.

One process trains models of small layers, so that next to no time goes by in kernels.
What is left is what a framework costs for each unit, where each block is one; for each
layer, where neighbours share units; and for each parameter: under plain PyTorch, FSDP2,
and stages 0 and 3 here.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from bench.runner import Comparison, interleaved
from minizero.memory.plan import Plan
from minizero.overlap import Overlap
from minizero.ranks.launch import Pool
from minizero.zero import Schedule
from minizero.zero.parallelize import parallelize

Step = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """`count`: what grows. `alone`: whether each block is made a unit.

    `fsdp2`: whether FSDP2 makes a step of it in seconds.
    """

    name: str
    count: int
    model: Callable[[], nn.Sequential]
    inputs: int = 2
    alone: bool = False
    fsdp2: bool = True


def blocks(count: int, layers: int) -> nn.Sequential:
    """So many blocks of so many layers, each with two parameters of two elements."""
    return nn.Sequential(
        *(nn.Sequential(*map(nn.LayerNorm, [2] * layers)) for _ in range(count))
    )


def linears(count: int) -> nn.Sequential:
    """So many layers, each a matrix and a bias."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(count)))


ROWS = [
    [
        Size(f"{n:,} units", n, partial(blocks, n, 1), alone=True)
        for n in (10, 100, 1_000)
    ],
    [
        Size(f"{n:,} layers", n, partial(linears, n), 64, fsdp2=False)
        for n in (300, 3_000)
    ],
    [
        Size(f"{n:,} parameters", n, partial(blocks, 10, n // 20), fsdp2=n < 100_000)
        for n in (20_000, 100_000)
    ],
]
# the largest size of a row: seconds, at most so many times plain PyTorch's
BOUNDS = {"stage 0": 2.0, "stage 3": 3.0}


def _plain(size: Size) -> Step:
    model = size.model()
    return _loop(model, size, torch.optim.SGD(model.parameters(), lr=0.01))


def _fsdp2(size: Size) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = size.model()
    mesh = init_device_mesh("cpu", (1,))
    for unit in model.children():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(model, size, torch.optim.SGD(model.parameters(), lr=0.01))


def _loop(model: nn.Module, size: Size, optimizer: torch.optim.Optimizer) -> Step:
    x = torch.randn(2, size.inputs)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _staged(stage: int, schedule: Callable[[], Schedule]) -> Callable[[Size], Step]:
    def build(size: Size) -> Step:
        model = size.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        each = set(model.children())
        net = parallelize(
            model,
            optimizer,
            Plan.stage(stage),
            schedule=schedule(),
            units=each.__contains__ if size.alone else None,
        )
        x = torch.randn(2, size.inputs)

        def step() -> None:
            loss: Tensor = net(x).sum()
            net.backward(loss)
            net.step()

        return step

    return build


CASES: dict[str, Callable[[Size], Step]] = {
    "PyTorch": _plain,
    "FSDP2": _fsdp2,
    "stage 0": _staged(0, Schedule),
    "stage 3": _staged(3, Schedule),
    "stage 3, overlap": _staged(3, lambda: Overlap(param_persistence_threshold=0)),
}
Found = dict[str, dict[str, list[float]]]


def _timed(make: Callable[[], Step], building: list[float]) -> Callable[[], float]:
    """Seconds of a step; those of its making, in the first turn, go to `building`."""
    built: list[Step] = []

    def case() -> float:
        gc.collect()
        if not built:
            start = time.perf_counter()
            built.append(make())
            building.append(time.perf_counter() - start)
        start = time.perf_counter()
        built[0]()
        return time.perf_counter() - start

    return case


def measure(repeats: int) -> tuple[Found, Found]:
    """On one rank: seconds of each case at each size, of a step and of its making."""
    torch.set_num_threads(1)
    steps: Found = {}
    built: Found = {}
    for size in (size for row in ROWS for size in row):
        names = [name for name in CASES if name != "FSDP2" or size.fsdp2]
        built[size.name] = {name: [] for name in names}
        cases = {
            name: _timed(partial(CASES[name], size), built[size.name][name])
            for name in names
        }
        # the first two turns build, and allocate what later ones find
        steps[size.name] = interleaved(cases, repeats, warmup=2)
    return steps, built


def compare(repeats: int) -> list[Comparison]:
    """Steps and constructions against PyTorch's and FSDP2's; prints all medians."""
    with Pool(1) as pool:
        ((steps, built),) = pool.run(measure, repeats)
    for what, found in (("a step", steps), ("construction", built)):
        print(f"{f'seconds of {what}':26}" + "".join(f"{name:>18}" for name in CASES))
        for size, cases in found.items():
            row = (
                f"{median(cases[c]):18.4f}" if c in cases else f"{'':18}" for c in CASES
            )
            print(f"{size:26}{''.join(row)}")
    return [
        comparison
        for what, found in (("a step", steps), ("construction", built))
        for row in ROWS
        for name in CASES
        if name.startswith("stage")
        for comparison in (
            _growth(what, found, row[-2], row[-1], name),
            _against(what, found, row[-1], name, "PyTorch"),
            *(
                _against(what, found, size, name, "FSDP2")
                for size in row
                if "FSDP2" in found[size.name]
            ),
        )
    ]


def _growth(what: str, found: Found, small: Size, large: Size, name: str) -> Comparison:
    """The exponent between the two sizes of a case."""
    times = math.log(large.count / small.count)
    pairs = zip(found[large.name][name], found[small.name][name], strict=True)
    exponents = [math.log(b / a) / times for b, a in pairs]
    return Comparison(
        f"growth exponent of {what}, {small.name} to {large.name}",
        "",
        name,
        "linear",
        exponents,
        [1.0] * len(exponents),
        at_most=1.2,
    )


def _against(what: str, found: Found, size: Size, name: str, other: str) -> Comparison:
    """The same model by `name` and by `other`."""
    seconds, others = found[size.name][name], found[size.name][other]
    # where each block is a unit, what a unit costs is what counts: FSDP2 has units too
    bound = 1.0 if other == "FSDP2" else None if size.alone else BOUNDS.get(name)
    return Comparison(
        f"{what}, {size.name}", "s", name, other, seconds, others, at_most=bound
    )
