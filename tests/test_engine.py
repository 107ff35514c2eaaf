"""The engine: a config and a model become what `parallelize` makes by hand."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nasty
import pytest
import torch
from conftest import Run as Tool
from ds_example import EXAMPLE
from nasty import Nasty, Run, batches, own, same, train
from torch import Tensor, nn

import minizero
from minizero import Delayed, Plan
from minizero.offload import Offload
from minizero.overlap import Overlap
from minizero.ranks.launch import Pool, rank

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def config(stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 100}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        **more,
        "zero_optimization": zero | more.get("zero_optimization", {}),
    }


def start(stage: int, accumulation: int = 1, **more: Any) -> minizero.Engine:
    """An engine for the nasty model, with AdamW over two groups."""
    torch.manual_seed(rank())
    model = Nasty()
    engine, *_ = minizero.initialize(
        model=model,
        model_parameters=nasty.groups(model),
        optimizer=nasty.adamw,
        config=config(stage, accumulation, **more),
    )
    return engine


def feed(engine: minizero.Engine, x: Tensor, y: Tensor) -> Tensor:
    loss = engine(own(x, 2), own(y, 2))
    engine.backward(loss)
    engine.step()
    return loss.detach()


def trained(stage: int, accumulation: int = 1, steps: int = 6, **more: Any) -> Run:
    engine = start(stage, accumulation, **more)
    losses, norms = [], []
    for x, y in batches(steps, accumulation, rows=2):
        engine.module.step = engine.global_steps
        losses.append(feed(engine, x, y))
        if engine.was_step_applied():
            norms.append(torch.tensor(engine.get_global_grad_norm()))
    weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
    return Run(torch.stack(losses), torch.stack(norms), weights)


def on_rank_0(runs: list[Run]) -> list[Run]:
    """Where parameters are sharded, the others have no weights."""
    return [Run(r.losses, r.norms, runs[0].weights) for r in runs]


def equal(runs: list[Run], others: list[Run]) -> bool:
    return same(on_rank_0(runs), on_rank_0(others))


@pytest.mark.parametrize("stage", STAGES)
def test_a_config_is_as_parallelize_by_hand(four: Pool, stage: int) -> None:
    by_hand = four.run(train, stage, steps=6, bucket_size=100)
    assert equal(four.run(trained, stage), by_hand)


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation(four: Pool, stage: int) -> None:
    """Stages 0 and 1 reduce at the boundary, 2 and 3 each micro-batch."""
    by_hand = four.run(train, stage, micro_batches=3, postpone=stage < 2, steps=6)
    assert equal(four.run(trained, stage, 3), by_hand)


def late() -> Run:
    """By hand, with the update of each step beside the next one."""
    plan = Plan.stage(2, offload_optimizer="cpu")
    return train(plan, steps=6, home=Delayed(plan))


def test_a_key_delays_the_update(two: Pool) -> None:
    on_host = {"device": "cpu", "delayed_update": True}
    zero = {"offload_optimizer": on_host}
    runs = two.run(trained, 2, zero_optimization=zero)
    assert equal(runs, two.run(late))
    assert not equal(runs, two.run(trained, 2))


def example() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Nasty()
    engine, optimizer, _, _ = minizero.initialize(
        model=model,
        config={**EXAMPLE, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}},
    )
    [(x, y)] = batches(1, 1, rows=4)
    losses = []
    for _ in range(16 * 6):
        loss = engine(own(x, 4), own(y, 4))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    home, schedule = engine.net.home, engine.net.schedule
    assert isinstance(home, Offload) and isinstance(schedule, Overlap)
    assert {p.on for p in (home.plan.parameters, home.plan.optimizer)} == {"cpu"}
    assert schedule.prefetch_bucket_size == 500_000_000
    assert schedule.param_persistence_threshold == 1_000_000
    return {
        "losses": losses,
        "scale": optimizer.loss_scale,
        "steps": (engine.global_steps, engine.micro_steps, engine.global_samples),
        "skipped": engine.skipped_steps,
        "micro": engine.train_micro_batch_size_per_gpu(),
        "dtype": engine.net.units[0].flats[0].full.dtype,
    }


def test_the_example_config_trains(four: Pool) -> None:
    got = four.run(example)[0]
    assert got["steps"] == (6, 96, 6 * 256)
    assert got["micro"] == 4 and got["dtype"] == torch.float16
    # the first overflow is forgiven (hysteresis 2), the second halves
    assert got["scale"] == 2.0 ** (17 - max(1, got["skipped"]))
    assert got["skipped"] < 3
    assert got["losses"][-1] < 0.8 * got["losses"][0]


def by_config(options: dict[str, Any] | None) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    model = Nasty()
    params = {"lr": 0.02, "betas": [0.8, 0.9], "weight_decay": 0.1}
    named = {} if options else {"optimizer": {"type": "AdamW", "params": params}}
    engine, optimizer, _, _ = minizero.initialize(
        model=model,
        optimizer=options and torch.optim.AdamW(model.parameters(), **options),
        config=config(2, **named),
    )
    for x, y in batches(3, 1, rows=2):
        feed(engine, x, y)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return engine.module_state_dict(), (engine.get_lr(), engine.get_mom())


def test_the_config_makes_the_optimizer(two: Pool) -> None:
    weights, said = two.run(by_config, None)[0]
    client = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.1, "fused": True}
    expected, _ = two.run(by_config, client)[0]
    assert all(torch.equal(weights[k], expected[k]) for k in expected)
    assert said == ([0.02], [(0.8, 0.9)])


def test_groups(two: Pool) -> None:
    def run() -> tuple[list[float], list[Any]]:
        model = Nasty()
        engine, optimizer, _, _ = minizero.initialize(
            model=model,
            model_parameters=nasty.groups(model),
            config=config(
                3, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
            ),
        )
        decay = [group["weight_decay"] for group in optimizer.param_groups]
        assert decay == [0.1, 0.0]
        return engine.get_lr(), engine.get_mom()

    assert two.run(run) == [([0.1, 3e-3], [0.9, 0.9])] * 2


def counted(stage: int) -> list[Any]:
    engine = start(stage, 3)
    seen = []
    x, y = batches(1, 1, rows=2)[0]
    for _ in range(7):
        boundary = engine.is_gradient_accumulation_boundary()
        loss = engine(own(x, 2), own(y, 2))
        assert torch.equal(engine.backward(loss), loss.detach() / 3)
        engine.step()
        seen.append(
            (
                boundary,
                engine.was_step_applied(),
                engine.micro_steps,
                engine.global_steps,
                engine.global_samples,
            )
        )
    return seen


@pytest.mark.parametrize("stage", [0, 3])
def test_counters(two: Pool, stage: int) -> None:
    assert two.run(counted, stage)[1] == [
        (False, False, 1, 0, 0),
        (False, False, 2, 0, 0),
        (True, True, 3, 1, 12),
        (False, False, 4, 1, 12),
        (False, False, 5, 1, 12),
        (True, True, 6, 2, 24),
        (False, False, 7, 2, 24),
    ]


def own_boundaries(stage: int) -> dict[str, Tensor]:
    engine = start(stage, 3)
    data = batches(2, 3, rows=2)
    for i, (x, y) in enumerate(data):
        engine.module.step = i // 3
        engine.set_gradient_accumulation_boundary(i % 3 == 2)
        engine.backward(engine(own(x, 2), own(y, 2)))
        if i % 3 == 2:
            engine.step()
    assert engine.global_steps == 2
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_script_may_say_where_the_boundary_is(two: Pool, stage: int) -> None:
    got = two.run(own_boundaries, stage)[0]
    expected = two.run(trained, stage, 3, steps=2)[0].weights
    assert all(torch.equal(got[k], expected[k]) for k in expected)


def unsynced(stage: int) -> dict[str, Tensor]:
    engine = start(stage, 1)
    for i, (x, y) in enumerate(batches(3, 2, rows=2)):
        engine.module.step = i // 2
        with engine.no_sync() if i % 2 == 0 else contextlib.nullcontext():
            engine.backward(engine(own(x, 2), own(y, 2)) / 2)
        if i % 2:
            engine.step()
    with pytest.raises(RuntimeError, match="step.. inside no_sync"):
        with engine.no_sync():
            engine.step()
    with pytest.raises(RuntimeError, match="leave one out"):
        with engine.no_sync(), engine.no_sync():
            pass
    with engine.no_sync():  # and it works again
        pass
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync(two: Pool, stage: int) -> None:
    got = two.run(unsynced, stage)[0]
    expected = two.run(trained, stage, 2, steps=3)[0].weights
    assert all(torch.equal(got[k], expected[k]) for k in expected)


def test_no_sync_is_refused_where_gradients_are_sharded(two: Pool) -> None:
    def run(stage: int) -> str:
        with pytest.raises(RuntimeError) as error, start(stage).no_sync():
            pass
        return str(error.value)

    for stage in (2, 3):
        assert "stage 0 or 1" in two.run(run, stage)[0]


def odd(what: str, stage: int, **more: Any) -> Run:
    """Steps that are no forward, backward, step, one after the other."""
    engine = start(stage, **more)
    losses = []
    data = batches(4, 2, rows=2)
    for i in range(4):
        engine.module.step = i
        (x, y), (u, v) = data[2 * i : 2 * i + 2]
        first = partial(engine, own(x, 2), own(y, 2))
        second = partial(engine, own(u, 2), own(v, 2))
        if what == "two forwards, one backward":
            loss = first() + second()
            engine.backward(loss)
        elif what == "one forward, two backwards":
            loss = first()
            engine.backward(loss, retain_graph=True)
            engine.backward(loss * loss)
        elif what == "two forwards, two backwards":
            loss, other = first(), second()
            engine.backward(loss)
            engine.backward(other)
        elif what == "a loss nobody wants":
            first()
            loss = second()
            engine.backward(loss)
        else:
            loss = first()
            engine.backward(loss)
            engine.eval()
            with torch.no_grad():
                engine(own(u, 2), own(v, 2))
                engine.module(own(u, 2), own(v, 2))
            engine.train()
            engine.backward(second())
        engine.step()
        losses.append(loss.detach())
    norm = torch.tensor(engine.get_global_grad_norm())
    return Run(torch.stack(losses), norm, engine.module_state_dict())


ODD = (
    "two forwards, one backward",
    "one forward, two backwards",
    "two forwards, two backwards",
    "a loss nobody wants",
    "an evaluation between backwards",
)


@pytest.mark.parametrize("what", ODD)
def test_odd_orders(two: Pool, what: str) -> None:
    reference = two.run(odd, what, 0)
    for stage in (1, 2, 3):
        assert equal(two.run(odd, what, stage), reference), f"stage {stage}"
    late = two.run(odd, what, 3, zero_optimization={"overlap_comm": False})
    assert equal(late, reference)


class Fault(Exception):
    pass


def raise_fault(*_: Any) -> None:
    raise Fault


def fails_in_forward(engine: minizero.Engine, x: Tensor, y: Tensor) -> None:
    handle = engine.module.blocks[2].up.register_forward_pre_hook(raise_fault)
    with pytest.raises(Fault):
        engine(own(x, 2), own(y, 2))
    handle.remove()


def fails_in_backward(engine: minizero.Engine, x: Tensor, y: Tensor) -> None:
    def spoil(_: Any, args: Any, out: Tensor) -> None:
        out.register_hook(raise_fault)

    handle = engine.module.blocks[0].up.register_forward_hook(spoil)
    loss = engine(own(x, 2), own(y, 2))
    handle.remove()
    with pytest.raises(Fault):
        engine.backward(loss)


def interrupted(
    fail: Callable[..., None] | None, stage: int, stepping: bool = False
) -> Run:
    """Accumulates two micro-batches; the second of step 2 fails once."""
    engine = start(stage, 2)
    losses, norms = [], []
    data = batches(4, 2, rows=2)
    for i, (x, y) in enumerate(data):
        engine.module.step = engine.global_steps
        if fail and i == 3:
            fail(engine, x, y)
            if fail is fails_in_backward:
                # the first micro-batch of the step is gone as well
                if stepping:
                    engine.step()
                    assert not engine.was_step_applied()
                feed(engine, *data[2])
        losses.append(feed(engine, x, y))
        if engine.was_step_applied():
            norms.append(torch.tensor(engine.get_global_grad_norm()))
    assert (engine.global_steps, engine.micro_steps) == (4, 8)
    weights = engine.module_state_dict()
    return Run(torch.stack(losses), torch.stack(norms), weights)


@pytest.mark.parametrize("stage", STAGES)
def test_a_healthy_step_after_an_exception(two: Pool, stage: int) -> None:
    reference = two.run(interrupted, None, stage)
    assert equal(two.run(interrupted, fails_in_forward, stage), reference)
    assert equal(two.run(interrupted, fails_in_backward, stage), reference)
    stepping = two.run(interrupted, fails_in_backward, stage, stepping=True)
    assert equal(stepping, reference)


def test_a_step_without_a_gradient(two: Pool) -> None:
    def run(stage: int) -> tuple[Any, ...]:
        engine = start(stage)
        feed(engine, *batches(1, 1, rows=2)[0])
        before = {k: v.clone() for k, v in engine.module_state_dict().items()}
        engine.step()
        after = engine.module_state_dict()
        still = all(torch.equal(after[k], before[k]) for k in after)
        return still, engine.was_step_applied(), engine.micro_steps, engine.global_steps

    for stage in STAGES:
        assert two.run(run, stage) == [(True, False, 2, 2)] * 2


def together(stage: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two engines take turns, as an actor and a critic do."""
    first, second = start(stage), start(stage)
    losses = []
    for i, (x, y) in enumerate(batches(4, 1, rows=2)):
        first.module.step = second.module.step = i
        loss, other = (e(own(x, 2), own(y, 2)) for e in (first, second))
        first.backward(loss)
        second.backward(2 * other)
        first.step()
        second.step()
        losses.append(loss.detach())
    return losses, first.module_state_dict()


