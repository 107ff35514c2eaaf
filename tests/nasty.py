"""A small model with everything that breaks sharding, and every way to train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import minizero
from minizero import Overlap, Placement, Plan, parallelize
from minizero.activations import Offloaded, Recompute, recompute_units
from minizero.precision import DynamicLossScale, MixedPrecision
from minizero.ranks import device, rank, world_size
from minizero.zero import DataParallel, Muon, Storage

# A test with one of these marks runs on each rank of a pool (see conftest).
on_each_rank = pytest.mark.usefixtures("pool")
on_two_ranks = pytest.mark.usefixtures("two")
# What it expects holds for CPUs: a GPU rounds otherwise, and gloo moves none of its
# memory.
on_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def some(names: Iterable[str], left: Callable[[str], bool]) -> list[Any]:
    """Parameters of a test, of which `left` is left to `make test-all`."""
    marks = {True: [pytest.mark.thorough], False: []}
    return [pytest.param(name, marks=marks[left(name)]) for name in names]


VOCABULARY, HIDDEN, STEPS = 17, 12, 20


class Block(nn.Module):
    """Odd sizes, a frozen parameter, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN + 1)
        self.down = nn.Linear(2 * HIDDEN + 1, HIDDEN)
        self.unused = nn.Parameter(torch.randn(7))
        self.scale = nn.Parameter(torch.randn(HIDDEN), requires_grad=False)

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return x + gain * self.down(torch.relu(self.up(self.norm(x) * self.scale)))


class Nasty(nn.Module):
    """A tied head, a frozen embedding, a block skipped every other step, one used
    twice, and an order that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(8, HIDDEN).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("statistics", torch.randn(3))
        self.step = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        order = [0, 1, 2, 0, 3] if self.step % 3 else [3, 1, 0, 2]
        for index in order:
            if index != 1 or self.step % 2:
                h = self.blocks[index](h, gain=0.5)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Fails(torch.autograd.Function):
    """Identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("on purpose")


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: weight decay or none, and two learning rates."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Muon for matrices, and AdamW for the other group."""
    matrices, others = groups
    return Muon([{**matrices, "use_muon": True, "lr": 0.02}, others])


STATE = ("parameters", "gradients", "optimizer")


def plans(*places: str) -> list[Plan]:
    """Every plan that keeps something on the last of these places, ZeRO-1 to 3."""
    found = []
    for stage, on in product((1, 2, 3), product(places, repeat=3)):
        pairs = list(zip((stage == 3, stage >= 2, True), on, strict=True))
        allowed = all(s or o == "device" for s, o in pairs) and on[1] != "nvme"
        if allowed and places[-1] in on:
            found.append(Plan(*(Placement(*pair) for pair in pairs)))
    return found


def name_of(plan: Plan) -> str:
    placed = [getattr(plan, category) for category in STATE]
    return " ".join([f"zero{sum(p.sharded for p in placed)}", *(p.on for p in placed)])


@dataclass(frozen=True)
class Case:
    """How to train: the arithmetic first, then what must change no bit of it."""

    plan: Plan
    precision: str = "fp32"  # or "bf16", "fp16"
    optimizer: Callable[..., Any] = adamw
    micro: int = 1
    postpone: bool = False  # reduce at the last micro-batch only
    bits: tuple[int | None, int | None] = (None, None)  # of weights, of gradients
    events: bool = False  # steps that fail, overflow, are saved and loaded
    scale_power: int = 14  # of the first loss scale

    # "Delayed", which is another arithmetic, or a class; else the plan's own
    storage: str | type[Storage] | None = None
    buffers: tuple[int, int] = (4, 128)  # that NVMe has, and elements of a slice
    overlap: tuple[int, int, int] | None = None  # ahead, live, kept
    recompute: tuple[str, bool] = ("none", False)  # mode, offloaded
    bucket_size: int = 500

    def reference(self) -> Case:
        """Data parallelism in the same arithmetic.

        A GPU and its host round differently: there, gradients and optimizer state are
        where this case has them.
        """
        plan, storage = Plan.stage(0), None
        if self.storage == "Delayed":
            plan, storage = Plan.stage(1, "cpu"), "Delayed"
        places = {self.plan.gradients.on, self.plan.optimizer.on}
        if any(self.bits):
            plan = self.plan
        elif torch.cuda.is_available() and places != {"device"}:
            plan = replace(self.plan, parameters=Placement())
        elif self.plan.group and self.precision != "fp32":
            plan = Plan.stage(1, group=2)  # 16-bit sums round after each group
        return Case(
            plan, self.precision, self.optimizer, self.micro, self.postpone, self.bits,
            self.events, self.scale_power, storage,
        )  # fmt: skip

    def build(
        self,
        make: Callable[[], nn.Module] = Nasty,
        folder: Path | None = None,
        **options: Any,
    ) -> DataParallel:
        """The nasty model, or another, under this plan; rank 0's weights must win."""
        torch.manual_seed(rank())
        model = make()
        mode, offloaded = self.recompute
        recompute_units(model, Recompute(mode, Offloaded() if offloaded else None))
        if self.precision == "fp16":
            scale = DynamicLossScale(self.scale_power, 2, 1)
            options["precision"] = MixedPrecision(torch.float16, loss_scale=scale)
        elif self.precision == "bf16":
            options["precision"] = MixedPrecision()
        if self.overlap:
            options["schedule"] = Overlap(*self.overlap)
        if any(self.bits):
            options["weight_bits"], options["gradient_bits"] = self.bits
        optimizer = self.optimizer(groups(model))
        options = {"bucket_size": self.bucket_size, **options}
        storage = self._storage(folder)
        return parallelize(model, optimizer, self.plan, storage=storage, **options)

    def _storage(self, folder: Path | None) -> Storage | None:
        plan = self.plan
        on = {plan.parameters.on, plan.gradients.on, plan.optimizer.on}
        if self.storage == "Delayed":
            return minizero.Delayed(plan)
        if not isinstance(self.storage, str | None):
            return self.storage(plan)
        if "nvme" in on:
            count, size = self.buffers
            where = {} if folder is None else {"folder": folder}
            return minizero.NVMe(plan, **where, buffer_count=count, buffer_size=size)
        return minizero.Offload(plan) if "cpu" in on else None


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """The same names, and tensors that are equal bit for bit, on whatever device."""
    return a.keys() == b.keys() and all(torch.equal(a[k].cpu(), b[k].cpu()) for k in a)


def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    """Of torch: what has no gradient has a zero one."""
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()


def batches(steps: int, micro_batches: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """The global batches on the device, the same on every rank; `rows` for each."""
    generator = torch.Generator().manual_seed(7)
    size = (steps * micro_batches, world_size() * rows, 5)
    x = torch.randint(VOCABULARY, size, generator=generator)
    y = torch.randint(VOCABULARY, size, generator=generator)
    return list(zip(x.to(device()), y.to(device()), strict=True))


def own(t: Tensor, rows: int) -> Tensor:
    return t[rank() * rows : (rank() + 1) * rows]
