"""What a script does to parameters and gradients by itself: taken over, or refused.

The rows of book/between-calls.md. What is taken over is compared with plain torch, or
with a net that was told in time; what is refused says what to do instead.
"""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from nasty import Fails, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minizero import Offload, Plan, parallelize
from minizero.precision import MixedPrecision
from minizero.ranks import Pool, device, launch, rank
from minizero.zero import DataParallel, GatheredParameters, Init

STAGES = (0, 1, 2, 3)
sgd = partial(torch.optim.SGD, lr=0.5)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def wrap(stage: int, made: nn.Module | None = None, **options: Any) -> DataParallel:
    made = made or model()
    trained = [p for p in made.parameters() if p.requires_grad]
    return parallelize(made, sgd(trained), Plan.stage(stage), **options)


def rows() -> Tensor:
    return (torch.ones(3, 4) + torch.arange(4)).to(device())


def loss(net: Any) -> Tensor:
    return net(rows()).float().square().sum()


# taken over


def in_place(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def exchanged(p: nn.Parameter) -> None:
    p.data = p.data * 0.25


Write = Callable[[nn.Parameter], Any]
WRITES: list[Write] = [in_place, exchanged, lambda p: p.data.clamp_(-0.125, 0.125)]


def wrap_copies(made: nn.Module, stage: int, copies: str) -> DataParallel:
    """A net whose optimizer updates copies: masters, or what is offloaded."""
    if copies == "masters":
        return wrap(stage, made, precision=MixedPrecision())
    plan = Plan.stage(stage, "cpu", "cpu" if stage == 3 else None)
    return parallelize(made, sgd(made.parameters()), plan, storage=Offload(plan))


def after_write(stage: int, write: Write, copies: str, early: bool) -> Any:
    """Weights after a step, a write to all parameters, and a step.

    `early`: the write is made before the net exists, so that it cannot be missed.
    """
    net = wrap_copies(model(), stage, copies)
    net.backward(loss(net))
    net.step()
    made, sharded = net.model, GatheredParameters(net.model.parameters(), 0)
    if early:
        made, sharded = model(), nullcontext()
        made.load_state_dict(net.state_dict())
    with sharded if stage == 3 else nullcontext():
        for p in made.parameters():
            write(p)
    if early:
        net = wrap_copies(made, stage, copies)
    net.backward(loss(net))
    net.step()
    return net.state_dict()


@pytest.mark.parametrize("copies", ["masters", "offloaded"])
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_writes_are_taken_over(stage: int, copies: str) -> None:
    for write in WRITES:
        assert same(*(after_write(stage, write, copies, e) for e in (False, True)))


def written_at_once(stage: int) -> dict[str, Tensor]:
    net = wrap(stage)
    with GatheredParameters(net.model.parameters(), modifier_rank=1):
        if rank() == 1:
            for p in net.model.parameters():
                p.data = torch.full_like(p, 0.5)
    net.backward(loss(net))
    net.step()
    return net.state_dict()


def test_one_rank_writes_for_all(two: Pool) -> None:
    expected = two.run(written_at_once, 0)[0]
    for stage in (1, 2, 3):
        assert same(two.run(written_at_once, stage)[0], expected)


# refused


def overtaken(net: Any) -> None:
    late = loss(net)
    net.backward(loss(net))
    net.step()
    net.backward(late)


def frozen_late(net: Any) -> None:
    net.model[0].weight.requires_grad_(False)
    net.backward(loss(net))


def set_grad(net: Any) -> None:
    net.backward(loss(net))
    net.model[0].bias.grad = torch.zeros(6, device=device())
    net.step()


def own_step(net: Any) -> None:
    net.backward(loss(net))
    net.optimizer.step()


def late_gradient(net: Any) -> None:
    block = net.model[0]
    x = rows().requires_grad_()
    h = checkpoint(block, x, use_reentrant=True)[:, :4]
    h = checkpoint(block, h, use_reentrant=True)
    net.backward(h.sum() + 0 * loss(net))


def trained_before(net: Any) -> None:
    made = model().to(device())
    optimizer = torch.optim.Adam(made.parameters())
    loss(made).backward()
    optimizer.step()
    try:
        parallelize(made, optimizer, net.plan)
    finally:  # it has changed neither
        assert optimizer.param_groups[0]["params"] == [*made.parameters()]


def after_a_failure(net: Any) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        net.backward(Fails.apply(loss(net)))
    with pytest.raises(RuntimeError, match="call zero_grad"):
        net.backward(loss(net))
    net.step()


REFUSED: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], str]] = {
    "a forward that an update overtook": (overtaken, STAGES, "inplace operation"),
    "frozen after wrapping": (frozen_late, STAGES, "requires_grad of .*'0.weight'"),
    "a gradient that was set": (set_grad, STAGES, "set the gradient of .*'0.bias'"),
    "loss.backward()": (lambda net: loss(net).backward(), STAGES, r"outside of\s+back"),
    "optimizer.step()": (own_step, STAGES, r"SGD.step\(\) would change nothing"),
    "an optimizer that has stepped": (trained_before, (0, 3), "has made steps"),
    "wrapped twice": (lambda net: wrap(0, net.model), STAGES, "wrapped already"),
    "clipped to 0": (lambda net: net.clip_grad_norm(0.0), STAGES, "must be above 0"),
    "after a failed backward": (after_a_failure, STAGES, "gradients are incomplete"),
    "a late gradient": (late_gradient, (0, 1, 2), "use_reentrant=False"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    act, stages, sentence = REFUSED[what]
    for stage in stages:
        with pytest.raises((RuntimeError, ValueError), match=sentence):
            act(wrap(stage))


def freed_write(net: Any) -> None:
    nn.init.zeros_(net.model[0].bias)
    net(rows())


def freed_exchange(net: Any) -> None:
    net.model[0].weight.data = torch.zeros(6, 4, device=device())
    net(rows())


class ReturnsView(nn.Linear):
    """Returns a row of its weight, which is freed after the forward."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.weight[1]


def view_returned(net: Any) -> None:
    made = nn.Sequential(ReturnsView(4, 4))
    wrap(3, made)(rows())


SHARDED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a write in place": (freed_write, "'0.bias' was written to while it was sharded"),
    "a write as .data": (freed_exchange, "'0.weight' was written to"),
    "copy.deepcopy": (lambda net: copy.deepcopy(net.model), "parameters are sharded"),
    "torch.save": (lambda net: torch.save(net.model, io.BytesIO()), "are sharded"),
    "state_dict": (lambda net: net.model.state_dict(), "parameters are sharded"),
    "a module's state_dict": (lambda net: net.model[2].state_dict(), "are sharded"),
    "load_state_dict": (lambda net: net.model.load_state_dict({}), "are sharded"),
    "a view that outlives a unit": (view_returned, "returns a view of its"),
}


@pytest.mark.parametrize("what", SHARDED)
def test_refused_while_sharded(what: str) -> None:
    act, sentence = SHARDED[what]
    net = wrap(3)
    with pytest.raises(RuntimeError, match=sentence):
        act(net)
    assert all(p.isnan().all() for p in net.model.parameters())
    net.backward(loss(net))  # nothing is broken by it
    net.step()
    assert all(p.isnan().all() for p in net.model.parameters())


def test_a_gathered_model_is_copied_and_saved() -> None:
    net = wrap(3)
    file = io.BytesIO()
    with GatheredParameters(net.model.parameters()):
        other = copy.deepcopy(net.model)
        torch.save(net.model, file)
        expected = {k: v.clone() for k, v in net.model.state_dict().items()}
    file.seek(0)
    for made in (other, torch.load(file, weights_only=False)):
        assert same(made.state_dict(), expected)
        assert made(rows()).isfinite().all()
    assert net.model[0].weight.isnan().all()


def test_a_model_outlives_its_net() -> None:
    net = wrap(3)
    made, expected = net.model, net(rows()).detach()
    del net
    gc.collect()
    assert torch.equal(made(rows()), expected)


def test_views_outlive_the_block_that_gathered() -> None:
    net = wrap(3)
    weight = net.model[0].weight
    with GatheredParameters(weight):
        kept = [weight.data, weight.detach(), weight[0]]
        values = weight.detach().clone()
    net.backward(loss(net))
    net.step()
    assert torch.equal(kept[0], values) and torch.equal(kept[1], values)
    assert torch.equal(kept[2], values[0])


def penalized() -> None:
    def penalty(net: Any) -> Tensor:
        return torch.stack([p.square().sum() for p in net.model.parameters()]).sum()

    net = wrap(3)
    assert (loss(net) + penalty(net)).isnan()
    net = wrap(3)
    before = penalty(net)
    with pytest.raises(RuntimeError, match="was used outside of the forward of"):
        net.backward(before + loss(net))


def test_a_penalty_over_sharded_parameters_is_nan_or_refused() -> None:
    launch(penalized, 1)  # a process of its own: the graph of `before` is never freed


def tied_by_data() -> nn.Module:
    made = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    made[1].weight.data = made[0].weight.data
    return made


def compiled() -> nn.Module:
    made = model()
    made[0].compile(backend="eager")
    return made


def inside_init() -> nn.Module:
    with Init():
        return model()


MODELS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "two parameters in one memory": (tied_by_data, 0, "share memory.*to tie them"),
    "compiled": (compiled, 3, "is compiled"),
    "built inside zero.Init": (inside_init, 1, "built inside zero.Init"),
    "without values": (lambda: model().to("meta"), 3, "on the meta device"),
}


@pytest.mark.parametrize("what", MODELS)
def test_models_that_are_refused(what: str) -> None:
    make, stage, sentence = MODELS[what]
    with pytest.raises(ValueError, match=sentence):
        wrap(stage, make())
