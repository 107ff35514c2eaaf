"""Views of parameters, gradients and states, against plain torch and each other."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import nasty
import pytest
import torch
from nasty import Nasty, batches, own
from torch import Tensor, nn

from minizero import Delayed, NVMe, Offload, Overlap, Plan, parallelize, zero
from minizero.deepspeed.utils import (
    RepeatingLoader,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from minizero.precision import LossScale, MixedPrecision
from minizero.ranks import Pool
from minizero.zero import DataParallel

# stage, where it is offloaded to, precision, how
KINDS: dict[str, tuple[int, str | None, str | None, str]] = {
    "0": (0, None, None, ""),
    "1": (1, None, None, ""),
    "3, overlap": (3, None, None, "overlap"),
    "0, bf16": (0, None, "bf16", ""),
    "3, bf16, cpu": (3, "cpu", "bf16", ""),
    "3, bf16, nvme": (3, "nvme", "bf16", ""),
}


def build(
    stage: int, on: str | None, precision: str | None, how: str
) -> tuple[Nasty, DataParallel]:
    torch.manual_seed(0)
    model = Nasty()
    plan = Plan.stage(
        stage, offload_optimizer=on, offload_param=on if stage == 3 else None
    )
    storage: Any = None
    if how == "delayed":
        storage = Delayed(plan)
    elif on == "nvme":
        storage = NVMe(plan, buffer_size=64)
    elif on == "cpu":
        storage = Offload(plan)
    overlap = Overlap(100, 10**6, 200) if how == "overlap" else None
    net = parallelize(
        model,
        nasty.adamw(nasty.groups(model)),
        plan,
        precision=MixedPrecision() if precision == "bf16" else None,
        schedule=overlap,
        storage=storage,
    )
    return model, net


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def backward(model: Nasty, net: DataParallel, step: int) -> None:
    x, y = batches(4, 1, rows=2)[step]
    model.step = step
    net.backward(net(own(x, 2), own(y, 2)))


def looked_at(model: nn.Module) -> dict[str, nn.Parameter]:
    """Some of them: small and large ones, tied, unused and not used in each step."""
    found = trained(model)
    return {n: p for n, p in found.items() if "blocks" not in n or "1." in n}


Seen = dict[str, dict[str, Tensor]]


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
        seen[what] = {}
        for name, p in looked_at(model).items():
            value = of(p)
            assert value is not None and value.dtype == torch.float32
            assert value.shape == p.shape
            seen[what][name] = value
    return seen


def views(kind: str) -> Seen:
    """Views at a moment when everything is there to be seen."""
    model, net = build(*KINDS[kind])
    for step in range(2):
        backward(model, net, step)
        net.step()
    backward(model, net, 2)
    full = look(model)
    with zero.GatheredParameters(list(model.parameters())):
        for name, p in looked_at(model).items():
            assert torch.equal(full["parameter"][name].to(p.dtype), p), name
    for p in (model.places.weight, model.blocks[1].scale):
        assert safe_get_full_fp32_param(p) is None
        assert safe_get_full_grad(p) is None
        assert safe_get_full_optimizer_state(p, "exp_avg") is None
    tied = safe_get_full_fp32_param(model.head.weight)
    assert torch.equal(tied, full["parameter"]["tokens.weight"])
    net.step()
    return full


def gradient(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def plain() -> Seen:
    """The same moment, without this project: gradients of all ranks' batches."""
    torch.manual_seed(0)
    model = Nasty()
    optimizer = nasty.adamw(nasty.groups(model))
    for step in range(3):
        model.step = step
        x, y = batches(4, 1, rows=2)[step]
        rows = range(0, len(x), 2)
        optimizer.zero_grad()
        sums: dict[nn.Parameter, Any] = dict.fromkeys(trained(model).values())
        for start in rows:
            model.zero_grad()
            model(x[start : start + 2], y[start : start + 2]).backward()
            for p in sums:
                if p.grad is not None:
                    sums[p] = p.grad if sums[p] is None else sums[p] + p.grad
        for p in sums:
            p.grad = None if sums[p] is None else sums[p] / len(rows)
        if step < 2:
            nasty.step(optimizer, [*sums])
    seen: Seen = {
        "parameter": {n: p.detach() for n, p in looked_at(model).items()},
        "gradient": {n: gradient(p) for n, p in looked_at(model).items()},
    }
    for key in ("exp_avg", "exp_avg_sq"):
        states = {n: optimizer.state[p][key] for n, p in looked_at(model).items()}
        seen[key] = states
    return seen


