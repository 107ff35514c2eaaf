"""Precision, overlap, offload, files, recomputation and checkpoints at once.

One run of eight steps, each with an event of its own, in settings that use several of
them together: bit for bit what data parallelism does in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import nasty
import pytest
import torch
from nasty import Fails, Nasty, batches, own
from torch import Tensor, nn

from minizero import Delayed, NVMe, Offload, Overlap, checkpoint, parallelize
from minizero.activations.recompute import Recompute, recompute_units
from minizero.activations.stores import Offloaded
from minizero.memory.plan import Plan
from minizero.precision.loss_scale import DynamicLossScale
from minizero.precision.mixed import MixedPrecision
from minizero.ranks.launch import Pool, rank
from minizero.zero.data_parallel import DataParallel

MICRO_BATCHES = 2
EVENTS = (
    "overflow",  # in one micro-batch of rank 1
    "healthy",
    "forward fails",
    "overflow",
    "backward fails",
    "abandoned",
    "loaded",  # into a new net, from a checkpoint
    "evaluated",
)


class Nothing(nn.Module):
    """A unit whose only trained parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.zeros(0))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return x + gain * self.trained.sum()


@dataclass(frozen=True)
class Case:
    """How to train: the plan, and what is passed in."""

    plan: Plan
    home: Callable[..., Any] | None = None
    overlap: tuple[int, int, int] | None = None  # ahead, live, kept
    saves: tuple[str, bool] = ("none", False)  # mode, offloaded
    fp16: bool = True
    optimizer: Callable[..., Any] = nasty.adamw
    postpone: bool = False

    def build(self, folder: Path) -> DataParallel:
        torch.manual_seed(rank())
        model = Nasty()
        model.blocks.append(Nothing())
        mode, offloaded = self.saves
        how = Recompute(mode, Offloaded() if offloaded else None)
        recompute_units(model, how)
        options: dict[str, Any] = {}
        if self.fp16:
            scale = DynamicLossScale(14, loss_scale_window=2, hysteresis=1)
            options["precision"] = MixedPrecision(torch.float16, loss_scale=scale)
        if self.overlap:
            options["schedule"] = Overlap(*self.overlap)
        if self.home is not None:
            there = {"folder": folder} if "nvme" in str(self.plan) else {}
            options["home"] = self.home(self.plan, **there)
        optimizer = self.optimizer(nasty.groups(model))
        return parallelize(model, optimizer, self.plan, bucket_size=500, **options)


def fail(net: DataParallel, where: str, x: Tensor, y: Tensor) -> None:
    """A step that ends in the middle of its second micro-batch."""

    def hook(_: nn.Module, args: Any) -> Any:
        if where == "forward fails":
            raise RuntimeError("on purpose")
        return (Fails.apply(args[0]),)

    net.backward(net(x, y))
    handle = net.model.blocks[2].register_forward_pre_hook(hook)
    with pytest.raises(RuntimeError, match="on purpose"):
        net.backward(net(x, y))
    handle.remove()
    net.zero_grad()


def train(case: Case, folder: Path) -> tuple[list[Any], dict[str, Tensor]]:
    """What was seen in every step, and the weights."""
    net, seen = case.build(folder / "files"), []
    data = batches(len(EVENTS), MICRO_BATCHES, rows=2)
    data = [(own(x, 2), own(y, 2)) for x, y in data]
    for step, event in enumerate(EVENTS):
        net.model.step = step
        if event == "loaded":
            checkpoint.save(net, folder / "saved", "here")
            net = case.build(folder / "files")
            net.model.step = step
            checkpoint.load(net, folder / "saved")
        if event.endswith("fails"):
            fail(net, event, *data[0])
        if event == "abandoned":
            net.backward(net(*data[0]))
            net.zero_grad()
        if event == "evaluated":
            with torch.no_grad():
                seen.append(net(*data[0]).item())
        for micro in range(MICRO_BATCHES):
            postponed = case.postpone and micro == 0
            with net.no_sync() if postponed else nullcontext():
                loss = net(*data[step * MICRO_BATCHES + micro])
                seen.append(loss.item())
                if case.fp16 and event == "overflow" and rank() == 1 and micro == 0:
                    loss = loss * torch.inf
                net.backward(loss / MICRO_BATCHES)
        norm = net.clip_grad_norm(0.5).nan_to_num(-1, -1).item()
        seen += [norm, net.step(), net.precision.state_dict()]
    return seen, net.state_dict()


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def reference(
    two: Pool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Any]:
    """The same run under data parallelism: one for each arithmetic."""

    @cache
    def run(delayed: bool, fp16: bool, optimizer: Any, postpone: bool) -> Any:
        plan = Plan.stage(1, "cpu") if delayed else Plan.stage(0)
        home = Delayed if delayed else None
        case = Case(plan, home, None, ("none", False), fp16, optimizer, postpone)
        return two.run(train, case, tmp_path_factory.mktemp("reference"))

    return lambda case: run(
        case.home is Delayed, case.fp16, case.optimizer, case.postpone
    )


ALL, NONE = 10**9, 0
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
pool_of = partial(partial, NVMe, buffer_size=128)
CASES = {
    "files": Case(Plan.stage(3, "nvme", "nvme"), pool_of(), (2000, 3000, NONE)),
    "files, kept": Case(
        Plan.stage(3, "nvme", "nvme"),
        pool_of(buffer_count=1),
        (ALL, ALL, ALL),
        ("full", True),
    ),
    "files and host": Case(
        Plan.stage(3, "nvme", "cpu"), pool_of(), (2000, ALL, 900), ("selective", False)
    ),
    "parameters in files": Case(
        Plan.stage(3, None, "nvme"),
        pool_of(),
        (ALL, ALL, NONE),
        fp16=False,
        optimizer=momentum,
    ),
    "states in files, postponed": Case(
        Plan.stage(1, "nvme"), pool_of(), (NONE, ALL, NONE), postpone=True
    ),
    "host": Case(
        Plan.stage(3, "cpu", "cpu"), Offload, (2000, 3000, NONE), ("none", True)
    ),
    "host, postponed": Case(
        Plan.stage(1, "cpu"), Offload, (NONE, ALL, NONE), ("full", False), postpone=True
    ),
    "delayed": Case(
        Plan.stage(3, "cpu", "cpu"), Delayed, (ALL, ALL, 900), ("full", True)
    ),
    "overlap": Case(Plan.stage(3), None, (2000, 3000, NONE), ("full", False)),
}


@pytest.mark.parametrize("name", CASES)
def test_all_at_once(
    two: Pool, tmp_path: Path, reference: Callable[[Case], Any], name: str
) -> None:
    case = CASES[name]
    (expected, weights), *_ = reference(case)
    (seen, got), *_ = two.run(train, case, tmp_path)
    assert seen == expected
    assert weights.keys() == got.keys()
    assert all(torch.equal(weights[k], got[k]) for k in weights)
    if case.fp16:
        assert seen[-1]["skipped_steps"] == 2
