"""ZeRO-3 at its edges: absent parameters, Init, GatheredParameters, odd forwards."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minizero import comm, parallelize, zero
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.memory.plan import Plan
from minizero.memory.tracker import Tracker
from minizero.ranks.launch import Pool, RankError, rank
from minizero.zero.absent import is_sharded

CONFIG = GPTConfig(layers=4, hidden=32, heads=2, sequence=16, vocabulary=40)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def tokens(rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(rank())
    return torch.randint(40, (rows, 16), generator=generator)


def weights(stage: int, inside: bool, steps: int = 2) -> tuple[dict[str, Tensor], int]:
    """Weights after training, and the peak of the parameters' bytes."""
    torch.manual_seed(3)
    gc.collect()  # models of tests before, which hang in reference cycles
    with Tracker() as tracker:
        if inside:
            with zero.Init():
                model = GPT(CONFIG)
        else:
            model = GPT(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters())
        net = parallelize(model, optimizer, Plan.stage(stage))
        built = tracker.peaks["parameters"]
        for _ in range(steps):
            net.backward(net(tokens(), tokens()))
            net.step()
    return net.state_dict(), built


def test_init_gives_the_same_model_without_holding_it(pool: Pool) -> None:
    plain = pool.run(weights, 0, False)
    inside = pool.run(weights, 3, True)
    for name, weight in plain[0][0].items():
        assert torch.equal(weight, inside[0][0][name]), name
    model = GPT(CONFIG)
    whole = sum(4 * p.numel() for p in model.parameters())
    block = sum(4 * p.numel() for p in model.blocks[0].parameters())
    for _, peak in inside:
        # the shards, one block, and the largest matrix of one
        assert peak < whole / 2 + 1.5 * block


class Fussy(nn.Module):
    """Initialises again, from outside, what has been sharded already."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.free = nn.Parameter(torch.randn(5))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.3)
        with torch.no_grad():
            self.layers[1].bias.fill_(2.0)
        nn.init.zeros_(self.layers[2].weight[1])  # as a padding token's row
        bias = self.layers[0].bias
        with zero.GatheredParameters(bias, modifier_rank=0), torch.no_grad():
            bias[2:].fill_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum() + self.free.sum()


def fussy(inside: bool) -> dict[str, Tensor]:
    torch.manual_seed(5)
    if inside:
        with zero.Init():
            model = Fussy()
    else:
        model = Fussy()
    return parallelize(model, sgd(model)).state_dict()


def test_init_lets_a_model_initialise_itself_again(pool: Pool) -> None:
    plain, inside = pool.run(fussy, False)[0], pool.run(fussy, True)[0]
    assert plain.keys() == inside.keys()
    for name, weight in plain.items():
        assert torch.equal(weight, inside[name]), name


class Outermost(nn.Linear):
    """Part of nothing, with a parameter of its own beside those of another."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.inner = nn.Linear(3, 2)


def outermost() -> list[bool]:
    with zero.Init(), zero.Init():
        model = Outermost()
        dropped = [nn.Linear(2, 2)]
        dropped.append(dropped)  # a cycle, which only a collection frees
        del dropped
        whole = not bool(model.weight.isnan().any())
    with pytest.raises(KeyError), zero.Init():
        failed = nn.Linear(2, 2)
        raise KeyError
    absent = [bool(p.isnan().all()) for p in model.parameters()]
    return [whole, *absent, is_sharded(failed.weight)]


def test_init_shards_the_outermost_module_at_its_end(pool: Pool) -> None:
    assert pool.run(outermost) == [[True, *[True] * 4, False]] * 2


def wrapped_inside() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(5)
    with zero.Init():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        with zero.GatheredParameters(model.parameters()):
            expected = {k: v.clone() for k, v in model.state_dict().items()}
        net = parallelize(model, sgd(model))
    return expected, net.state_dict()


def test_a_model_may_be_wrapped_before_the_end_of_init(pool: Pool) -> None:
    expected, got = pool.run(wrapped_inside)[0]
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def below_stage_3() -> tuple[bool, str]:
    with zero.Init(config={"zero_optimization": {"stage": 2}}):
        model = nn.Sequential(nn.Linear(3, 3))
    whole = not bool(model[0].weight.isnan().any())
    with zero.Init():
        sharded = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ValueError) as error:
        parallelize(sharded, sgd(sharded), Plan.stage(1))
    return whole, str(error.value)


