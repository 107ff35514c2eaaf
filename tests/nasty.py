"""A small model with everything that breaks sharding, its optimizer, and its data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minizero.ranks import rank, world_size

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
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
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


def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    """Of torch: what has no gradient has a zero one."""
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()


def batches(steps: int, micro_batches: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """The global batches, the same on every rank; `rows` for each rank."""
    generator = torch.Generator().manual_seed(7)
    size = (steps * micro_batches, world_size() * rows, 5)
    x = torch.randint(VOCABULARY, size, generator=generator)
    y = torch.randint(VOCABULARY, size, generator=generator)
    return list(zip(x, y, strict=True))


def own(t: Tensor, rows: int) -> Tensor:
    return t[rank() * rows : (rank() + 1) * rows]