def same(a: Seen, b: Seen) -> bool:
    return all(
        a[what].keys() == b[what].keys()
        and all(torch.equal(a[what][name], b[what][name]) for name in a[what])
        for what in a
    )


def test_full_views_are_plain_torchs(two: Pool, references: dict[str, Any]) -> None:
    expected, got = two.run(plain)[0], references["0"][0]
    for what, each in expected.items():
        for name, value in each.items():
            close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-7)
            close(got[what][name], value)


@pytest.fixture(scope="module")
def references(two: Pool) -> dict[str, Any]:
    """Data parallelism, in fp32 and in bf16: views, and what is written."""
    return {
        kind: (two.run(views, kind)[0], two.run(written, kind)[0])
        for kind in ("0", "0, bf16")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_views_are_the_same_wherever_things_are(
    two: Pool, references: dict[str, Any], kind: str
) -> None:
    expected = references["0, bf16" if "bf16" in kind else "0"][0]
    assert all(same(full, expected) for full in two.run(views, kind))


def watched(kind: str, watches: bool) -> dict[str, Tensor]:
    model, net = build(*KINDS[kind])
    for step in range(3):
        backward(model, net, step)
        if watches:
            for p in looked_at(model).values():
                safe_get_full_grad(p)
                safe_get_full_fp32_param(p)
                if step:
                    safe_get_full_optimizer_state(p, "exp_avg")
        net.step()
    return net.state_dict()


@pytest.mark.parametrize("kind", ["3, overlap", "3, bf16, nvme"])
def test_looking_changes_nothing(two: Pool, kind: str) -> None:
    blind, seen = (two.run(watched, kind, watches)[0] for watches in (False, True))
    assert all(torch.equal(blind[name], seen[name]) for name in blind)


def accumulated(stage: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The gradient so far after each of three micro-batches; two are postponed."""
    model, net = build(stage, None, None, "")
    seen = []
    for micro in range(3):
        postpone = stage < 2 and micro < 2
        with net.no_sync() if postpone else contextlib.nullcontext():
            backward(model, net, micro)
        seen.append({n: safe_get_full_grad(p) for n, p in looked_at(model).items()})
    backward(model, net, 3)  # and one more, after a reduction
    seen.append({n: safe_get_full_grad(p) for n, p in looked_at(model).items()})
    net.step()
    return seen, net.state_dict()


def test_the_gradient_so_far(two: Pool) -> None:
    """Also where no rank has the sum yet."""
    expected = two.run(accumulated, 2)[0][0]
    assert any(
        not torch.equal(expected[0][name], expected[3][name]) for name in expected[0]
    )
    for stage in (0, 1, 3):
        for got, _ in two.run(accumulated, stage):
            for a, b in zip(got, expected, strict=True):
                for name in b:
                    torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-7)


def within_backward() -> list[tuple[Tensor, Tensor]]:
    """The last layer's gradient: as soon as it is complete, and after backward."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer, plan = torch.optim.SGD(model.parameters(), lr=0.1), Plan.stage(2)
    units = set(model.children()).__contains__
    net = parallelize(model, optimizer, plan, schedule=Overlap(), units=units)
    last, early = model[2].weight, []
    model[1].weight.register_post_accumulate_grad_hook(
        lambda p: early.append(safe_get_full_grad(last))
    )
    pairs = []
    for step in (1, 2):  # which leaves what the first has left
        net.backward(net(torch.full((1, 4), step + 0.5)).square().sum())
        pairs.append((early[-1], safe_get_full_grad(last)))
        net.step()
    return pairs


def test_a_reduction_under_way_is_waited_for(two: Pool) -> None:
    for early, late in two.run(within_backward)[0]:
        assert late.any() and torch.equal(early, late)


NAMES = ("tokens.weight", "blocks.1.up.bias", "blocks.1.down.weight", "norm.weight")


def values(p: Tensor) -> Tensor:
    """Something that bf16 has exactly, all different."""
    return (torch.arange(p.numel()) % 127 / 64 - 1).view(p.shape)


def written(kind: str) -> tuple[Seen, dict[str, Tensor]]:
    """Set gradients, then parameters and states; all else must stay."""
    model, net = build(*KINDS[kind])
    backward(model, net, 0)
    net.step()
    backward(model, net, 1)
    own_grads = trained(model)
    for name in NAMES:
        p = own_grads[name]
        safe_set_full_grad(p, values(p))
        assert torch.equal(safe_get_full_grad(p), values(p))
    rest = [p for name, p in own_grads.items() if name not in NAMES]
    for p in rest:
        safe_set_full_grad(p, 0.5 * safe_get_full_grad(p))
    net.step()
    for name in NAMES:
        p = own_grads[name]
        safe_set_full_fp32_param(p, values(p))
        safe_set_full_optimizer_state(p, values(p) / 8, "exp_avg")
    # the parameters are what their masters are, on every rank
    with zero.GatheredParameters(list(model.parameters())):
        for name in NAMES:
            assert torch.equal(own_grads[name].float(), values(own_grads[name]))
    backward(model, net, 2)
    seen = look(model)
    net.step()
    return seen, net.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_set_is_trained_with(
    two: Pool, references: dict[str, Any], kind: str
) -> None:
    expected = references["0, bf16" if "bf16" in kind else "0"][1]
    for seen, _ in (got := two.run(written, kind)):
        assert same(seen, expected[0])
    weights = got[0][1]
    assert all(torch.equal(weights[n], expected[1][n]) for n in weights)


def late() -> None:
    """A delayed update arrives before anybody looks."""
    model, net = build(2, "cpu", None, "delayed")
    for step in range(3):
        backward(model, net, step)
        net.step()
        full = {n: safe_get_full_fp32_param(p) for n, p in trained(model).items()}
        for name, p in trained(model).items():
            assert torch.equal(p, full[name])
    p = model.norm.weight
    safe_set_full_fp32_param(p, values(p))
    assert torch.equal(p, values(p))
    backward(model, net, 3)
    net.step()
    net.flush()
    assert (p - values(p)).abs().max() < 0.1
    assert not torch.equal(p, values(p))


def test_a_delayed_update_arrives_first(two: Pool) -> None:
    two.run(late)


def scaled() -> None:
    """In fp16 gradients carry the loss scale."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = MixedPrecision(torch.float16, loss_scale=LossScale(512.0))
    net = parallelize(model, optimizer, Plan.stage(2), precision=precision)
    net.backward(net(torch.ones(1, 3)).sum())
    grad = safe_get_full_grad(model.weight)
    assert torch.equal(grad, torch.full((1, 3), precision.loss_scale))
    assert grad.dtype == torch.float32


def test_gradients_carry_the_loss_scale(two: Pool) -> None:
    two.run(scaled)


# when there is nothing to see


def test_gradients_are_there_between_backward_and_step() -> None:
    model, net = build(2, None, None, "")
    p = model.norm.weight
    assert safe_get_full_grad(p) is None
    backward(model, net, 0)
    assert safe_get_full_grad(p) is not None
    net.step()
    assert safe_get_full_grad(p) is None
    with pytest.raises(RuntimeError, match="no gradient of 'norm.weight' to set"):
        safe_set_full_grad(p, torch.zeros_like(p))
    backward(model, net, 1)
    net.zero_grad()
    assert safe_get_full_grad(p) is None


def test_states_are_there_after_the_first_update() -> None:
    model, net = build(2, None, None, "")
    p = model.norm.weight
    with pytest.raises(ValueError, match="no states before the first update"):
        safe_get_full_optimizer_state(p, "exp_avg")
    backward(model, net, 0)
    net.step()
    for key in ("momentum_buffer", "step"):
        with pytest.raises(ValueError, match=f"no '{key}' .* exp_avg, exp_avg_sq"):
            safe_get_full_optimizer_state(p, key)


def test_what_is_refused() -> None:
    model, net = build(3, None, None, "")
    backward(model, net, 0)
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
    with (
        zero.GatheredParameters([p]),
        pytest.raises(RuntimeError, match="'norm.weight' is gathered: write to it"),
    ):
        safe_set_full_fp32_param(p, torch.zeros(12))
    gone = build(0, None, None, "")[0]
    gc.collect()
    with pytest.raises(ValueError, match="belongs to no model"):
        safe_get_full_fp32_param(gone.norm.weight)


# the loader


def test_a_repeating_loader_starts_again() -> None:
    loader = torch.utils.data.DataLoader(list(range(3)), batch_size=2)
    repeating = RepeatingLoader(loader)
    got = [next(repeating).tolist() for _ in range(5)]
    assert got == [[0, 1], [2], [0, 1], [2], [0, 1]]


def test_an_iterator_cannot_be_repeated() -> None:
    repeating = RepeatingLoader(iter([1, 2]))
    assert [next(repeating), next(repeating)] == [1, 2]
    with pytest.raises(RuntimeError, match="list_iterator gives no batch when"):
        next(repeating)