def test_init_and_other_stages(pool: Pool) -> None:
    whole, message = pool.run(below_stage_3)[0]
    assert whole
    assert "built inside zero.Init" in message


def absent() -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 3))
    parallelize(model, sgd(model))
    weight = model[0].weight
    other = nn.Parameter(weight.data)  # as torch.nn.utils.weight_norm does
    assert isinstance(other, nn.Parameter) and other.isnan().all()
    with pytest.raises(RuntimeError, match="'0.weight' is sharded.*GatheredParam"):
        nn.Parameter(weight)
    return [tuple(weight.shape), bool(weight.isnan().all())]


def test_absent_parameters_keep_their_shape_and_read_as_nan(pool: Pool) -> None:
    assert pool.run(absent) == [[(3, 4), True]] * 2


def written() -> list[str]:
    model = nn.Sequential(nn.Linear(4, 1))
    net = parallelize(model, sgd(model))
    [weight, bias] = model.parameters()
    told = []
    for write in (
        lambda: weight.add_(1),
        lambda: nn.init.zeros_(weight),
        lambda: weight.data.copy_(torch.ones(1, 4)),
        lambda: weight.__setitem__(0, 1.0),
        lambda: bias.__imul__(2.0),
        # of one element: torch would let these pass
        lambda: bias.data.clamp_(0, 1),
        lambda: torch.add(torch.ones(1), 1, out=bias.data),
        lambda: torch._foreach_add_([bias.data], 1.0),
        lambda: bias.data.numpy().fill(1),
        lambda: bias.detach().fill_(0.0),
        # torch's own ways to give it other values
        lambda: setattr(bias, "data", torch.ones(1)),
        lambda: nn.utils.vector_to_parameters(torch.ones(5), [bias, weight]),
        model.double,
    ):
        with pytest.raises(RuntimeError) as error, torch.no_grad():
            write()
        told.append(str(error.value))
    model.to("cpu").float()  # where it is, and what it is, already
    with zero.GatheredParameters([bias], modifier_rank=0):
        bias.data.fill_(7.0)
    Tensor.detach(bias).fill_(0.0)
    with pytest.raises(RuntimeError, match="'0.bias' was written to while absent"):
        net(torch.zeros(1, 4))
    assert torch.equal(net(torch.zeros(1, 4)), torch.full((1, 1), 7.0))
    return told


def test_writes_to_absent_parameters_are_refused(pool: Pool) -> None:
    """Where they are made, in a sentence; the values stay as they were."""
    names = ["0.weight"] * 4 + ["0.bias"] * 8 + ["0.weight"]
    for name, message in zip(names, pool.run(written)[0], strict=True):
        assert f"would write to parameter {name!r}" in message
        assert "zero.GatheredParameters([p], modifier_rank=0)" in message


def set_weights(modifier: int | None) -> list[Any]:
    torch.manual_seed(rank())
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    net = parallelize(model, sgd(model))
    weight = model[0].weight
    with zero.GatheredParameters(weight, modifier_rank=modifier):
        with torch.no_grad():
            weight.fill_(rank() + 1)
    with zero.GatheredParameters([weight]):
        inside = weight.detach().clone()
        with zero.GatheredParameters(weight):
            pass
        assert not weight.isnan().any()  # an inner block leaves it whole
    assert weight.isnan().all()
    del net
    return [inside]


def test_gathered_parameters(pool: Pool) -> None:
    a, b = pool.run(set_weights, 1)
    assert torch.equal(a[0], torch.full((3, 4), 2.0)) and torch.equal(a[0], b[0])
    a, b = pool.run(set_weights, None)
    assert torch.equal(a[0], b[0]) and not (a[0] == 1).any()


def bad_modifier() -> str:
    with pytest.raises(ValueError) as error:
        with zero.GatheredParameters([], modifier_rank=9):
            pass
    return str(error.value)


