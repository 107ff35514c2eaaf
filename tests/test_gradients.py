"""No gradient is lost, whatever a forward and a backward look like.

Weights and inputs are whole numbers, losses multiples of 6: sums and means are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nasty import on_each_rank, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minizero import Overlap, Plan, parallelize, zero
from minizero.ranks import Pool, device, rank, world_size
from minizero.zero import Schedule

RANKS = (1, 2)
WIDTH = 4
Call = Callable[..., Tensor]


@dataclass
class Out:
    value: Tensor
    count: int = 0


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda t: {"n": None, "t": t}, lambda out: out["t"]),
    "list with None": (lambda t: [None, 3, "a", t], lambda out: out[3]),
    "dataclass": (Out, lambda out: out.value),
    "object": (lambda t: SimpleNamespace(a=[t]), lambda out: out.a[0]),
}


class Block(nn.Module):
    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        # a unit that has an unused parameter is never complete before the end
        self.extra = nn.Parameter(torch.zeros(3)) if extra else None
        self.wrap: Callable[[Tensor], Any] = lambda t: t

    def forward(self, x: Tensor, *, twice: bool = False, extra: bool = False) -> Any:
        y = self.linear(x)
        y = y + self.linear(y) if twice else y
        return self.wrap(y if self.extra is None or not extra else y + self.extra.sum())


class Zoo(nn.Module):
    """`how` names the way in which forward uses the blocks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.tokens = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        extra = how == "other parameters on each rank"
        self.blocks = nn.ModuleList(Block(extra) for _ in range(3))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randint(-1, 2, p.shape, generator=generator))
        if how in OUTPUTS:
            for block in self.blocks:
                block.wrap = OUTPUTS[how][0]
        if how == "frozen":
            self.tokens.requires_grad_(False)
            self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor, inner: bool = False) -> Tensor:
        a, b, c = self.blocks
        h = x @ self.tokens
        if self.how == "in itself" and not inner:
            return self(x, inner=True) + (self(2 * x, inner=True) @ self.tokens)
        if self.how == "twice":
            h = c(a(b(a(h))))
        elif self.how == "in parallel":
            h = c(a(h) + a(2 * h) + b(h, twice=True))
        elif self.how == "two checkpointed calls":
            for _ in range(2):
                h = checkpoint(a, h, use_reentrant=False)
            h = checkpoint(lambda t: c(b(t)), h, use_reentrant=False)
        elif self.how == "other parameters on each rank":
            h = c(b(a(h, extra=rank_of(x) == 0), extra=rank_of(x) > 0))
        elif self.how == "other blocks on each rank":
            h = c(a(h)) if rank_of(x) else b(a(h))
        elif self.how in OUTPUTS:
            for block in (a, b, c):
                h = OUTPUTS[self.how][1](block(h))
        elif self.how == "outside of its block":
            h = c(b(a(h))) @ self.blocks[0].linear.weight
        else:
            h = c(b(a(h)))
        return h


def rank_of(x: Tensor) -> int:
    return int(x[0, 0])


def data(r: int) -> Tensor:
    """The rank's rows, its number in front."""
    x = torch.randint(-1, 2, (2, WIDTH), generator=torch.Generator().manual_seed(r))
    x[0, 0] = r
    return x.float().to(device()).requires_grad_()


def loss(out: Tensor) -> Tensor:
    return 6 * out.sum()


Use = Callable[[Call, Callable[..., None], Tensor], None]


def once(net: Call, backward: Callable[..., None], x: Tensor) -> None:
    backward(loss(net(x)))


def siamese(net: Call, backward: Callable[..., None], x: Tensor) -> None:
    backward(loss(net(x)) + loss(net(2 * x)))


def retained(net: Call, backward: Callable[..., None], x: Tensor) -> None:
    both = loss(net(x)) + loss(net(2 * x))
    backward(both, retain_graph=True)
    backward(both)


def in_turns(net: Call, backward: Callable[..., None], x: Tensor) -> None:
    first, second = loss(net(x)), loss(net(2 * x))
    backward(second)
    backward(first)


def looking(net: Call, backward: Callable[..., None], x: Tensor) -> None:
    """Forwards without a backward, before, in between and after."""
    dropped = net(x)
    out = net(x)
    with torch.no_grad():
        net(2 * x)
    backward(loss(out))
    del dropped
    net(x)