def test_two_engines(two: Pool) -> None:
    expected = two.run(trained, 3, steps=4)[0]
    losses, weights = two.run(together, 3)[0]
    assert torch.equal(torch.stack(losses), expected.losses)
    assert all(torch.equal(weights[k], v) for k, v in expected.weights.items())


def refused_losses() -> list[str]:
    engine = start(2)
    x, y = batches(1, 1, rows=2)[0]
    loss = engine(own(x, 2), own(y, 2))
    bad: list[Any] = [1.0, torch.ones(2, requires_grad=True), loss.detach()]
    said = []
    for value in bad:
        with pytest.raises((TypeError, ValueError)) as error:
            engine.backward(value)
        said.append(str(error.value))
    return said


def test_bad_losses(two: Pool) -> None:
    kind, shape, detached = two.run(refused_losses)[0]
    assert kind.endswith("not a float")
    assert "shape (2,); take its mean or sum" in shape
    assert "requires no gradient" in detached


# schedules


def quiet(how: str, stage: int) -> list[float]:
    """As `rates`; torch warns if updates do not come before the schedule."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return rates(how, stage)


def rates(how: str, stage: int) -> list[float]:
    """The rate of each update of a client's StepLR, however it was made."""
    torch.manual_seed(0)
    model = Nasty()
    make = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = {"own": make(inner), "factory": make}.get(how)
    engine, optimizer, _, scheduler = minizero.initialize(
        model=model, optimizer=inner, lr_scheduler=before, config=config(stage)
    )
    assert scheduler is before or how == "factory"
    by_hand = make(optimizer) if how == "returned" else None
    seen = []
    for x, y in batches(6, 1, rows=2):
        seen.append(engine.get_lr()[0])
        feed(engine, x, y)
        if by_hand:
            by_hand.step()
    return seen