def test_modifier_rank_must_exist(pool: Pool) -> None:
    assert "below 2, not 9" in pool.run(bad_modifier)[0]


def evaluate(mode: str) -> tuple[Tensor, Tensor, int]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    plain = model(tokens()).detach()
    net = parallelize(model, sgd(model))
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with context(), comm.ledger() as calls:
        out = net(tokens()).clone()
    net.backward(net(tokens(), tokens()))  # training goes on afterwards
    net.step()
    assert all(not flat.is_unsharded for unit in net.units for flat in unit.flats)
    return plain, out, len(calls)


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_evaluation(pool: Pool, mode: str) -> None:
    for plain, out, calls in pool.run(evaluate, mode):
        assert torch.equal(plain, out)
        assert calls == CONFIG.layers + 1


class Odd(nn.Module):
    """Blocks in ways that break hooks; `how` picks one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Piece() for _ in range(3)])
        if how == "frozen first":
            self.first.requires_grad_(False)
            self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x, (a, b, c) = self.first(x), self.blocks
        if self.how == "twice":
            return c(a(b(a(x)["out"])["out"])["out"])["out"].sum()
        if self.how == "in parallel":
            return (a(x)["out"] + a(2 * x)["out"] + b(x, scale=x)["out"]).sum()
        if self.how == "reentrant":
            x = checkpoint(lambda t: a(t)["out"], x, use_reentrant=True)
        elif self.how == "segments":
            x = checkpoint(lambda t: b(a(t)["out"])["out"], x, use_reentrant=False)
        elif self.how == "output unused":
            c(x)
            x = a(x)["out"]
        elif self.how == "part of the output":
            x = a(x)["twice"]
        else:
            x = a(x)["out"]
        return b(x)["out"].square().sum()


class Piece(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        y = torch.tanh(self.linear(x))
        y = y if scale is None else y * scale
        return {"out": y, "twice": 2 * y}


def odd(how: str, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Odd(how)
    net = parallelize(model, sgd(model), Plan.stage(stage))
    generator = torch.Generator().manual_seed(rank())
    for _ in range(3):
        net.backward(net(torch.randn(4, 6, generator=generator)))
        if stage == 3:
            assert all(not flat.is_unsharded for unit in net.units for flat in unit.flats)
        net.step()
    return net.state_dict()


HOW = [
    "plain",
    "twice",
    "in parallel",
    "reentrant",
    "segments",
    "output unused",
    "part of the output",
    "frozen first",
]


@pytest.mark.parametrize("how", HOW)
def test_odd_forwards(pool: Pool, how: str) -> None:
    reference, got = pool.run(odd, how, 0)[0], pool.run(odd, how, 3)[0]
    for name, weight in reference.items():
        assert torch.equal(weight, got[name]), name


def several_forwards(stage: int) -> dict[str, Tensor]:
    """Two forwards before one backward, two backwards before one step."""
    torch.manual_seed(1)
    model = Odd("plain")
    net = parallelize(model, sgd(model), Plan.stage(stage))
    generator = torch.Generator().manual_seed(rank())
    x = torch.randn(3, 4, 6, generator=generator)
    net.backward(net(x[0]) + net(x[1]))
    net.backward(net(x[2]))
    net.step()
    return net.state_dict()


def test_several_forwards(pool: Pool) -> None:
    reference = pool.run(several_forwards, 0)[0]
    for stage in (1, 2, 3):
        got = pool.run(several_forwards, stage)[0]
        assert all(torch.equal(reference[name], got[name]) for name in got)


def failing_forward() -> bool:
    torch.manual_seed(1)
    model = Odd("plain")
    net = parallelize(model, sgd(model))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.randn(4, 5))
    net.backward(net(torch.randn(4, 6)))
    net.step()
    return all(not flat.is_unsharded for unit in net.units for flat in unit.flats)


def test_a_healthy_step_after_a_failed_forward(pool: Pool) -> None:
    assert pool.run(failing_forward) == [True, True]


def wrong_backward() -> list[str]:
    messages = []
    for stage in (0, 3):
        model = Odd("plain")
        net = parallelize(model, sgd(model), Plan.stage(stage))
        net.backward(net(torch.randn(4, 6)))  # which is reduced at once
        with pytest.raises(RuntimeError) as error:
            net(torch.randn(4, 6)).backward()
        messages.append(str(error.value))
        net(torch.randn(4, 6)).backward()  # the step has begun anew
        assert net.step()
    with pytest.raises(RuntimeError) as error:
        net.no_sync()
    return [*messages, str(error.value)]


def test_misuse_is_told(pool: Pool) -> None:
    zero0, zero3, no_sync = pool.run(wrong_backward)[0]
    gone = "call backward(loss); the gradients of this step are gone"
    assert gone in zero0 and gone in zero3
    assert "every micro-batch is reduced" in no_sync


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{stage 3}", "the config is not JSON: line 1, column 2: Expecting"),
        ("[3]", "a config is an object in braces, not a list"),
        ({"zero_optimization": 3}, "is an object in braces, not 3"),
        ({"zero_optimization": {"stage": "3"}}, "stage must be 0, 1, 2 or 3, not '3'"),
    ],
)
def test_a_config_of_init_that_is_none(config, message, tmp_path):
    if config == "[3]":
        (tmp_path / "config.json").write_text(config)
        config = tmp_path / "config.json"
    with pytest.raises((TypeError, ValueError), match=message):
        zero.Init(config)


def kept_views() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    net = parallelize(model, sgd(model), Plan.stage(3))
    p = model[0].weight
    out = net(torch.randn(4, 6)).sum()
    with zero.GatheredParameters([p], modifier_rank=0):
        values = p.detach().clone()
        kept = [p.data.cpu(), p.data, p.detach(), p[0], copy.deepcopy(p)]
    net.backward(out)
    net.step()
    for seen in kept:
        assert torch.equal(seen, values if seen.ndim == 2 else values[0])
    with zero.GatheredParameters([p]):
        assert not torch.equal(p, values)
    flats = [flat for unit in net.units for flat in unit.flats]
    assert p.isnan().all() and not any(f.full.untyped_storage() for f in flats)


def test_views_outlive_the_block_that_gathered(pool: Pool) -> None:
    """On a CPU `.cpu()` copies nothing, and what is freed cannot be read."""
    pool.run(kept_views)


class Keeps(nn.Module):
    """Leaves views of its weight on itself, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.linear.weight
        self.row, self.cut = weight[1], weight.detach()
        return torch.tanh(self.linear(x)), weight[2:4]


