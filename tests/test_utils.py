"""Views of parameters, gradients and states, against plain torch and each other."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import nasty
import pytest
import torch
from nasty import Case, Nasty, batches, on_two_ranks, own, same
from torch import Tensor, nn

from minizero import Overlap, Plan, parallelize, zero
from minizero.deepspeed.utils import (
    RepeatingLoader,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from minizero.engine.data import Loader
from minizero.precision import LossScale, MixedPrecision
from minizero.ranks import Pool, device, world_size
from minizero.zero import DataParallel

at = Plan.stage
CASES: dict[str, Case] = {
    "1": Case(at(1)),
    "3, overlap": Case(at(3), overlap=(100, 10**6, 200)),
    "3, bf16, cpu": Case(at(3, "cpu", "cpu"), "bf16"),
    "3, bf16, nvme": Case(at(3, "nvme", "nvme"), "bf16"),
}
Seen = dict[str, Tensor]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def looked_at(model: nn.Module) -> dict[str, nn.Parameter]:
    """Some of them: small and large ones, tied, unused and not used in each step."""
    found = trained(model)
    return {n: p for n, p in found.items() if "blocks" not in n or "1." in n}


def backward(net: DataParallel, step: int) -> None:
    x, y = batches(4, 1, rows=2)[step]
    net.model.step = step
    net.backward(net(own(x, 2), own(y, 2)))


def look(model: nn.Module) -> Seen:
    """All that there is to see after a backward that follows an update."""
    get: dict[str, Callable[[nn.Parameter], Tensor | None]] = {
        "parameter": safe_get_full_fp32_param,
        "gradient": safe_get_full_grad,
    }
    for key in ("exp_avg", "exp_avg_sq"):
        get[key] = partial(safe_get_full_optimizer_state, optim_state_key=key)
    seen: Seen = {}
    for what, of in get.items():
        for name, p in looked_at(model).items():
            value = of(p)
            assert value is not None and value.dtype == torch.float32
            assert value.shape == p.shape
            seen[f"{what} of {name}"] = value
    return seen


def plain() -> Seen:
    """What is there after two steps and a backward, without this project."""
    torch.manual_seed(0)
    model = Nasty().to(device())
    optimizer = nasty.adamw(nasty.groups(model))
    for step in range(3):
        model.step = step
        x, y = batches(4, 1, rows=2)[step]
        losses = [model(*rows) for rows in zip(x.split(2), y.split(2), strict=True)]
        (torch.stack(losses).sum() / world_size()).backward()
        if step < 2:
            nasty.step(optimizer, [*trained(model).values()])
    seen: Seen = {}
    for name, p in looked_at(model).items():
        seen[f"parameter of {name}"] = p.detach()
        seen[f"gradient of {name}"] = torch.zeros_like(p) if p.grad is None else p.grad
        for key in ("exp_avg", "exp_avg_sq"):
            seen[f"{key} of {name}"] = optimizer.state[p][key]
    return seen


NAMES = ("tokens.weight", "blocks.1.up.bias", "blocks.1.down.weight", "norm.weight")


def values(p: Tensor) -> Tensor:
    """Something that bf16 has exactly, all different."""
    return (torch.arange(p.numel(), device=p.device) % 127 / 64 - 1).view(p.shape)


def viewed(net: DataParallel) -> Seen:
    """Views at a moment when everything is there to be seen."""
    model = net.model
    for step in range(2):
        backward(net, step)
        net.step()
    backward(net, 2)
    seen = look(model)
    with zero.GatheredParameters(list(model.parameters())):
        for name, p in looked_at(model).items():
            assert torch.equal(seen[f"parameter of {name}"].to(p.dtype), p), name
    for p in (model.places.weight, model.blocks[1].scale):
        assert safe_get_full_fp32_param(p) is None
        assert safe_get_full_grad(p) is None
        assert safe_get_full_optimizer_state(p, "exp_avg") is None
    tied = safe_get_full_fp32_param(model.head.weight)
    assert torch.equal(tied, seen["parameter of tokens.weight"])
    return seen


def written(net: DataParallel) -> tuple[Seen, Seen]:
    """Set gradients, then parameters and states; what is seen of it, and weights."""
    parameters = trained(net.model)
    for name, p in parameters.items():
        grad = values(p) if name in NAMES else 0.5 * safe_get_full_grad(p)
        safe_set_full_grad(p, grad)
        assert torch.equal(safe_get_full_grad(p), grad)
    net.step()
    for name in NAMES:
        p = parameters[name]
        safe_set_full_fp32_param(p, values(p))
        safe_set_full_optimizer_state(p, values(p) / 8, "exp_avg")
    # the parameters are what their masters are, on every rank
    with zero.GatheredParameters(list(net.model.parameters())):
        for name in NAMES:
            assert torch.equal(parameters[name].float(), values(parameters[name]))
    backward(net, 3)
    seen = look(net.model)
    net.step()
    return seen, net.state_dict()


def looked_and_set(case: Case) -> tuple[Seen, ...]:
    net = case.build()
    return viewed(net), *written(net)


@pytest.fixture(scope="module")
def reference(two: Pool) -> Callable[[str], Any]:
    """Data parallelism in the arithmetic of a case, which is named."""
    run = cache(lambda case: two.run(looked_and_set, case)[0])
    return lambda name: run(CASES[name].reference())


def test_views_are_plain_torchs(two: Pool, reference: Callable[[str], Any]) -> None:
    for name, value in two.run(plain)[0].items():
        close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-7)
        close(reference("1")[0][name], value)


@pytest.mark.parametrize("name", CASES)
def test_views_and_what_is_set_are_the_same_everywhere(
    two: Pool, reference: Callable[[str], Any], name: str
) -> None:
    *expected, weights = reference(name)
    got = two.run(looked_and_set, CASES[name])
    for *seen, _ in got:
        assert all(map(same, seen, expected))
    assert same(got[0][-1], weights)


def watched(case: Case, watches: bool) -> Seen:
    net = case.build()
    for step in range(3):
        backward(net, step)
        if watches and step:
            look(net.model)
        net.step()
    return net.state_dict()


@pytest.mark.parametrize("name", ["3, overlap", "3, bf16, nvme"])
def test_looking_changes_nothing(two: Pool, name: str) -> None:
    blind, seen = (two.run(watched, CASES[name], watches)[0] for watches in (0, 1))
    assert same(blind, seen)


def accumulated(stage: int) -> list[Seen]:
    """The gradient so far after each of three micro-batches; two are postponed."""
    net, seen = Case(at(stage)).build(), []
    for micro in range(3):
        postpone = stage < 2 and micro < 2
        with net.no_sync() if postpone else nullcontext():
            backward(net, micro)
        grads = looked_at(net.model).items()
        seen.append({n: safe_get_full_grad(p) for n, p in grads})
    backward(net, 3)  # and one more, after a reduction
    return [*seen, {n: safe_get_full_grad(p) for n, p in grads}]


def test_the_gradient_so_far(two: Pool) -> None:
    """Also where no rank has the sum yet."""
    expected = two.run(accumulated, 2)[0]
    assert not same(expected[0], expected[3])
    for stage in (0, 1, 3):
        for got in two.run(accumulated, stage):
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@on_two_ranks
def test_a_reduction_under_way_is_waited_for() -> None:
    """The last layer's gradient: as soon as it is complete, and after backward."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer, plan = torch.optim.SGD(model.parameters(), lr=0.1), Plan.stage(2)
    units = set(model.children()).__contains__
    net = parallelize(model, optimizer, plan, schedule=Overlap(), units=units)
    last, early = model[2].weight, []
    model[1].weight.register_post_accumulate_grad_hook(
        lambda p: early.append(safe_get_full_grad(last))
    )
    for step in (1, 2):  # which leaves what the first has left
        net.backward(net(torch.full((1, 4), step + 0.5)).square().sum())
        late = safe_get_full_grad(last)
        assert late.any() and torch.equal(early[-1], late)
        net.step()