@pytest.mark.parametrize("how", ["own", "factory", "returned"])
def test_schedulers_of_torch(two: Pool, how: str) -> None:
    halved = [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    for stage in (0, 3):
        assert two.run(quiet, how, stage)[0] == pytest.approx(halved)


def test_the_config_makes_the_scheduler(two: Pool) -> None:
    def run() -> list[float]:
        params = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.4, "warmup_num_steps": 4}
        engine = start(
            1,
            scheduler={
                "type": "WarmupLR",
                "params": {**params, "warmup_type": "linear"},
            },
        )
        seen = []
        for x, y in batches(6, 1, rows=2):
            seen.append(engine.get_lr()[0])
            feed(engine, x, y)
        return seen

    # the first step of the schedule gives the first rate again
    expected = [0.0, 0.0, 0.1, 0.2, 0.3, 0.4]
    assert two.run(run)[0] == pytest.approx(expected)


def overflowing(stage: int) -> dict[str, Any]:
    engine = start(
        stage,
        fp16={"enabled": True, "initial_scale_power": 10, "hysteresis": 1},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    )
    seen: dict[str, Any] = {"scales": [], "applied": [], "norms": [], "rates": []}
    for i, (x, y) in enumerate(batches(5, 1, rows=2)):
        loss = engine(own(x, 2), own(y, 2))
        if i in (1, 2) and rank() == 1:
            loss = loss * torch.inf
        engine.backward(loss)
        engine.step()
        seen["scales"].append(engine.optimizer.loss_scale)
        seen["applied"].append(engine.was_step_applied())
        seen["norms"].append(engine.get_global_grad_norm())
        seen["rates"].append(engine.get_lr()[0])
    seen["steps"] = engine.global_steps, engine.skipped_steps, engine.global_samples
    return seen


