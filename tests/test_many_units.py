"""Thousands of small blocks: neighbours share units, and a step is linear in them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minizero import comm, parallelize
from minizero.memory.plan import Plan
from minizero.overlap import Overlap
from minizero.ranks.launch import Pool, rank
from minizero.zero.units import MANY, SMALL, units_of

WIDTH, BLOCKS = 20, MANY + 2  # of 420 elements: 239 of them are a unit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(self.linear(x))


ORDERS = {
    "in order": [*range(BLOCKS)],
    "backwards": [*range(BLOCKS)[::-1]],
    "some, and one twice": [5, *range(0, BLOCKS - 1, 3), 5],
    "reentrant": [*range(0, BLOCKS, 8)],
}
HOW = [*ORDERS, "in pieces", "recomputed", "frozen first"]


class Deep(nn.Module):
    """Two lists of blocks, which are called as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.others = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for i in ORDERS.get(self.how, range(BLOCKS)):
            block = self.blocks[i]
            if self.how == "in pieces":
                x = x + 0.1 * torch.tanh(block.linear(x))
            elif self.how in ("recomputed", "reentrant"):
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
            else:
                with torch.set_grad_enabled(self.how != "frozen first" or i > 9):
                    x = block(x)
        for block in self.others:
            x = block(x)
        return x.square().sum()


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def there(net: Any) -> int:
    """How many buffers are whole."""
    flats = [flat for unit in net.units for flat in unit.flats]
    return sum(getattr(flat, "there", True) for flat in flats)


def trained(
    how: str, stage: int, **options: Any
) -> tuple[dict[str, Tensor], list[str]]:
    """Weights after two steps; the units that the second gathered."""
    torch.manual_seed(3)
    model = Deep(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = parallelize(model, optimizer, Plan.stage(stage), **options)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank()))
    for _ in range(2):
        with comm.ledger() as calls:
            net.backward(net(x))
        net.step()
    with torch.no_grad():
        net(x)
        model.blocks[0](x)  # nobody waits for its neighbours
    if stage == 3 and "schedule" not in options:
        assert there(net) == 0
    return net.state_dict(), [call.unit for call in calls.select("all_gather")]


def on_every_plan(how: str) -> tuple[dict[str, int], dict[str, int]]:
    """Parameters that differ from plan 0's with a unit a block; gathers a unit."""
    expected, _ = trained(how, 0, units=is_block)
    wrong = {}
    for stage in (0, 1, 2, 3):
        got, gathered = trained(how, stage)
        wrong[f"stage {stage}"] = [n for n in expected if not expected[n].equal(got[n])]
    overlap = Overlap(param_persistence_threshold=0)
    got, _ = trained(how, 3, schedule=overlap)
    wrong["overlap"] = [n for n in expected if not expected[n].equal(got[n])]
    return {k: len(v) for k, v in wrong.items() if v}, {
        name: gathered.count(name) for name in gathered
    }


@pytest.mark.parametrize("how", HOW)
def test_the_bits_of_a_unit_a_block(two: Pool, how: str) -> None:
    for wrong, gathers in two.run(on_every_plan, how):
        assert wrong == {}
        if how in ("in order", "in pieces", "recomputed"):
            # before its forward and before its backward, however many its modules
            names = ["root", "blocks.0-238", "blocks.239-257", "others.0-1"]
            assert gathers == dict.fromkeys(names, 2)


def linears(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def test_neighbours_share_a_unit_where_there_are_many() -> None:
    def sizes(model: nn.Module, policy: Any = None) -> list[int]:
        return [len(run) for name, run in units_of(model, policy).items() if name]

    few, many = linears(MANY, 10), linears(3_000, 10)
    assert sizes(few) == [1] * MANY  # chapters' models and most others
    assert sizes(many) == [1_000] * 3  # of 100,000 elements
    assert list(units_of(many)) == ["", "0-999", "1000-1999", "2000-2999"]
    assert sizes(many, lambda m: isinstance(m, nn.Linear)) == [1] * 3_000
    large = linears(MANY + 1, 317)
    assert large[0].weight.numel() > SMALL and sizes(large) == [1] * len(large)
    # two lists share nothing
    assert sizes(nn.ModuleList([linears(200, 10), linears(100, 10)])) == [1, 1]
    both = nn.ModuleDict({"a": linears(200, 10), "b": linears(100, 10)})
    assert sizes(both) == [200, 100]


def calls(blocks: int, stage: int, units: Any = None) -> int:
    """Of functions, in a step."""
    model = nn.Sequential(*map(nn.LayerNorm, [2] * blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = parallelize(model, optimizer, Plan.stage(stage), units=units)
    x, made = torch.randn(2, 2), 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    def step() -> None:
        net.backward(net(x).sum())
        net.step()

    step()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return made


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_is_linear_in_blocks(stage: int) -> None:
    def alone(module: nn.Module) -> bool:
        return isinstance(module, nn.LayerNorm)

    each: dict[Callable[..., bool] | None, int] = {}
    for units in (None, alone):
        small, large = (calls(n, stage, units) for n in (300, 600))
        assert large < 2.05 * small
        each[units] = (large - small) // 300
    assert 3 * each[None] < each[alone]


def objects(blocks: int, stage: int) -> int:
    """Of those that the garbage collector visits, what a net of so many blocks adds."""
    model = nn.Sequential(*map(nn.LayerNorm, [2] * blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    before = len(gc.get_objects())
    net = parallelize(model, optimizer, Plan.stage(stage))
    gc.collect()
    assert gc.isenabled() and len(net.units) > 1
    return len(gc.get_objects()) - before


@pytest.mark.parametrize("stage, most", [(0, 4), (3, 8)])
def test_a_net_adds_few_objects_for_each_parameter(stage: int, most: int) -> None:
    objects(300, stage)  # what is made once
    small, large = (objects(n, stage) for n in (300, 600))
    assert large - small <= most * 600  # two parameters a block