@on_two_ranks
def test_a_delayed_update_arrives_before_anybody_looks() -> None:
    net = Case(at(2, "cpu"), storage="Delayed").build()
    model = net.model
    for step in range(3):
        backward(net, step)
        net.step()
        full = {n: safe_get_full_fp32_param(p) for n, p in trained(model).items()}
        for name, p in trained(model).items():
            assert torch.equal(p, full[name])
    p = model.norm.weight
    safe_set_full_fp32_param(p, values(p))
    assert torch.equal(p, values(p))
    backward(net, 3)
    net.step()
    net.synchronize()
    assert (p - values(p)).abs().max() < 0.1
    assert not torch.equal(p, values(p))


@on_two_ranks
def test_gradients_carry_the_loss_scale() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = MixedPrecision(torch.float16, loss_scale=LossScale(512.0))
    net = parallelize(model, optimizer, Plan.stage(2), precision=precision)
    net.backward(net(torch.ones(1, 3)).sum())
    grad = safe_get_full_grad(model.weight)
    assert torch.equal(grad, torch.full_like(grad, precision.loss_scale))
    assert grad.shape == model.weight.shape
    assert grad.dtype == torch.float32


# when there is nothing to see


def test_gradients_are_there_between_backward_and_step() -> None:
    net = Case(at(2)).build()
    p = net.model.norm.weight
    assert safe_get_full_grad(p) is None
    backward(net, 0)
    assert safe_get_full_grad(p) is not None
    net.step()
    assert safe_get_full_grad(p) is None
    with pytest.raises(RuntimeError, match="no gradient of 'norm.weight' to set"):
        safe_set_full_grad(p, torch.zeros_like(p))
    backward(net, 1)
    net.zero_grad()
    assert safe_get_full_grad(p) is None