def test_skipped_steps(two: Pool) -> None:
    reference, other = two.run(overflowing, 0)
    assert reference == other
    for stage in (1, 2, 3):
        assert two.run(overflowing, stage) == [reference] * 2
    assert reference["applied"] == [True, False, False, True, True]
    assert reference["scales"] == [1024, 512, 256, 256, 256]
    assert [n == float("inf") for n in reference["norms"]] == [
        not applied for applied in reference["applied"]
    ]
    rates = reference["rates"]
    assert rates[0] == rates[1] == rates[2] < rates[3] < rates[4]
    assert reference["steps"] == (5, 2, 20)


def normless(clipping: float, **zero: Any) -> float | None:
    engine = start(1, gradient_clipping=clipping, zero_optimization=zero)
    assert engine.get_global_grad_norm() is None
    feed(engine, *batches(1, 1, rows=2)[0])
    return engine.get_global_grad_norm()


def test_the_norm_without_clipping(two: Pool) -> None:
    norm = two.run(normless, 0.5)[0]
    assert two.run(normless, 0.0) == [norm] * 2 and norm > 0.5
    assert two.run(normless, 0.0, compute_grad_norm=False) == [None] * 2


# what initialize takes


def built(inside: bool, path: Path, on: str) -> tuple[list[Any], list[Any]]:
    """A model built in pieces: `zero.Init` takes the same file."""
    torch.manual_seed(0)
    path.write_text(
        json.dumps(
            config(
                3,
                zero_optimization=placed(3, param=on),
                optimizer={"type": "AdamW", "params": {"lr": 0.01}},
            )
        )
    )
    with minizero.zero.Init(config_dict_or_path=str(path), enabled=inside):
        model = Nasty()
    engine, *_ = minizero.initialize(model=model, config=path)
    seen = [feed(engine, x, y).item() for x, y in batches(3, 1, rows=2)]
    engine.destroy()
    weights = engine.module_state_dict() if on == "none" else {}
    return seen, [v.tolist() for v in weights.values()]


@pytest.mark.parametrize("on", ["none", "cpu", "nvme"])
def test_a_model_built_in_shards(two: Pool, tmp_path: Path, on: str) -> None:
    def run(inside: bool) -> tuple[list[Any], list[Any]]:
        return built(inside, tmp_path / f"{rank()}.json", on)

    assert two.run(run, True) == two.run(run, False)


def test_sources_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    text = json.dumps(config(1, optimizer={"type": "SGD"}))
    path.write_text(text)
    parser = minizero.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed
    for given in (
        {"config": path},
        {"config": str(path)},
        {"config": text},
        {"config_params": json.loads(text)},
        {"args": args},
        {"args": argparse.Namespace(local_rank=0), "config": text},
    ):
        engine, *others = minizero.initialize(model=nn.Linear(2, 2), **given)
        assert engine.zero_optimization_stage() == 1
        assert engine.train_batch_size() == 2
        assert others[1:] == [None, None]