def penalised(stage: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    blocks = nn.ModuleList(Keeps() for _ in range(3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: Tensor) -> Tensor:
            rows = []
            for block in self.blocks:
                x, some = block(x)
                rows.append(some.square().sum())
            return x.sum() + torch.stack(rows).sum()

    model = Model()
    net = parallelize(model, sgd(model), Plan.stage(stage))
    for _ in range(2):
        loss = net(torch.ones(2, 6))
        for block in blocks:
            loss = loss + block.row.square().sum() + block.cut.sum()
        net.backward(loss)
        assert all(block.cut.isfinite().all() for block in blocks)
        net.step()
    return net.state_dict()


def test_views_outlive_the_forward_that_kept_them(pool: Pool) -> None:
    """What is read after a release has memory still, and the values that it had."""
    expected, got = pool.run(penalised, 0)[0], pool.run(penalised, 3)[0]
    for name, weight in expected.items():
        assert torch.equal(weight, got[name]), name


class Experts(nn.Module):
    """Each rank calls another of two units that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[rank()](x).sum()


def other_units(algorithm: str) -> None:
    model = Experts()
    with comm.algorithm(algorithm):
        net = parallelize(model, sgd(model))
        net.backward(net(torch.ones(1, 4)))
        net.step()


def test_units_of_one_size_are_not_mixed() -> None:
    """Tags tell them apart; where there are none, ranks compare what they called."""
    with Pool(2) as pool, pytest.raises(RankError, match="same collectives"):
        pool.run(other_units, "backend")
    with Pool(2) as pool, pytest.raises(RankError) as error:
        pool.run(other_units, "direct")
    assert "out of step" in str(error.value)
    assert "experts.0" in str(error.value) and "experts.1" in str(error.value)
