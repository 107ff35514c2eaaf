"""Models that others bring: trained as plain torch trains them, at every stage.

Most in one process: what can break here breaks without other ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from nasty import same
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

import minizero
from minizero import Plan, parallelize
from minizero.precision import LossScale, MixedPrecision
from minizero.ranks import device
from minizero.zero import GatheredParameters, Init

STAGES = (0, 1, 2, 3)
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
sgd: MakeOptimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Scaled(nn.Module):
    """With a 0-dimensional parameter, as CLIP's logit scale is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.exp()


class Strided(nn.Module):
    """Buffers that are not contiguous, one of them expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = orthogonal(nn.Linear(3, 3))
        self.register_buffer("turned", torch.randn(4, 3).t())
        self.register_buffer("same", torch.ones(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.turned * self.same


def draw(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    return x.to(device(), dtype)


def rows() -> Tensor:
    return torch.tensor([2, 0, 4], device=device())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], MakeOptimizer]]
MODELS = {
    "0-dim, Adagrad": (Scaled, draw, partial(torch.optim.Adagrad, lr=0.1)),
    "0-dim, Adam": (Scaled, draw, torch.optim.Adam),
    "buffers": (Strided, draw, sgd),
    "float64": (lambda: nn.Linear(3, 2).double(), partial(draw, torch.float64), sgd),
    "complex": (
        lambda: nn.Linear(3, 2, dtype=torch.complex64),
        partial(draw, torch.complex64),
        sgd,
    ),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)),
        rows,
        partial(torch.optim.SGD, lr=0.1),
    ),
}


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().to(device())


def loss_of(out: Tensor) -> Tensor:
    return out.abs().pow(2).sum()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", MODELS)
def test_as_plain_torch(kind: str, stage: int) -> None:
    make, data, make_optimizer = MODELS[kind]
    plain, wrapped = build(make), build(make)
    optimizer = make_optimizer(plain.parameters())
    net = parallelize(wrapped, make_optimizer(wrapped.parameters()), Plan.stage(stage))
    for _ in range(2):
        loss_of(plain(data())).backward()
        optimizer.step()
        optimizer.zero_grad()
        net.backward(loss_of(net(data())))
        net.step()
    assert same(net.state_dict(), plain.state_dict())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["float64", "complex"])
def test_clipping_in_any_precision(kind: str, stage: int) -> None:
    make, data, make_optimizer = MODELS[kind]
    plain, model = build(make), build(make)
    loss_of(plain(data())).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    net = parallelize(model, make_optimizer(model.parameters()), Plan.stage(stage))
    net.backward(loss_of(net(data())))
    got = net.clip_grad_norm(0.1)
    assert got.dtype == norm.dtype
    torch.testing.assert_close(got, norm)
    torch.testing.assert_close(net.grad_norm(), norm * 0.1 / (norm + 1e-6))


def test_complex_parameters_stay_complex_in_mixed_precision() -> None:
    make, data, make_optimizer = MODELS["complex"]
    model = build(make)
    optimizer = make_optimizer(model.parameters())
    precision = MixedPrecision(loss_scale=LossScale())  # which looks for overflow
    net = parallelize(model, optimizer, Plan.stage(2), precision=precision)
    net.backward(loss_of(net(data())))
    assert net.step()
    assert (net.state_dict()["weight"] - build(make).weight).imag.all()


def test_a_script_says_what_its_units_are() -> None:
    def names(policy: Any) -> list[str]:
        engine, *_ = minizero.initialize(
            model=nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}),
            units=policy,
            config={"train_batch_size": 1, "zero_optimization": {"stage": 3}},
        )
        return [unit.name for unit in engine.net.units]

    assert names(None) == ["root"]
    assert names(lambda module: isinstance(module, nn.Linear)) == ["root", "a", "b"]


def test_init_lets_a_model_copy_its_layers() -> None:
    """As `nn.TransformerEncoder` does."""

    def make() -> nn.Module:
        layer = nn.Linear(3, 3)
        return nn.Sequential(*(copy.deepcopy(nn.Sequential(layer)) for _ in range(2)))

    expected = build(make).state_dict()
    torch.manual_seed(3)
    with Init():
        model = make()
    assert model[0][0].weight.isnan().all()
    with GatheredParameters(model.parameters()):
        assert same(model.state_dict(), expected)


class Positions(nn.Module):
    """Frequencies as a rotary embedding has them: a module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.frequencies.to(x.dtype)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_in_16_bit(dtype: torch.dtype, stage: int) -> None:
    """Its kernels take running means of the weights' dtype only."""
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Positions(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = MixedPrecision(dtype)
    net = parallelize(model, optimizer, Plan.stage(stage), precision=precision)
    net.backward(net(torch.randn(2, 3, 4, 4)).float().sum())
    net.step()
    found = net.state_dict()
    assert found["1.running_mean"].dtype == dtype and found["1.running_mean"].any()
    assert found["2.frequencies"].dtype == torch.float32