SGD = {"optimizer": {"type": "SGD"}}


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({}, "takes one config, and got none"),
        (
            {"config": SGD, "config_params": SGD},
            "got config and config_params",
        ),
        ({"config": {}}, "the config has no batch size|train_batch_size"),
        (
            {"config": {"train_batch_size": 1, "zero_optimization": {"stage": 2}}},
            "there is no optimizer.* take stage 0 or 3",
        ),
        (
            {"config": {"train_batch_size": 1}, "lr_scheduler": lambda o: 3},
            "moves the rate of an optimizer, and there is none",
        ),
        ({"config": SGD, "model_parameters": []}, "empty parameter list|batch"),
        ({"config": SGD, "mpu": object()}, "does not do mpu="),
        ({"config": SGD, "model": None}, "takes a torch.nn.Module, not None"),
        (
            {"config": {"train_batch_size": 1}, "optimizer": lambda p: p},
            "makes one of parameters",
        ),
        (
            {"config": {"train_batch_size": 1, **SGD}, "lr_scheduler": lambda o: 3},
            "an object with step",
        ),
    ],
)
def test_what_initialize_refuses(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        minizero.initialize(**{"model": nn.Linear(2, 2), **given})


def test_warnings_are_shown_once_on_rank_0(two: Pool) -> None:
    def run() -> list[str]:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            engine = start(
                2,
                zero_optimization={"offload_param": {"device": "cpu"}},
                optimizer={"type": "SGD"},
            )
            feed(engine, *batches(1, 1, rows=2)[0])
        return [str(w.message) for w in shown]

    [first, second], others = two.run(run)
    assert "offload_param.device" in first and "has no effect" in first
    assert second == (
        'optimizer.type = "SGD" has no effect: initialize was given another optimizer'
    )
    assert others == []


# weights


def handed_out(stage: int, threshold: int) -> dict[str, Any]:
    zero = {"stage3_param_persistence_threshold": threshold}
    engine = start(stage, fp16={"enabled": True}, zero_optimization=zero)
    feed(engine, *batches(1, 1, rows=2)[0])
    names = [name for name, _ in engine.named_parameters()]
    assert all(name.startswith("module.") for name in names)
    assert len(list(engine.parameters())) == len(list(engine.module.parameters()))
    assert engine.blocks is engine.module.blocks  # what only the model has
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(engine, "nonsense")  # noqa: B009
    weights = engine.module_state_dict()
    some = engine.module_state_dict(exclude_frozen_parameters=True)
    frozen = {"places.weight", *(f"blocks.{i}.scale" for i in range(4))}
    assert weights.keys() - some.keys() == (frozen if weights else set())
    with minizero.zero.GatheredParameters(engine.module.parameters()):
        inside = {k: v.clone() for k, v in engine.state_dict().items()}
    if rank() == 0:
        assert all(torch.equal(inside[f"module.{k}"], v) for k, v in weights.items())
    said = []
    for module in (engine, engine.module, engine.module.blocks[1].up):
        try:
            values = module.state_dict().values()
            assert all(v.isfinite().all() for v in values)
        except RuntimeError as error:
            said.append(str(error))
    return {"said": said, "names": names}


def test_state_dicts_have_no_holes(two: Pool) -> None:
    for stage, threshold in (*((s, 0) for s in STAGES), (3, 10**5)):
        got = two.run(handed_out, stage, threshold)
        if stage < 3 or threshold:  # so small a model stays whole
            assert got[0]["said"] == []
        else:
            assert len(got[0]["said"]) == 3
            assert "engine.module_state_dict() on every rank" in got[0]["said"][0]


def taken_over(stage: int, by_model: bool) -> None:
    """Loaded weights are there after the next update too."""
    half = {"enabled": True, "loss_scale": 1}
    engine = start(stage, fp16=half, gradient_clipping=0.0)
    torch.manual_seed(5)
    new = Nasty().half().state_dict()
    if by_model:
        engine.module.load_state_dict(new)
    else:
        engine.load_state_dict({f"module.{k}": v for k, v in new.items()})
    for group in engine.optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    feed(engine, *batches(1, 1, rows=2)[0])
    assert engine.was_step_applied()
    got = engine.module_state_dict()
    names = dict(engine.module.named_parameters())
    assert all(torch.equal(v, new[k]) for k, v in got.items() if k in names)


@pytest.mark.parametrize("stage", STAGES)
def test_load_state_dict(two: Pool, stage: int) -> None:
    two.run(taken_over, stage, by_model=False)
    if stage < 3:
        two.run(taken_over, stage, by_model=True)


def test_the_model_of_an_engine_stays_where_it_is(two: Pool) -> None:
    def run() -> None:
        engine = start(2)
        assert engine.to(engine.device) is engine.float() is engine
        with pytest.raises(RuntimeError, match="before minizero.initialize"):
            engine.half()
        feed(engine, *batches(1, 1, rows=2)[0])

    two.run(run)


def test_states_are_shown_wherever_they_rest(two: Pool) -> None:
    def run(zero: dict[str, Any]) -> list[Tensor]:
        engine, stream = dropping(zero, gradient_clipping=0.0)
        go(engine, stream, 2)
        states = engine.optimizer.state_dict()["state"].values()
        engine.destroy()
        return [torch.cat([s["exp_avg"], s["exp_avg_sq"]]) for s in states]

    expected, others = two.run(run, PLANS["3"])
    for name in ("3, all on cpu", "3, all on nvme"):
        got, _ = two.run(run, PLANS[name])
        assert all(map(torch.equal, got, expected)) and len(got) == len(expected)


def test_the_optimizer_says_what_it_does_not_do() -> None:
    engine, optimizer, _, _ = minizero.initialize(
        model=nn.Linear(2, 2), config={"train_batch_size": 1, **SGD}
    )
    with pytest.raises(RuntimeError, match="give all groups"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(RuntimeError, match="engine.load_checkpoint"):
        optimizer.load_state_dict({})
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)
    assert optimizer.loss_scale == 1.0
    with pytest.raises(ValueError, match="there is one with fp16 only"):
        optimizer.loss_scale = 2.0


# checkpoints


class Dropping(nn.Module):
    """Draws random numbers, so that a resumed run needs their state."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.down = nn.Linear(24, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(x)
        for block in self.blocks:
            h = h + nn.functional.dropout(block(h.relu()), 0.2, self.training)
        return nn.functional.mse_loss(self.down(h), y)


def placed(stage: int, optimizer: str = "none", param: str = "none") -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    for name, on in (("optimizer", optimizer), ("param", param)):
        zero[f"offload_{name}"] = {"device": on, "nvme_path": "/tmp"}
        if on != "nvme":
            del zero[f"offload_{name}"]["nvme_path"]
    return zero


PLANS = {
    "0": placed(0),
    "1": placed(1),
    "2": placed(2),
    "3": placed(3),
    "2, states on cpu": placed(2, "cpu"),
    "3, all on cpu": placed(3, "cpu", "cpu"),
    "3, all on nvme": placed(3, "nvme", "nvme"),
}


def dropping(zero: dict[str, Any], **more: Any) -> tuple[minizero.Engine, Any]:
    """An engine and endless batches; 10 steps are an epoch."""
    torch.manual_seed(3 + rank())
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    rising = {"type": "WarmupLR", "params": {"warmup_num_steps": 12}}
    engine, _, loader, _ = minizero.initialize(
        model=Dropping(),
        training_data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
        config={
            "train_batch_size": 8,
            "optimizer": optimizer,
            "scheduler": rising,
            "zero_optimization": zero,
            **more,
        },
    )
    return engine, minizero.utils.RepeatingLoader(loader)


def go(engine: minizero.Engine, stream: Any, steps: int) -> list[tuple[Any, ...]]:
    seen = []
    while steps:
        loss = engine(*next(stream))
        engine.backward(loss)
        engine.step()
        if engine.micro_steps % engine.gradient_accumulation_steps() == 0:
            steps -= 1
            norm = engine.get_global_grad_norm()
            seen.append((loss.item(), norm, *engine.get_lr(), engine.global_samples))
    return seen


def saved(
    zero: dict[str, Any], folder: Path, training: bool = True, **more: Any
) -> list[tuple[Any, ...]]:
    """Steps after a save in mid-epoch; they go on into the next epoch."""
    engine, stream = dropping(zero, **more)
    engine.train(training)
    go(engine, stream, 7)
    assert engine.save_checkpoint(folder, client_state={"best": (1.5, None)})
    rest = go(engine, stream, 8)
    engine.destroy()
    return rest


def loaded(
    zero: dict[str, Any], folder: Path, training: bool = True, **more: Any
) -> list[tuple[Any, ...]]:
    engine, stream = dropping(zero, **more)
    engine.train(training)
    go(engine, stream, 2)  # which is forgotten
    path, client = engine.load_checkpoint(folder)
    assert path == str(folder / "global_step7") and client == {"best": (1.5, None)}
    rest = go(engine, stream, 8)
    engine.destroy()
    return rest


@pytest.mark.parametrize("name", PLANS)
def test_resumed_under_another_plan_it_is_the_same_run(
    two: Pool, tmp_path: Path, name: str
) -> None:
    names = list(PLANS)
    reference = two.run(saved, PLANS[name], tmp_path)
    assert len({step[0] for step in reference[0]}) == 8
    for further in (1, 3):
        other = names[(names.index(name) + further) % len(names)]
        got = two.run(loaded, PLANS[other], tmp_path)
        assert got == reference, f"saved under {name}, loaded under {other}"


def test_resumed_with_fp16_and_accumulation(two: Pool, tmp_path: Path) -> None:
    more = {
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3},
    }
    reference = two.run(saved, PLANS["2"], tmp_path, **more)
    assert two.run(loaded, PLANS["3, all on cpu"], tmp_path, **more) == reference


def mean_losses(runs: list[list[tuple[Any, ...]]]) -> Tensor:
    return torch.tensor([[step[0] for step in run] for run in runs]).mean(0)


def test_resumed_on_another_number_of_ranks(
    two: Pool, four: Pool, tmp_path: Path
) -> None:
    """The global batches are the same, cut otherwise; so is the mean loss."""

    reference = four.run(saved, PLANS["3"], tmp_path, training=False)
    got = two.run(loaded, PLANS["1"], tmp_path, training=False)
    torch.testing.assert_close(mean_losses(got), mean_losses(reference))
    torch.testing.assert_close(
        torch.tensor([step[1:] for step in got[0]], dtype=torch.float64),
        torch.tensor([step[1:] for step in reference[0]], dtype=torch.float64),
        rtol=1e-4,
        atol=1e-6,
    )


def test_what_is_loaded(two: Pool, tmp_path: Path) -> None:
    def run(folder: Path) -> None:
        engine, stream = dropping(PLANS["1"])
        with warnings.catch_warnings(record=True) as shown:
            assert engine.load_checkpoint(folder) == (None, None)
        assert len(shown) == (rank() == 0)
        go(engine, stream, 2)
        engine.save_checkpoint(folder, tag=5, background=10**9)
        engine.finish_checkpoint()
        weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
        engine_rates = engine.get_lr()
        go(engine, stream, 1)
        engine.save_checkpoint(folder, "not-the-latest", save_latest=False)
        other, stream = dropping(PLANS["3"])
        other.load_checkpoint(folder, load_module_only=True)
        assert other.global_steps == 0 and not any(other.optimizer.state.values())
        got = other.module_state_dict()
        assert all(torch.equal(v, weights[k]) for k, v in got.items())
        assert other.training_dataloader.state_dict()["seen"] == 0
        assert not any(other.optimizer.state_dict()["state"].values())
        other.load_checkpoint(folder, load_optimizer_states=False)
        assert other.global_steps == 2
        assert not any(other.optimizer.state_dict()["state"].values())
        other.load_checkpoint(folder, load_lr_scheduler_states=False)
        assert any(other.optimizer.state_dict()["state"].values())
        assert other.global_steps == 2 and other.global_samples == 16
        assert other.get_lr() == engine_rates
        other.load_checkpoint(folder, "not-the-latest")
        assert other.global_steps == 3 and other.get_lr() == engine.get_lr()
        with pytest.raises(minizero.checkpoint.CheckpointError, match="'5'"):
            other.load_checkpoint(folder, "none")
        minizero.checkpoint.save(engine.net, folder / "bare", "x", extra={"a": 1})
        assert other.load_checkpoint(folder / "bare")[1] == {"a": 1}

    two.run(run, tmp_path)
    assert (tmp_path / "latest").read_text().strip() == "5"


@pytest.mark.parametrize("make", ["StepLR", "OneCycleLR", "SequentialLR", "LambdaLR"])
def test_schedulers_of_torch_are_resumed(make: str, tmp_path: Path) -> None:
    from torch.optim import lr_scheduler as torch_schedulers

    def start() -> minizero.Engine:
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        if make == "StepLR":
            schedule: Any = torch_schedulers.StepLR(inner, 2, 0.5)
        elif make == "OneCycleLR":
            schedule = torch_schedulers.OneCycleLR(inner, 0.1, total_steps=20)
        elif make == "LambdaLR":
            schedule = torch_schedulers.LambdaLR(inner, lambda step: 0.5**step)
        else:
            parts = [
                torch_schedulers.LinearLR(inner, 0.1, total_iters=3),
                torch_schedulers.MultiStepLR(inner, [2, 4]),
            ]
            schedule = torch_schedulers.SequentialLR(inner, parts, [3])
        return minizero.initialize(
            model=model,
            optimizer=inner,
            lr_scheduler=schedule,
            config={"train_batch_size": 1},
        )[0]

    def rates(engine: minizero.Engine, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
            seen += engine.get_lr()
        return seen

    engine = start()
    rates(engine, 4)
    engine.save_checkpoint(tmp_path)
    expected = rates(engine, 4)
    other = start()
    other.load_checkpoint(tmp_path)
    assert rates(other, 4) == expected and len(set(expected)) > 1


def between(
    zero: dict[str, Any], folder: Path, load: bool, training: bool = True, **more: Any
) -> list[tuple[Any, ...]]:
    """Steps of 4 micro-batches; saved after 3 of the third, and so resumed."""
    engine, stream = dropping(zero, gradient_accumulation_steps=4, **more)
    engine.train(training)
    go(engine, stream, 2)
    if load:
        engine.backward(engine(*next(stream)))  # which is forgotten
        engine.load_checkpoint(folder)
    else:
        for _ in range(3):
            engine.backward(engine(*next(stream)))
            engine.step()
        engine.save_checkpoint(folder, "between")
    assert engine.global_steps == 2 and engine.micro_steps == 11
    rest = go(engine, stream, 3)
    engine.destroy()
    return rest


def test_resumed_between_accumulation_boundaries(two: Pool, tmp_path: Path) -> None:
    """With the gradients so far: the same bits, and on other plans nearly the same."""
    half = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    plans: dict[str, dict[str, Any]] = {"0": {}, "1": half, "3, all on cpu": {}}
    for name, more in plans.items():
        folder = tmp_path / name
        reference = two.run(between, PLANS[name], folder, False, **more)
        assert two.run(between, PLANS[name], folder, True, **more) == reference
        for other in ("1", "2") if name == "0" else ():
            got = two.run(between, PLANS[other], folder, True, **more)
            if other == "1":
                assert got == reference
            torch.testing.assert_close(
                mean_losses(got), mean_losses(reference), rtol=1e-4, atol=1e-6
            )
    # 3 micro-batches on 2 ranks are 6 on one; of a step of 3 they are none
    reference = two.run(between, PLANS["0"], tmp_path / "quiet", False, False)
    engine, stream = dropping(PLANS["2"], gradient_accumulation_steps=8)
    engine.train(False)
    engine.load_checkpoint(tmp_path / "quiet")
    assert engine.micro_steps == 22
    norm = go(engine, stream, 1)[0][1]
    assert norm == pytest.approx(reference[0][0][1], rel=1e-4)
    engine, stream = dropping(
        PLANS["3"], train_batch_size=9, gradient_accumulation_steps=3
    )
    with pytest.warns(UserWarning, match="it begins anew"):
        engine.load_checkpoint(tmp_path / "0")
    assert engine.micro_steps == 6 and not engine.net.has_gradients


def test_no_checkpoint_between_backward_and_step(tmp_path: Path) -> None:
    engine, stream = dropping(PLANS["0"], gradient_accumulation_steps=4)
    engine.backward(engine(*next(stream)))
    with pytest.raises(RuntimeError, match=r"micro-batch 1 of 4.*zero_grad"):
        engine.save_checkpoint(tmp_path)
    engine.step()
    engine.backward(engine(*next(stream)))
    with pytest.raises(RuntimeError, match="micro-batch 2 of 4"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.zero_grad()
    assert engine.save_checkpoint(tmp_path, "given-up")
    engine.load_checkpoint(tmp_path)
    assert engine.micro_steps == 0
    go(engine, stream, 1)
    assert engine.save_checkpoint(tmp_path)
    # gradients from before a load are gone after it
    engine.backward(engine(*next(stream)))
    engine.load_checkpoint(tmp_path)
    assert not engine.net.has_gradients and engine.micro_steps == 4


def weight_files(folder: Path) -> dict[str, Tensor] | None:
    torch.manual_seed(0)
    half = {"bf16": {"enabled": True}}
    engine = start(3, **half)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert not engine.save_16bit_model(folder)
    assert len(shown) == (rank() == 0) and not list(folder.iterdir())
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    for stage, zero in ((3, gathers), (1, {})):
        engine = start(stage, zero_optimization=zero, **half)
        assert engine.save_16bit_model(folder, f"{stage}.safetensors")
        assert engine.save_16bit_model(folder)
    return engine.module_state_dict()


def test_whole_weights_in_one_file(two: Pool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    expected = two.run(weight_files, tmp_path)[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "1.safetensors",
        "3.safetensors",
        "pytorch_model.bin",
    ]
    for got in (
        torch.load(tmp_path / "pytorch_model.bin", weights_only=True),
        load_file(tmp_path / "1.safetensors"),
        load_file(tmp_path / "3.safetensors"),
    ):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[k], expected[k]) for k in got)
    assert expected["head.weight"].dtype == torch.bfloat16


# reports


def reported(**more: Any) -> tuple[str, Run]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        run = trained(1, 2, **more)
    return text.getvalue(), run


def test_reports(two: Pool) -> None:
    (nothing, reference), _ = two.run(reported)
    assert nothing == ""
    (text, run), (other, _) = two.run(reported, steps_per_print=3)
    assert other == "" and len(text.splitlines()) == 2
    assert text.startswith("step=3, skipped=0, lr=[0.01, 0.003], mom=[(0.9, 0.999)")
    assert "samples/s=" in text and "forward" not in text
    first, *_ = two.run(reported, steps_per_print=1)[0][0].splitlines()
    assert first.endswith("loss_scale=1")  # no rate yet
    assert same([run], [reference])
    (text, run), (other, _) = two.run(reported, wall_clock_breakdown=True)
    assert other == "" and len(text.splitlines()) == 6
    last = text.splitlines()[-1]
    assert all(f"{name}=" in last for name in ("forward", "backward", "step"))
    assert "model TFLOPS=" in last
    assert same([run], [reference])


def test_model_flops() -> None:
    """A forward of n tokens is 2 n W; a backward is two forwards."""
    model = nn.Linear(5, 7)
    engine, *_ = minizero.initialize(
        model=model,
        config={
            "train_batch_size": 6,
            "gradient_accumulation_steps": 2,
            "wall_clock_breakdown": True,
            **SGD,
        },
    )
    for _ in range(6):
        loss = engine(torch.randn(3, 5)).sum()
        engine.backward(loss)
        engine.step()
    assert engine.meter.forward_flops == 2 * 3 * 5 * 7
    assert engine.throughput().steps == 2
    last = engine.meter.last
    assert last.flops == 3 * 2 * (2 * 3 * 5 * 7)
    assert (last.samples, last.steps) == (6, 1)
    assert last.samples_per_second == 6 / last.seconds
    assert last.tflops == last.flops / last.seconds / 1e12
    assert set(last.milliseconds) == {"forward", "backward", "step"}
    assert sum(last.milliseconds.values()) <= 1e3 * last.seconds


def test_model_flops_of_attention() -> None:
    """b heads of s tokens and size d: 2 b s^2 d, twice."""
    meter = minizero.engine.throughput.Meter(detailed=True)
    with meter.phase("forward"):
        q = torch.randn(2, 3, 16, 8, requires_grad=True)
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert meter.forward_flops == 2 * 2 * (2 * 3) * 16 * 16 * 8


# imports, and scripts


def test_an_import_leaves_the_engine_out() -> None:
    """Configs and checkpoints cost time that other programs need not pay."""
    code = (
        "import sys, minizero; loaded = set(sys.modules)\n"
        "late = 'config engine data meter checkpoint nvme offload lab'.split()\n"
        "late = ['minizero.' + m for m in late] + ['safetensors']\n"
        "print([m for m in late if m in loaded])\n"
        "minizero.initialize; print('initialize' in dir(minizero))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.split("\n")[:2] == ["[]", "True"]


def test_public_names() -> None:
    for name in minizero.__all__:
        assert getattr(minizero, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(minizero, "nonsense")  # noqa: B009


SCRIPT = """
import argparse
import torch
import minizero as deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
engine, optimizer, loader, scheduler = deepspeed.initialize(
    args=args,
    model=torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)),
    training_data=data,
)
for epoch in range(2):
    for x, y in loader:
        x, y = x.to(engine.device), y.to(engine.device)
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
if engine.global_rank == 0:
    print("steps", engine.global_steps, "samples", engine.global_samples)
    print("rate", scheduler.get_last_lr())
"""


def test_a_script_for_deepspeed_under_torchrun(tmp_path: Path, tool: Tool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds_config.json").write_text(
        json.dumps(
            {
                "train_batch_size": 12,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
                "zero_optimization": {"stage": 3},
            }
        )
    )
    out = tool(
        "torchrun",
        "--nproc-per-node=2",
        "--local-addr=127.0.0.1",
        "train.py",
        "--deepspeed",
        "--deepspeed_config=ds_config.json",
        cwd=tmp_path,
    )
    assert "steps 4 samples 48" in out
    assert "rate [0.01]" in out
