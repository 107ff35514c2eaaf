"""Runs of a small nasty model that are saved, stopped and resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from nasty import HIDDEN, VOCABULARY, Case, Nasty, same
from torch import Tensor, nn

from minizero.checkpoint import load, save
from minizero.ranks import rank, world_size
from minizero.zero import DataParallel

ROWS = 12  # of a global batch: as many for each of 1, 2, 3 or 4 ranks
Run = tuple[list[Tensor], dict[str, Tensor]]


class Small(Nasty):
    """Half of the nasty model, with dropout, and buffers that change."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = self.blocks[:2]
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for index in (0, 1, 0):
            h = self.dropout(self.blocks[index](h, gain=0.5))
        if self.training:
            self.calls += 1
            self.mean.lerp_(h.detach().float().mean((0, 1)), 0.1)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def steps(net: DataParallel, first: int, last: int) -> list[Tensor]:
    """Train on the global batches `first` to `last`; the rank's losses."""
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randint(VOCABULARY, (2, last, ROWS, 5), generator=generator)
    own = slice(rank() * ROWS // world_size(), (rank() + 1) * ROWS // world_size())
    losses = []
    for step in range(first, last):
        loss = net(x[step, own], y[step, own])
        net.backward(loss)
        net.clip_grad_norm(0.5)
        net.step()
        losses.append(loss.detach())
    return losses


def close(net: DataParallel) -> None:
    if hasattr(net.storage, "close"):
        net.storage.close()  # type: ignore[operator]


def whole(net: DataParallel) -> dict[str, Tensor]:
    """Rank 0: all weights; every rank: its own buffers."""
    own = {f"own {name}": b.clone() for name, b in net.model.named_buffers()}
    return net.state_dict() | own


def unbroken(
    case: Case,
    before: int,
    after: int,
    folder: Path | None = None,
    tag: str = "t",
    dropout: float = 0.0,
) -> Run:
    """A run that is saved on its way, if there is a folder, and goes on."""
    net = case.build(partial(Small, dropout))
    steps(net, 0, before)
    if folder is not None:
        save(net, folder, tag, extra={"step": before})
    losses = steps(net, before, before + after)
    result = losses, whole(net)
    close(net)
    return result


def resumed(
    case: Case,
    before: int,
    after: int,
    folder: Path,
    tag: str = "t",
    dropout: float = 0.0,
    **options: Any,
) -> Run:
    """Another run, a step old, that takes the first one's place."""
    net = case.build(partial(Small, dropout), **options)
    steps(net, 5, 6)
    loaded = load(net, folder, tag)
    assert loaded.extra == {"step": before} and loaded.tag == tag
    losses = steps(net, before, before + after)
    result = losses, whole(net)
    close(net)
    return result


def equal(a: list[Run], b: list[Run]) -> bool:
    """Bit for bit, on every rank."""
    return all(
        all(map(torch.equal, x[0], y[0])) and same(x[1], y[1])
        for x, y in zip(a, b, strict=True)
    )


def near(a: list[Run], b: list[Run]) -> None:
    """To rounding, on different numbers of ranks: mean losses, and weights."""

    def mean(runs: list[Run]) -> Tensor:
        return torch.stack([torch.stack(run[0]) for run in runs]).float().mean(0)

    torch.testing.assert_close(mean(a), mean(b), rtol=1e-4, atol=1e-5)
    for name, weight in a[0][1].items():
        if "mean" not in name:  # each rank's own
            torch.testing.assert_close(weight, b[0][1][name], rtol=1e-3, atol=1e-4)