def by_grad(net: Call, backward: Callable[..., None], x: Tensor) -> None:
    """The gradient of the input goes into the next input."""
    (slope,) = torch.autograd.grad(net(x).sum(), x)
    backward(loss(net(slope)))


USES: dict[str, Use] = {
    "once": once,
    "siamese": siamese,
    "retained": retained,
    "in turns": in_turns,
    "looking": looking,
    "by grad": by_grad,
}
HOW = [
    "plain",
    "frozen",
    "twice",
    "in parallel",
    "in itself",
    "two checkpointed calls",
    "other parameters on each rank",
]


def expected(how: str, use: Use) -> dict[str, Tensor]:
    """Plain torch on every rank's data, and the mean of the gradients."""
    model = Zoo(how).to(device())
    for r in range(world_size()):
        use(model, lambda t, **how: t.backward(**how), data(r))
    with torch.no_grad():
        return {
            name: p if p.grad is None else p - p.grad / world_size()
            for name, p in model.named_parameters()
        }


def build(how: str, stage: int, **options: Any) -> Any:
    model = Zoo(how)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=1.0)
    return parallelize(model, optimizer, Plan.stage(stage), **options)


def is_right(net: Any, use: Use, wanted: dict[str, Tensor]) -> bool:
    """Whether a step gives these weights, and frees what it has gathered."""
    use(net, net.backward, data(rank()))
    net.step()
    if net.plan.parameters.sharded and type(net.schedule) is Schedule:
        if any(flat.is_unsharded for flat in net.flats):
            return False
    with zero.GatheredParameters(net.model.parameters()):
        return same(dict(net.model.named_parameters()), wanted)


def wrong(hows: list[str], uses: list[str], stages: list[int]) -> list[str]:
    """The cases in which the weights after a step are not the expected ones."""
    found = []
    for how in hows:
        for use in uses:
            wanted = expected(how, USES[use])
            for stage in stages:
                # reductions under way: of buffers that stay, and of those that go
                for overlap in (False, True) if stage in (1, 3) else (False,):
                    schedule = Overlap(param_persistence_threshold=0)
                    options = {"schedule": schedule} if overlap else {}
                    net = build(how, stage, **options)
                    if not is_right(net, USES[use], wanted):
                        found.append(f"{how}, {use}, plan {stage}, {[*options]}")
    return found


def check(pool: Pool, hows: list[str], uses: list[str], stages: list[int]) -> None:
    for found in pool.run(wrong, hows, uses, stages):
        assert found == []


@pytest.mark.parametrize("how", HOW)
def test_as_plain_torch(pool: Pool, how: str) -> None:
    check(pool, [how], list(USES), [0, 1, 2, 3])


def test_outputs_of_any_kind(pool: Pool) -> None:
    check(pool, list(OUTPUTS), ["once"], [2, 3])


def test_what_only_plans_with_whole_parameters_do(pool: Pool) -> None:
    hows = ["other blocks on each rank", "outside of its block"]
    check(pool, hows, list(USES), [0, 1, 2])


@on_each_rank
def test_a_look_inside_a_forward() -> None:
    """A block's parameters stay whole when somebody has looked at them in forward."""
    net = build("plain", 3)
    block = net.model.blocks[1]

    def look(*_: Any) -> None:
        with zero.GatheredParameters(block.parameters(), modifier_rank=0):
            with zero.GatheredParameters(block.linear.weight):
                net.state_dict()

    block.linear.register_forward_pre_hook(look)
    block.linear.register_full_backward_pre_hook(look)
    assert is_right(net, once, expected("plain", once))


@on_each_rank
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_through_another_net_leaves_that_alone(stage: int) -> None:
    """A generator's step through a discriminator that is not frozen; as where a script
    clears the discriminator's gradients before that trains."""

    def through(other: Any, net: Call, backward: Any, x: Tensor) -> None:
        backward(loss(other(net(x))))

    other = build("twice", stage)
    wanted = expected("plain", partial(through, Zoo("twice").to(device())))
    assert is_right(build("plain", stage), partial(through, other), wanted)
    other.step()
    with zero.GatheredParameters(other.model.parameters()):
        assert same(other.model.state_dict(), Zoo("twice").state_dict())
