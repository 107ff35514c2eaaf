"""Tensor, pipeline and sequence parallelism, each with ZeRO, on four ranks as 2 x 2."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minizero import Plan, comm, parallelize
from minizero.comm import Groups, Ledger
from minizero.lab.models.gpt import GPT, Attention, GPTConfig
from minizero.lab.models.pipeline import Pipeline
from minizero.lab.models.tensor_parallel import tensor_parallel
from minizero.lab.models.ulysses import UlyssesAttention, all_to_all
from minizero.ranks import Pool, rank

RANKS = (4,)
CONFIG = GPTConfig(4, 32, 4, sequence=16, vocabulary=50)
ROWS, STEPS = 8, 3
TOKENS = ROWS // 2 * CONFIG.sequence * CONFIG.hidden  # elements of a model's half batch


def build() -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    head = model.head.weight.detach().clone()
    model.head.weight = nn.Parameter(head)  # a pipeline has the two at its ends
    return model


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (ROWS, 17), generator=generator)
    return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """One that notices when gradients are too large by a factor."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


@cache
def alone() -> list[float]:
    """The losses of one process."""
    model, losses = build(), []
    sgd = optimizer(model)
    for _ in range(STEPS):
        loss = model(*batch())
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        losses.append(loss.item())
    return losses


Result = tuple[list[float], Ledger, int, Any]


def train(stage: int, cut: str) -> Result:
    """Mean losses of the ranks of one world, calls, own parameters, most kept."""
    grid = Groups(2)
    model, pipe = CUTS[cut](build(), grid), None
    everybody = cut == "sequence"
    group = comm.everyone() if everybody else grid.across
    losses = []
    with comm.ledger() as calls:
        net = parallelize(model, optimizer(model), Plan.stage(stage), group=group)
        if cut == "pipeline":
            pipe = Pipeline(net, grid.within, (1, CONFIG.sequence, CONFIG.hidden))
        for _ in range(STEPS):
            x, y = (t.chunk(2)[grid.number] for t in batch())
            if everybody:
                x, y = (t.chunk(2, 1)[grid.place].contiguous() for t in (x, y))
            if pipe is None:
                loss = net(x, y)
                net.backward(loss)
                mean = loss.detach().clone().view(1)
            else:
                parts = list(zip(x.split(1), y.split(1), strict=True))
                mean = torch.tensor([pipe.backward(parts)])
            net.step()
            with comm.phase("report"):
                comm.all_reduce(mean, average=True, group=group)
            losses.append(mean.item())
    count = sum(slot.numel for u in net.units for f in u.flats for slot in f.slots)
    return losses, calls, count, pipe and pipe.most


def tensor(model: GPT, grid: Groups) -> nn.Module:
    return tensor_parallel(model, grid.within)


def sequence(model: GPT, grid: Groups) -> nn.Module:
    for block in model.blocks:
        block.register_module(
            "attention", UlyssesAttention(block.attention, grid.within)
        )
    first = grid.place * CONFIG.sequence // 2
    model.positions.register_forward_pre_hook(lambda _, args: (args[0] + first,))
    return model


class Stage(nn.Module):
    """Half of a GPT."""

    def __init__(self, model: GPT, place: int) -> None:
        super().__init__()
        self.blocks = model.blocks[2 * place : 2 * place + 2]
        self.ends = nn.ModuleList(
            [model.norm, model.head] if place else [model.tokens, model.positions]
        )
        self.place = place

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        first, second = self.ends
        if not self.place:
            x = first(x) + second(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        if targets is None:
            return x
        return F.cross_entropy(second(first(x)).flatten(0, 1), targets.flatten())


CUTS: dict[str, Callable[[GPT, Groups], nn.Module]] = {
    "tensor": tensor,
    "pipeline": lambda model, grid: Stage(model, grid.place),
    "sequence": sequence,
}


SENT = {
    "tensor": ("tensor parallel", CONFIG.layers * 8 * TOKENS // 2),
    "sequence": ("ulysses", CONFIG.layers * 8 * TOKENS // 4),
    "pipeline": ("pipeline", TOKENS),  # each of two stages sends once across
}
"""A block: 8(P-1)/P of its activations, 8(P-1)/P² of them; a border: 2 of them."""


def sent(calls: Ledger, unit: str) -> int:
    """Elements of one step, of one unit or of all that ZeRO made."""
    cut = [c for c in calls if c.unit in ("tensor parallel", "pipeline", "ulysses")]
    if unit != "zero":
        return sum(c.sent for c in cut if c.unit == unit) // STEPS
    zero = [c for c in calls if c not in cut and c.phase not in ("init", "report")]
    return sum(c.sent for c in zero) // STEPS


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("cut", CUTS)
def test_losses_are_those_of_one_process(pool: Pool, cut: str, stage: int) -> None:
    results: list[Result] = pool.run(train, stage, cut)
    ends = results[1::2] if cut == "pipeline" else results  # the stages with a loss
    for losses, *_ in ends:
        assert losses == pytest.approx(alone(), abs=1e-5)
    assert alone()[2] < alone()[0] - 0.05
    unit, elements = SENT[cut]
    for _, calls, count, most in results:
        assert sent(calls, unit) == elements
        micro = ROWS // 2 if cut == "pipeline" else 1
        times = 2 if stage == 1 else 3 * micro
        shards = 4 if cut == "sequence" else 2
        assert sent(calls, "zero") == times * count * (shards - 1) // shards
        assert cut != "pipeline" or most in (1, 2)


def squares() -> tuple[Tensor, Tensor]:
    group, x = Groups(2).within, torch.arange(4.0).view(2, 2) + 10 * rank()
    once, twice = torch.empty_like(x), torch.empty_like(x)
    all_to_all(once, x, group)
    all_to_all(twice, once, group)
    assert torch.equal(x, twice)
    return x, once


def test_all_to_all(pool: Pool) -> None:
    found = pool.run(squares)
    for r, (_, once) in enumerate(found):
        pair = [found[r - r % 2][0], found[r - r % 2 + 1][0]]
        assert torch.equal(once, torch.stack([x[r % 2] for x in pair]))


def refusals() -> list[str]:
    said = []
    for make in (
        lambda: Groups(3),
        lambda: all_to_all(torch.empty(3, 1), torch.empty(3, 1), comm.everyone()),
        lambda: UlyssesAttention(Attention(GPTConfig(1, 9, 3)), Groups(2).within),
    ):
        with pytest.raises(ValueError) as error:
            make()
        said.append(str(error.value))
    return said


def test_what_cannot_be_cut_is_told(pool: Pool) -> None:
    grid, rows, heads = pool.run(refusals)[0]
    assert "groups of 3 ranks cannot be made of 4" in grid
    assert "4 rows of one shape are needed" in rows
    assert "3 heads cannot be cut over 2 ranks" in heads