def test_states_are_there_after_the_first_update() -> None:
    net = Case(at(2)).build()
    p = net.model.norm.weight
    with pytest.raises(ValueError, match="no states before the first update"):
        safe_get_full_optimizer_state(p, "exp_avg")
    backward(net, 0)
    net.step()
    for key in ("momentum_buffer", "step"):
        with pytest.raises(ValueError, match=f"no '{key}' .* exp_avg, exp_avg_sq"):
            safe_get_full_optimizer_state(p, key)


def test_what_is_refused() -> None:
    net = Case(at(3)).build()
    model = net.model
    backward(net, 0)
    stranger = nn.Parameter(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="this Parameter belongs to no model"):
        safe_get_full_fp32_param(stranger)
    with pytest.raises(ValueError, match="this Tensor belongs to no model"):
        safe_get_full_grad(torch.zeros(3))
    frozen = model.blocks[0].scale
    for setting in (
        lambda: safe_set_full_fp32_param(frozen, frozen),
        lambda: safe_set_full_grad(frozen, frozen),
        lambda: safe_set_full_optimizer_state(frozen, frozen, "exp_avg"),
    ):
        with pytest.raises(ValueError, match="'blocks.0.scale' is frozen"):
            setting()
    p = model.norm.weight
    with pytest.raises(ValueError, match=r"has shape \(3,\), and \(12,\) is needed"):
        safe_set_full_fp32_param(p, torch.zeros(3))
    gone = Case(at(0)).build().model
    gc.collect()
    with pytest.raises(ValueError, match="belongs to no model"):
        safe_get_full_fp32_param(gone.norm.weight)


# the loader


def test_a_repeating_loader_starts_again() -> None:
    loader = torch.utils.data.DataLoader(list(range(3)), batch_size=2)
    repeating = RepeatingLoader(loader)
    got = [next(repeating).tolist() for _ in range(5)]
    assert got == [[0, 1], [2], [0, 1], [2], [0, 1]]
    ended, other = (Loader(range(3), 3) for _ in range(2))
    batch = next(iter(ended))
    other.load_state_dict(ended.state_dict())  # at the epoch's end
    assert torch.equal(next(RepeatingLoader(other)), batch)


def test_an_iterator_cannot_be_repeated() -> None:
    repeating = RepeatingLoader(iter([1, 2]))
    assert [next(repeating), next(repeating)] == [1, 2]
    with pytest.raises(RuntimeError, match="list_iterator gives no batch when"):
        next(repeating)
