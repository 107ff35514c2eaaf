"""Models that others bring: trained as plain torch trains them, at every stage.

Most in one process: what can break here breaks without other ranks.
"""

from __future__ import annotations

import copy
import io
import json
import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

import minizero
from minizero import consolidate, parallelize
from minizero.checkpoint import load, save
from minizero.memory.plan import Plan
from minizero.overlap import Overlap
from minizero.precision import MixedPrecision
from minizero.ranks.launch import launch, rank
from minizero.zero import GatheredParameters, Init
from minizero.zero.absent import ZeroParamStatus, is_sharded
from minizero.zero.data_parallel import DataParallel
from minizero.zero.units import assign, find_units, units_of

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
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).to(dtype)


def rows() -> Tensor:
    return torch.tensor([2, 0, 4])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], MakeOptimizer]]
MODELS = {
    "0-dim, Adagrad": (Scaled, draw, partial(torch.optim.Adagrad, lr=0.1)),
    "0-dim, Adam": (Scaled, draw, torch.optim.Adam),
    "buffers": (Strided, draw, sgd),
    "float64": (
        lambda: nn.Linear(3, 2).double(),
        partial(draw, torch.float64),
        torch.optim.Adam,
    ),
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
    return make()


def loss_of(out: Tensor) -> Tensor:
    return out.abs().pow(2).sum()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", MODELS)
def test_as_plain_torch(kind: str, stage: int) -> None:
    """Weights after a step before wrapping, and two after."""
    make, data, make_optimizer = MODELS[kind]
    plain = build(make)
    optimizer = make_optimizer(plain.parameters())
    loss_of(plain(data())).backward()
    optimizer.step()
    optimizer.zero_grad()
    wrapped = copy.deepcopy(plain)
    other = make_optimizer(wrapped.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    net = parallelize(wrapped, other, Plan.stage(stage))
    for _ in range(2):
        loss_of(plain(data())).backward()
        optimizer.step()
        optimizer.zero_grad()
        net.backward(loss_of(net(data())))
        net.step()
    expected, got = plain.state_dict(), net.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["0-dim, Adagrad", "0-dim, Adam"])
def test_a_number_alone_in_its_group_is_saved(
    kind: str, stage: int, tmp_path: Path
) -> None:
    """Its states have no dimension either, and neither has the count of steps."""
    make, data, make_optimizer = MODELS[kind]

    def start(load_it: bool, stage: int) -> DataParallel:
        model = build(make)
        params = [*model.parameters()]
        numbers = [p for p in params if not p.ndim]
        others = [p for p in params if p.ndim]
        optimizer = make_optimizer([{"params": numbers}, {"params": others}])
        if not load_it:  # states from before wrapping
            loss_of(model(data())).backward()
            optimizer.step()
            optimizer.zero_grad()
        net = parallelize(model, optimizer, Plan.stage(stage))
        if load_it:
            load(net, tmp_path)
        return net

    def train(net: DataParallel) -> dict[str, Tensor]:
        net.backward(loss_of(net(data())))
        net.step()
        return net.state_dict()

    net = start(False, stage)
    weights = train(net)
    save(net, tmp_path, "a")
    index = json.loads((tmp_path / "a" / "index.json").read_text())
    assert all([*flat["scalars"]] == ["step"] for flat in index["flats"])
    assert torch.equal(consolidate(tmp_path)["scale"], weights["scale"])
    expected = train(net)
    for other in STAGES:
        got = train(start(True, other))
        assert all(torch.equal(got[name], expected[name]) for name in expected)


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


@pytest.mark.parametrize("stage", [0, 3])
def test_nothing_to_clip(stage: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
    nothing = torch.optim.SGD([{"params": []}], lr=0.1)
    net = parallelize(model, nothing, Plan.stage(stage))
    assert net.clip_grad_norm(1.0) == 0


class Pieces(nn.Module):
    """A block that its parent takes apart; it is called as a whole only `whole`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Parent(nn.Module):
    """Calls the children of its blocks, also out of a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pieces() for _ in range(2))
        self.named = nn.ModuleList([nn.ModuleDict({"one": nn.Linear(3, 3)})])
        self.head = nn.ModuleDict({"head": nn.Linear(3, 3)})
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        for block in self.blocks:
            piecewise = self.turn % 3
            x = x + block.linear(block.norm(x)) if piecewise else block(x)
        return self.head["head"](self.named[0]["one"](x))


def apart(stage: int, **options: Any) -> dict[str, Tensor]:
    model = build(Parent)
    net = parallelize(model, sgd(model.parameters()), Plan.stage(stage), **options)
    for step in range(4):
        out = net(draw() + rank())
        if step == 3:  # and from outside of the model
            out = out + model.blocks[0].linear(out)
        net.backward(loss_of(out))
        net.clip_grad_norm(1.0)
        net.step()
    assert stage < 3 or not any(flat.whole for u in net.units for flat in u.flats)
    return net.state_dict()


def taken_apart() -> bool:
    small = partial(apart, units=lambda m: isinstance(m, nn.Linear | nn.LayerNorm))
    early = Overlap(param_persistence_threshold=0)
    pairs = [(apart(0), apart(3, schedule=early)), (apart(0), apart(3))]
    pairs.append((small(0), small(3)))
    return all(torch.equal(a[k], b[k]) for a, b in pairs for k in a | b)


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_whose_children_are_called(ranks: int) -> None:
    assert all([taken_apart()] if ranks == 1 else launch(taken_apart, ranks))


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


def wrapped() -> tuple[nn.Module, Any]:
    model = build(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    return model, parallelize(model, sgd(model.parameters()), Plan.stage(3))


def test_parameters_tell_savers_what_they_are() -> None:
    """As `maybe_zero_3` and `save_zero_three_model` of many scripts ask."""
    before = build(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    model, net = wrapped()
    assert len({p.ds_id for p in model.parameters()}) == 4
    net(draw())
    for p, expected in zip(model.parameters(), before.parameters(), strict=True):
        assert p.ds_status is ZeroParamStatus.NOT_AVAILABLE
        assert (p.ds_shape, p.ds_numel) == (expected.shape, expected.numel())
        with GatheredParameters([p]):
            assert p.ds_status is ZeroParamStatus.AVAILABLE
            assert torch.equal(p.data.detach().cpu().clone(), expected)


def test_init_lets_a_model_copy_its_layers() -> None:
    """As `nn.TransformerEncoder` does."""

    def make() -> nn.Module:
        layer = nn.Linear(3, 3)
        return nn.Sequential(*(copy.deepcopy(nn.Sequential(layer)) for _ in range(2)))

    expected = build(make).state_dict()
    with Init():
        model = build(make)
    assert is_sharded(model[0][0].weight)
    with GatheredParameters(model.parameters()):
        got = model.state_dict()
        assert all(torch.equal(got[name], expected[name]) for name in expected)


SAVERS: dict[str, Callable[[nn.Module], Any]] = {
    "copied": copy.deepcopy,
    "saved": lambda model: torch.save(model, io.BytesIO()),
    "saved now": lambda model: model.state_dict(),
    "loaded": lambda model: model.load_state_dict(build(Pieces).state_dict()),
}


@pytest.mark.parametrize("done", SAVERS)
def test_absent_parameters_are_not_handed_out(done: str) -> None:
    model, _ = wrapped()
    for part in (model, model[1]):
        with pytest.raises(RuntimeError, match=f"{done}.*zero.GatheredParameters"):
            SAVERS[done](part)


def test_a_gathered_model_is_copied_and_saved() -> None:
    model, net = wrapped()
    file = io.BytesIO()
    with GatheredParameters(model.parameters()):
        expected = model(draw())
        copied = copy.deepcopy(model)
        torch.save(model, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert torch.equal(other(draw()), expected)
        assert not any(hasattr(p, "ds_id") for p in other.parameters())
        loss_of(other(draw())).backward()
    net.backward(loss_of(net(draw())))


def test_units_inside_a_graph_are_refused() -> None:
    model = build(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    whole = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match=r"engine.compile\(\), which compiles unit"):
        parallelize(whole, sgd(model.parameters()), Plan.stage(3))
    model[0].compile(backend="eager")
    with pytest.raises(ValueError, match="0 is compiled already"):
        parallelize(model, sgd(model.parameters()), Plan.stage(3))


@pytest.mark.parametrize("stage", [0, 3])
def test_modules_in_torchscript_are_refused(stage: int) -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="a Linear of the model is a ScriptModule"):
        parallelize(model, sgd(model.parameters()), Plan.stage(stage))


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_of_the_script_see_gradients(stage: int) -> None:
    plain, model = (build(lambda: nn.Linear(3, 2)) for _ in range(2))
    net = parallelize(model, sgd(model.parameters()), Plan.stage(stage))
    for p in (*plain.parameters(), *model.parameters()):
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    seen: list[Tensor] = []
    loss_of(plain(draw())).backward()
    expected = {g.shape: g for g in seen}
    seen.clear()
    net.backward(loss_of(net(draw())))
    assert len(seen) == len(expected) == 2
    assert all(torch.equal(g, expected[g.shape]) for g in seen)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_on_the_meta_device(stage: int) -> None:
    """It gets values where it rests, a unit at a time, as if it had been built here."""

    there: list[int] = []  # elements of parameters, whenever a layer is filled

    class Layer(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            every = [p for p in model.parameters() if not p.is_meta]
            there.append(sum(p.untyped_storage().nbytes() for p in every) // 4)

    def make() -> nn.Module:
        layers = [Layer(8, 8, bias=False), nn.BatchNorm1d(8)]
        return nn.Sequential(*layers, *(Layer(8, 8, bias=False) for _ in range(6)))

    model = nn.Module()
    expected = build(make).state_dict()
    with torch.device("meta"):
        model = make()
    optimizer = sgd(model.parameters())
    torch.manual_seed(3)
    there.clear()
    net = parallelize(model, optimizer, Plan.stage(stage))
    got = net.state_dict()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    # absent ones are one NaN each
    assert there[-1] >= 7 * 64 if stage == 0 else max(there) <= 64 + 8
    net.backward(loss_of(net(torch.randn(4, 8))))
    net.step()


def test_a_model_on_the_meta_device_that_nobody_can_fill() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Scaled(), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"0, a Scaled, .* no reset_parameters\(\)"):
        parallelize(model, sgd(model.parameters()), Plan.stage(3))
    assert all(p.is_meta for p in model.parameters())


def started_in_a_daemon(told: Any) -> None:
    try:
        launch(rank, 2)
    except RuntimeError as error:
        told.put(str(error))


def test_ranks_of_a_daemon() -> None:
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    process = context.Process(target=started_in_a_daemon, args=(told,), daemon=True)
    process.start()
    assert "daemon=False" in told.get()
    process.join()


def test_a_deep_model() -> None:
    """Deeper than Python lets functions call themselves."""
    model: nn.Module = nn.Linear(3, 3)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        for _ in range(3_000):
            model = nn.ModuleDict({"inner": model})
        sys.setrecursionlimit(limit + 3_000)  # one call a level is torch's own
        assert list(find_units(model)) == [""]
        assert [len(named) for named in assign(model, units_of(model)).values()] == [2]
    finally:
        sys.setrecursionlimit(limit)


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
