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
from torch.optim import lr_scheduler as schedulers

import minizero
from minizero import Delayed, Offload, Overlap, Plan
from minizero.engine.lr_schedules import SCHEDULES
from minizero.ranks import Pool, rank, world_size

STAGES = (0, 1, 2, 3)
ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}
SGD = {"type": "SGD", "params": {"lr": 0.1}}
MOMENTUM = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def config(stage: int, m: int = 1, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 100}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": m,
        "gradient_clipping": 0.5,
        **more,
        "zero_optimization": zero | more.get("zero_optimization", {}),
    }


def start(stage: int, m: int = 1, **more: Any) -> minizero.Engine:
    """An engine for the nasty model, with AdamW over two groups."""
    torch.manual_seed(rank())
    model = Nasty()
    engine, *_ = minizero.initialize(
        model=model,
        model_parameters=nasty.groups(model),
        optimizer=nasty.adamw,
        config=config(stage, m, **more),
    )
    return engine


def feed(engine: minizero.Engine, x: Tensor, y: Tensor) -> Tensor:
    loss = engine(own(x, 2), own(y, 2))
    engine.backward(loss)
    engine.step()
    return loss.detach()


def trained(stage: int, m: int = 1, steps: int = 6, **more: Any) -> Run:
    engine = start(stage, m, **more)
    losses, norms = [], []
    for x, y in batches(steps, m, rows=2):
        engine.module.step = engine.global_steps
        losses.append(feed(engine, x, y))
        if engine.was_step_applied():
            norms.append(torch.tensor(engine.get_global_grad_norm()))
    weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
    return Run(torch.stack(losses), torch.stack(norms), weights)


def equal(runs: list[Run], others: list[Run]) -> bool:
    """The same bits; where parameters are sharded, only rank 0 has weights."""

    def on_rank_0(runs: list[Run]) -> list[Run]:
        return [Run(r.losses, r.norms, runs[0].weights) for r in runs]

    return same(on_rank_0(runs), on_rank_0(others))


def same_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# --- Training ---


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_config_is_as_parallelize_by_hand(four: Pool, stage: int, m: int) -> None:
    """Stages 0 and 1 reduce after the last micro-batch, 2 and 3 after each."""
    how = {"micro_batches": m, "postpone": stage < 2, "bucket_size": 100}
    assert equal(four.run(trained, stage, m), four.run(train, stage, steps=6, **how))


def late() -> Run:
    plan = Plan.stage(2, offload_optimizer="cpu")
    return train(plan, steps=6, storage=Delayed(plan))


def test_a_key_delays_the_update(two: Pool) -> None:
    zero = {"offload_optimizer": {"device": "cpu", "delayed_update": True}}
    runs = two.run(trained, 2, zero_optimization=zero)
    assert equal(runs, two.run(late)) and not equal(runs, two.run(trained, 2))


def example() -> dict[str, Any]:
    torch.manual_seed(0)
    engine, optimizer, _, _ = minizero.initialize(
        model=Nasty(), config={**EXAMPLE, "optimizer": ADAMW}
    )
    [(x, y)] = batches(1, 1, rows=4)
    losses = []
    for _ in range(16 * 6):
        loss = engine(own(x, 4), own(y, 4))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    storage, schedule = engine.net.storage, engine.net.schedule
    assert isinstance(storage, Offload) and isinstance(schedule, Overlap)
    assert {p.on for p in (storage.plan.parameters, storage.plan.optimizer)} == {"cpu"}
    assert engine.net.flats[0].full.dtype == torch.float16
    assert (engine.global_steps, engine.micro_steps) == (6, 96)
    assert engine.get_batch_info() == (256, 4, 16) and engine.global_samples == 6 * 256
    scale, skipped = optimizer.loss_scale, engine.skipped_steps
    return {"losses": losses, "scale": scale, "skipped": skipped}


def test_the_example_config_trains(four: Pool) -> None:
    got = four.run(example)[0]
    assert got["losses"][-1] < 0.8 * got["losses"][0]
    # the first overflow is forgiven (hysteresis 2), the second halves
    assert got["skipped"] < 3 and got["scale"] == 2.0 ** (17 - max(1, got["skipped"]))


def counted(stage: int) -> list[Any]:
    engine = start(stage, 3)
    seen = []
    x, y = batches(1, 1, rows=2)[0]
    for _ in range(7):
        boundary = engine.is_gradient_accumulation_boundary()
        loss = engine(own(x, 2), own(y, 2))
        assert torch.equal(engine.backward(loss), loss.detach() / 3)
        engine.step()
        counts = engine.micro_steps, engine.global_steps, engine.global_samples
        seen.append((boundary, engine.was_step_applied(), *counts))
    return seen


@pytest.mark.parametrize("stage", [0, 3])
def test_counters(two: Pool, stage: int) -> None:
    assert two.run(counted, stage)[1] == [
        (i % 3 == 0, i % 3 == 0, i, i // 3, 12 * (i // 3)) for i in range(1, 8)
    ]


def own_boundaries(stage: int) -> dict[str, Tensor]:
    engine = start(stage, 3)
    for i, (x, y) in enumerate(batches(2, 3, rows=2)):
        engine.module.step = i // 3
        engine.set_gradient_accumulation_boundary(i % 3 == 2)
        engine.backward(engine(own(x, 2), own(y, 2)))
        if i % 3 == 2:
            engine.step()
    return engine.module_state_dict()


def unsynced(stage: int) -> dict[str, Tensor]:
    engine = start(stage, 1)
    for i, (x, y) in enumerate(batches(2, 3, rows=2)):
        engine.module.step = i // 3
        with engine.no_sync() if i % 3 < 2 else contextlib.nullcontext():
            engine.backward(engine(own(x, 2), own(y, 2)) / 3)
        if i % 3 == 2:
            engine.step()
    with pytest.raises(RuntimeError, match="outside of no_sync"), engine.no_sync():
        engine.step()
    return engine.module_state_dict()


OWN = [(own_boundaries, 1), (own_boundaries, 2), (unsynced, 0), (unsynced, 1)]


@pytest.mark.parametrize("how, stage", OWN)
def test_a_script_may_accumulate_by_itself(
    two: Pool, how: Callable[..., Any], stage: int
) -> None:
    expected = two.run(trained, stage, 3, steps=2)[0].weights
    assert same_weights(two.run(how, stage)[0], expected)


def odd(what: str, stage: int, **more: Any) -> Run:
    """Steps that are not forward, backward, step, in this order."""
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
    serial = two.run(odd, what, 3, zero_optimization={"overlap_comm": False})
    assert equal(serial, reference)


def together(stage: int) -> Run:
    """Two engines take turns, as an actor and a critic do."""
    first, second = start(stage), start(stage)
    losses, norms = [], []
    for i, (x, y) in enumerate(batches(4, 1, rows=2)):
        first.module.step = second.module.step = i
        loss, other = (e(own(x, 2), own(y, 2)) for e in (first, second))
        first.backward(loss)
        second.backward(2 * other)
        first.step()
        second.step()
        losses.append(loss.detach())
        norms.append(torch.tensor(first.get_global_grad_norm()))
    return Run(torch.stack(losses), torch.stack(norms), first.module_state_dict())


def test_two_engines(two: Pool) -> None:
    assert equal(two.run(together, 3), two.run(trained, 3, steps=4))


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
    applied = reference["applied"]
    assert applied == [True, False, False, True, True]
    assert reference["scales"] == [1024, 512, 256, 256, 256]
    assert [norm < torch.inf for norm in reference["norms"]] == applied
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


def resized(stage: int, change: bool) -> tuple[list[int], dict[str, Tensor]]:
    """2 micro-batches a step, then 3; counted by the engine, or set by the script."""
    engine = start(stage, 2)
    boundaries = [False, True] * 2 + [False, False, True] * 2
    steps = []
    for i, (x, y) in enumerate(batches(10, 1, rows=2)):
        if i == 4 and change:
            engine.set_train_batch_size(6 * world_size())
        elif i == 4:
            engine.config = start(stage, 3).config
        if not change:
            engine.set_gradient_accumulation_boundary(boundaries[i])
        engine.module.step = engine.global_steps
        feed(engine, x, y)
        steps.append(engine.global_steps)
    assert engine.get_batch_info() == (6 * world_size(), 2, 3)
    assert engine.global_samples == (2 * 4 + 2 * 6) * world_size()
    return steps, engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_another_batch_size(two: Pool, stage: int) -> None:
    steps, weights = two.run(resized, stage, True)[0]
    assert steps == [0, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert steps == two.run(resized, stage, False)[0][0]
    assert same_weights(weights, two.run(resized, stage, False)[0][1])


def compiled(stage: int, compile_it: bool) -> list[float]:
    """Blocks and a root; "eager" compiles to the same operations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 1)))
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    given = config(stage, optimizer=ADAMW, zero_optimization=zero)
    engine = minizero.initialize(model=model, config=given)[0]
    if compile_it:
        engine.compile(backend="eager", compile_kwargs={"dynamic": False})
        engine.compile()
        assert engine.is_compiled and "forward" in vars(model[0])
    return go(engine, 3)


def test_compiled_blocks(two: Pool) -> None:
    for stage in (0, 3):
        assert two.run(compiled, stage, True) == two.run(compiled, stage, False)


# --- Optimizers and schedulers ---


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
    assert engine.optimizer_name() == "AdamW"
    return engine.module_state_dict(), (engine.get_lr(), engine.get_mom())


def test_the_config_makes_the_optimizer(two: Pool) -> None:
    weights, said = two.run(by_config, None)[0]
    client = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.1, "fused": True}
    assert same_weights(weights, two.run(by_config, client)[0][0])
    assert said == ([0.02], [(0.8, 0.9)])


def test_groups_of_parameters(two: Pool, tmp_path: Path) -> None:
    def run(stage: int) -> tuple[list[float], list[Any]]:
        torch.manual_seed(0)
        model = Nasty()
        filled = nasty.groups(model)
        engine, optimizer, _, _ = minizero.initialize(
            model=model,
            model_parameters=[{"params": []}, *filled, {"params": [], "lr": 0.5}],
            config=config(stage, optimizer=MOMENTUM),
        )
        decay = [group["weight_decay"] for group in optimizer.param_groups]
        assert decay == [0.0, 0.1, 0.0, 0.0]
        feed(engine, *batches(1, 1, rows=2)[0])
        engine.save_checkpoint(tmp_path / str(stage))
        engine.load_checkpoint(tmp_path / str(stage))
        return engine.get_lr(), engine.get_mom()

    for stage in (0, 3):
        assert two.run(run, stage) == [([0.1, 0.1, 3e-3, 0.5], [0.9] * 4)] * 2


def test_a_parameter_that_no_group_has() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with pytest.warns(UserWarning, match="no group with them: 1.weight, 1.bias"):
        minizero.initialize(
            model=model,
            optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1),
            config=config(2),
        )
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]
    with pytest.raises(ValueError, match="not the model's"):
        minizero.initialize(
            model=nn.Linear(2, 2),
            optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1),
            config=config(2),
        )


def small(
    stage: int = 0, make: Callable[[Any], Any] | None = None, **given: Any
) -> minizero.Engine:
    """A linear model under SGD, with a scheduler; `given`: to `initialize`."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = {"train_batch_size": world_size()}
    return minizero.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=make and make(optimizer),
        config=sizes | {"zero_optimization": {"stage": stage}},
        **given,
    )[0]


def go(engine: minizero.Engine, steps: int = 1) -> list[float]:
    """Micro-batches of ones, and their losses."""
    losses = []
    for _ in range(steps):
        loss = engine(torch.ones(1, 2)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def rates(how: str, stage: int) -> list[float]:
    """The rate of each update of a StepLR, however it was made, without a warning."""
    make = partial(schedulers.StepLR, step_size=2, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, if updates come after the schedule
        engine = small(stage, {"own": make, "factory": lambda _: make}.get(how))
        by_hand = make(engine.optimizer) if how == "returned" else None
        seen = []
        for _ in range(6):
            seen.append(engine.get_lr()[0])
            go(engine)
            if by_hand:
                by_hand.step()
    return seen


@pytest.mark.parametrize("how", ["own", "factory", "returned"])
def test_schedulers_of_torch(two: Pool, how: str) -> None:
    halved = [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    for stage in (0, 3):
        assert two.run(rates, how, stage)[0] == pytest.approx(halved)


def test_the_config_makes_the_scheduler() -> None:
    params = {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}
    engine = minizero.initialize(
        model=nn.Linear(2, 1),
        config={"train_batch_size": 1, "optimizer": SGD}
        | {"scheduler": {"type": "WarmupLR", "params": params}},
    )[0]
    seen = []
    for _ in range(6):
        seen += engine.get_lr()
        go(engine)
    # the first step of the schedule gives the first rate again
    assert seen == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3, 0.4])


def test_a_scheduler_that_needs_a_loss() -> None:
    engine = small(0, partial(schedulers.ReduceLROnPlateau, patience=0))
    for metric, rate in ((1.0, 0.1), (2.0, 0.01)):
        engine.backward(engine(torch.ones(1, 2)).mean())
        engine.step(lr_kwargs={"metrics": metric})
        assert engine.was_step_applied() and engine.get_lr() == pytest.approx([rate])


def test_an_update_counts_though_its_scheduler_has_ended() -> None:
    engine = small(0, lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=2))
    go(engine)
    with pytest.raises(ValueError, match="Tried to step"):
        go(engine, 5)
    assert (engine.global_steps, engine.micro_steps) == (3, 3)
    assert engine.was_step_applied()


def test_the_optimizer_refuses_what_it_cannot_do() -> None:
    optimizer = small().optimizer
    assert optimizer is not None and optimizer.loss_scale == 1.0
    for use, sentence in (
        (lambda: optimizer.add_param_group({"params": []}), "all parameter groups"),
        (lambda: optimizer.load_state_dict({}), "engine.load_checkpoint"),
        (lambda: optimizer.step(lambda: 0.0), "no closure"),
        (lambda: setattr(optimizer, "loss_scale", 2.0), "exists with fp16 only"),
        (optimizer.optimizer.step, "engine.step"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=sentence):
            use()


# --- What `initialize` takes ---


@pytest.mark.parametrize("on", ["none", "cpu", "nvme"])
def test_a_model_built_in_shards(two: Pool, tmp_path: Path, on: str) -> None:
    def run(inside: bool) -> tuple[list[float], list[Any]]:
        torch.manual_seed(0)
        path = tmp_path / f"{rank()}.json"
        zero = placed(3, param=on)
        path.write_text(json.dumps(config(3, zero_optimization=zero, optimizer=ADAMW)))
        with minizero.zero.Init(config_dict_or_path=str(path), enabled=inside):
            model = Nasty()
        engine, *_ = minizero.initialize(model=model, config=path)
        losses = [feed(engine, x, y).item() for x, y in batches(3, 1, rows=2)]
        weights = engine.module_state_dict().values()
        engine.destroy()
        return losses, [v.tolist() for v in weights]

    assert two.run(run, True) == two.run(run, False)


def test_sources_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    text = json.dumps(config(1, optimizer=SGD))
    path.write_text(text)
    parser = minizero.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    for given in (
        {"config": path},
        {"config": text},
        {"config_params": json.loads(text)},
        {"args": args},
        {"args": argparse.Namespace(local_rank=0), "config": text},
    ):
        engine, *others = minizero.initialize(model=nn.Linear(2, 2), **given)
        assert engine.zero_optimization_stage() == 1 and engine.train_batch_size() == 2
        assert others[1:] == [None, None]


ONE = {"train_batch_size": 1}


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({}, "takes one config, config=..., not 0"),
        ({"config": ONE, "config_params": ONE}, "not 2"),
        ({"config": {}}, "train_batch_size"),
        ({"config": ONE, "lr_scheduler": lambda o: 3}, "needs an optimizer"),
        ({"config": ONE, "mpu": object()}, "all ranks are data-parallel"),
        ({"config": ONE, "model": None}, "takes a torch.nn.Module, not None"),
        ({"config": ONE, "optimizer": lambda p: p}, "makes one of parameters"),
        (
            {"config": ONE | {"optimizer": SGD}, "lr_scheduler": lambda o: 3},
            "an object with step",
        ),
        (
            {"config": ONE | {"optimizer": {"type": "SGD", "params": {"lrr": 1}}}},
            "lrr",
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
            zero = {"offload_param": {"device": "cpu"}}
            engine = start(2, zero_optimization=zero, optimizer=SGD)
            feed(engine, *batches(1, 1, rows=2)[0])
        return [str(w.message) for w in shown]

    [first, second], others = two.run(run)
    assert "offload_param" in first and "has no effect" in first and others == []
    assert second == "the config's optimizer has no effect: initialize got another"


@pytest.mark.parametrize(
    "sections, given, sentence",
    [
        ({"scheduler": {"type": "WarmupLR"}}, {}, "scheduler .* there is no optimizer"),
        (
            {"optimizer": SGD},
            {"lr_scheduler": schedulers.StepLR(torch.optim.SGD([torch.ones(1)]), 1)},
            "moves another optimizer",
        ),
    ],
)
def test_what_has_no_effect_is_reported(
    sections: dict[str, Any], given: dict[str, Any], sentence: str
) -> None:
    with pytest.warns(UserWarning, match=sentence):
        minizero.initialize(model=nn.Linear(2, 1), config=ONE | sections, **given)


# --- Misuse ---


def test_losses_that_are_none(two: Pool) -> None:
    def run() -> None:
        engine = start(2)
        x, y = batches(1, 1, rows=2)[0]
        loss = engine(own(x, 2), own(y, 2))
        for value, sentence in (
            (1.0, "not 1.0"),
            (torch.ones(2, requires_grad=True), r"not \(2,\)"),
            (loss.detach(), "requires no gradient"),
        ):
            with pytest.raises(ValueError, match=sentence):
                engine.backward(value)
        with pytest.raises(RuntimeError, match=r"backward\(loss\)"):
            loss.backward()

    two.run(run)


class Fault(Exception):
    pass


def raise_fault(*_: Any) -> None:
    raise Fault


def fail_in_backward(module: nn.Module, args: Any, out: Tensor) -> None:
    out.register_hook(raise_fault)


def interrupted(where: str, stage: int) -> Run:
    """Steps of two micro-batches, one of which fails once; the step is done again."""
    engine = start(stage, 2)
    losses, norms = [], []
    data = batches(3, 2, rows=2)
    for i, (x, y) in enumerate(data):
        engine.module.step = engine.global_steps
        block = engine.module.blocks[0].up
        if where == "forward" and i == 3:
            handle = block.register_forward_pre_hook(raise_fault)
            with pytest.raises(Fault):
                engine(own(x, 2), own(y, 2))
            handle.remove()
        elif where == "backward" and i == 2:
            handle = block.register_forward_hook(fail_in_backward)
            loss = engine(own(x, 2), own(y, 2))
            handle.remove()
            with pytest.raises(Fault):
                engine.backward(loss)
            with pytest.raises(RuntimeError, match="gradients are incomplete"):
                engine.step()
            engine.zero_grad()
        losses.append(feed(engine, x, y))
        if engine.was_step_applied():
            norms.append(torch.tensor(engine.get_global_grad_norm()))
    return Run(torch.stack(losses), torch.stack(norms), engine.module_state_dict())


@pytest.mark.parametrize("stage", STAGES)
def test_a_healthy_step_after_an_exception(two: Pool, stage: int) -> None:
    reference = two.run(interrupted, "nowhere", stage)
    for where in ("forward", "backward"):
        assert equal(two.run(interrupted, where, stage), reference), where


def test_a_step_without_a_gradient(two: Pool) -> None:
    def run(stage: int) -> tuple[Any, ...]:
        engine = start(stage)
        feed(engine, *batches(1, 1, rows=2)[0])
        before = {k: v.clone() for k, v in engine.module_state_dict().items()}
        engine.step()
        same = same_weights(engine.module_state_dict(), before)
        return same, engine.was_step_applied(), engine.micro_steps, engine.global_steps

    for stage in STAGES:
        assert two.run(run, stage) == [(True, False, 2, 2)] * 2


def outdated(stage: int, half: bool) -> None:
    engine = start(stage, bf16={"enabled": half})
    (x, y), (u, v) = batches(2, 1, rows=2)
    critic = engine(own(x, 2), own(y, 2))
    feed(engine, u, v)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(critic)
    engine.zero_grad()
    feed(engine, x, y)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_whose_forward_an_update_has_overtaken(
    two: Pool, stage: int, half: bool
) -> None:
    two.run(outdated, stage, half)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_share_memory_are_refused(stage: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"0.weight.*1.weight.*memory"):
        minizero.initialize(model=model, config=config(stage, optimizer=SGD))


def written(stage: int, half: bool) -> bool:
    """Weights that a script writes between steps are there after the next update."""
    engine = start(stage, bf16={"enabled": half}, gradient_clipping=0.0)
    data = batches(3, 1, rows=2)
    feed(engine, *data[0])
    weight = engine.module.head.weight
    with minizero.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.fill_(0.25)
    for group in engine.optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    feed(engine, *data[1])
    weights = engine.module_state_dict()
    return not weights or bool((weights["head.weight"] == 0.25).all())


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_written_weights_are_taken_over(two: Pool, stage: int, half: bool) -> None:
    assert all(two.run(written, stage, half))


def used_up(stage: int) -> None:
    engine = start(stage)
    x, y = batches(1, 1, rows=2)[0]
    loss = engine(own(x, 2), own(y, 2))
    engine.destroy()
    engine.destroy()
    for use in (
        lambda: engine(own(x, 2), own(y, 2)),
        lambda: engine.backward(loss),
        engine.step,
        lambda: engine.save_checkpoint("/nowhere"),
        lambda: engine.load_checkpoint("/nowhere"),
    ):
        with pytest.raises(RuntimeError, match="was destroyed; make a new one"):
            use()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_destroyed_engine(two: Pool, stage: int) -> None:
    two.run(used_up, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_has_one_engine(stage: int) -> None:
    given = {"model": nn.Linear(2, 1), "config": config(stage, optimizer=ADAMW)}
    engine, *_ = minizero.initialize(**given)
    with pytest.raises((RuntimeError, ValueError), match="already"):
        minizero.initialize(**given)
    go(engine)


def test_sizes_that_cannot_be() -> None:
    engine = small(training_data=[torch.ones(2)] * 12)
    with pytest.raises(ValueError, match="batch"):
        engine.set_train_batch_size(0)
    engine.backward(engine(torch.ones(1, 2)).mean())
    with pytest.raises(RuntimeError, match="between steps"):
        engine.set_train_batch_size(8)
    engine.step()
    engine.set_train_batch_size(3)
    go(engine, 3)
    assert engine.global_steps == 2


def test_the_model_stays_where_it_is() -> None:
    engine = small(2)
    assert engine.to(engine.device) is engine.float() is engine
    with pytest.raises(RuntimeError, match="before minizero.initialize"):
        engine.half()
    go(engine)


# --- Weights, getters, reports ---


def handed_out(stage: int, threshold: int) -> None:
    zero = {"stage3_param_persistence_threshold": threshold}
    engine = start(stage, fp16={"enabled": True}, zero_optimization=zero)
    feed(engine, *batches(1, 1, rows=2)[0])
    assert all(name.startswith("module.") for name, _ in engine.named_parameters())
    assert engine.blocks is engine.module.blocks  # what only the model has
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(engine, "nonsense")  # noqa: B009
    weights = engine._zero3_consolidated_16bit_state_dict()
    some = engine.module_state_dict(exclude_frozen_parameters=True)
    frozen = {"places.weight", *(f"blocks.{i}.scale" for i in range(4))}
    assert weights.keys() - some.keys() == (frozen if weights else set())
    with minizero.zero.GatheredParameters(engine.module.parameters()):
        inside = {k: v.clone() for k, v in engine.state_dict().items()}
    assert all(torch.equal(inside[f"module.{k}"], v) for k, v in weights.items())
    whole = stage < 3 or threshold  # a small model stays unsharded
    for module in (engine, engine.module, engine.module.blocks[1].up):
        if whole:
            assert all(v.isfinite().all() for v in module.state_dict().values())
        else:
            with pytest.raises(RuntimeError, match="engine.module_state_dict()"):
                module.state_dict()


def test_state_dicts_have_no_holes(two: Pool) -> None:
    for stage, threshold in (*((s, 0) for s in STAGES), (3, 10**5)):
        two.run(handed_out, stage, threshold)


def loaded_weights(stage: int, by: str) -> None:
    """Loaded weights are there after the next update too."""
    half = {"enabled": True, "loss_scale": 1}
    engine = start(stage, fp16=half, gradient_clipping=0.0)
    torch.manual_seed(5)
    new = Nasty().half().state_dict()
    if by == "model":
        engine.module.load_state_dict(new)
    elif by == "engine":
        engine.load_state_dict({f"module.{k}": v for k, v in new.items()})
    else:
        engine.load_module_state_dict(new)
    for group in engine.optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    feed(engine, *batches(1, 1, rows=2)[0])
    assert engine.was_step_applied()
    got, names = engine.module_state_dict(), dict(engine.module.named_parameters())
    assert all(torch.equal(v, new[k]) for k, v in got.items() if k in names)


@pytest.mark.parametrize("stage", STAGES)
def test_load_state_dict(two: Pool, stage: int) -> None:
    for by in ("engine", "module", *(["model"] if stage < 3 else [])):
        two.run(loaded_weights, stage, by)


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
    names = ["1.safetensors", "3.safetensors", "pytorch_model.bin"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    for got in (
        torch.load(tmp_path / "pytorch_model.bin", weights_only=True),
        load_file(tmp_path / "1.safetensors"),
        load_file(tmp_path / "3.safetensors"),
    ):
        assert same_weights(got, expected)
    assert expected["head.weight"].dtype == torch.bfloat16
    modes = {p.stat().st_mode for p in tmp_path.iterdir()}
    assert len(modes) == 1  # as readable as torch's


def test_getters(two: Pool) -> None:
    def run(stage: int) -> None:
        zero = {"stage3_gather_16bit_weights_on_model_save": stage == 3}
        engine = start(stage, zero_optimization=zero)
        assert engine.train_micro_batch_size_per_gpu() == 2
        assert engine.gradient_clipping() == 0.5 and not engine.fp16_enabled()
        assert engine.zero_optimization() == (stage > 0)
        assert engine.zero_optimization_partition_gradients() == (stage > 1)
        assert engine.zero_optimization_partition_weights() == (stage > 2)
        assert engine.zero_gather_16bit_weights_on_model_save() == (stage > 2)
        assert engine.zero_reduce_bucket_size() == 100
        assert engine.get_data_parallel_rank() == rank() == engine.global_rank
        x, y = batches(1, 1, rows=2)[0]
        with torch.no_grad():
            expected = engine(own(x, 2), own(y, 2))
            engine.empty_partition_cache()
            assert torch.equal(engine(own(x, 2), own(y, 2)), expected)

    for stage in STAGES:
        two.run(run, stage)


def test_loaders_of_an_engine(two: Pool) -> None:
    def run() -> None:
        engine = small(collate_fn=lambda samples: {"x": torch.stack(samples)})
        data = [torch.tensor(float(i)) for i in range(7)]
        loader = engine.deepspeed_io(data, batch_size=2, route="eval")
        seen = torch.cat([batch["x"] for batch in loader]).tolist()
        assert seen == [i % 7 for i in range(rank(), 8, 2)]
        assert len(next(iter(engine.deepspeed_io(data)))["x"]) == 1

    two.run(run)


def reported(**more: Any) -> tuple[str, Run]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        run = trained(1, 2, **more)
    return text.getvalue(), run


def test_reports(two: Pool) -> None:
    """What is asked for is printed once a step, on rank 0, and changes nothing."""
    (nothing, reference), _ = two.run(reported)
    assert nothing == ""
    phases = ("forward=", "backward=", "step=", "model TFLOPS=")
    for more, lines in (
        ({"steps_per_print": 3}, 2),
        ({"wall_clock_breakdown": True}, 6),
        ({"wall_clock_breakdown": True, "steps_per_print": 3}, 6),
    ):
        (text, run), (other, _) = two.run(reported, **more)
        assert other == "" and len(text.splitlines()) == lines
        assert same([run], [reference])
        last = text.splitlines()[-1]
        assert "samples/s=" in last
        timed = "wall_clock_breakdown" in more
        assert all(phase in last for phase in phases) == timed
        averaged = "lr=[0.01, 0.003], mom=[(0.9, 0.999)" in last
        assert averaged == ("steps_per_print" in more)


def test_model_flops() -> None:
    """A forward of n tokens is 2 n W; a backward is two forwards."""
    engine, *_ = minizero.initialize(
        model=nn.Linear(5, 7),
        config={
            "train_batch_size": 6,
            "gradient_accumulation_steps": 2,
            "wall_clock_breakdown": True,
            "optimizer": SGD,
        },
    )
    for _ in range(6):
        engine.backward(engine(torch.randn(3, 5)).sum())
        engine.step()
    assert engine.meter.forward_flops == 2 * 3 * 5 * 7
    last = engine.meter
    assert last.flops == 3 * 2 * (2 * 3 * 5 * 7)
    assert (last.samples, last.steps) == (6, 1)
    assert last.samples_per_second == 6 / last.seconds
    assert set(last.milliseconds) == {"forward", "backward", "step"}
    assert sum(last.milliseconds.values()) <= 1e3 * last.seconds


def test_model_flops_of_attention() -> None:
    """b heads of s tokens and size d: 2 b s^2 d, twice."""
    engine = small()
    engine.meter.detailed = True
    with engine.meter.phase("forward"):
        q = torch.randn(2, 3, 16, 8, requires_grad=True)
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert engine.meter.forward_flops == 2 * 2 * (2 * 3) * 16 * 16 * 8


# --- Without an optimizer ---


PLACES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "3, on cpu": {"stage": 3, "offload_param": {"device": "cpu"}},
    "3, on nvme": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/tmp"},
    },
}


def evaluated(zero: dict[str, Any], folder: Path) -> None:
    """Weights of a training run, in an engine that cannot train."""
    torch.manual_seed(0)
    inside = "offload_param" not in zero
    with minizero.zero.Init(config={"zero_optimization": zero}, enabled=inside):
        model = Nasty()
    engine, *rest = minizero.initialize(
        model=model,
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero},
    )
    assert rest == [None] * 3 and engine.optimizer is None and not engine.net.trained
    assert engine.get_lr() == engine.get_mom() == []
    assert engine.get_global_grad_norm() is None
    x, y = batches(1, 1, rows=2)[0]
    other = start(2)
    feed(other, x, y)
    other.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 1
    expected, loss = (e(own(x, 2), own(y, 2)) for e in (other, engine))
    assert torch.equal(loss, expected) and not loss.requires_grad
    for use in (lambda: engine.backward(expected), engine.step):
        with pytest.raises(RuntimeError, match="no optimizer, so it only evaluates"):
            use()
    weights = engine.module_state_dict()
    assert same_weights(weights, other.module_state_dict()) or rank() > 0
    engine.destroy()


@pytest.mark.parametrize("place", PLACES)
def test_without_an_optimizer_it_evaluates(
    two: Pool, tmp_path: Path, place: str
) -> None:
    two.run(evaluated, PLACES[place], tmp_path)


def test_gradients_of_inputs_without_an_optimizer() -> None:
    engine, *_ = minizero.initialize(model=nn.Linear(2, 1), config=ONE)
    x = torch.ones(1, 2, requires_grad=True)
    engine(x).sum().backward()
    assert torch.equal(x.grad, engine.module.weight)


# --- Checkpoints ---


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
        files = {"nvme_path": "/tmp"} if on == "nvme" else {}
        zero[f"offload_{name}"] = {"device": on} | files
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


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def dropping(plan: str, **more: Any) -> tuple[minizero.Engine, Any]:
    """An engine and endless batches; 10 steps are an epoch."""
    torch.manual_seed(3 + rank())
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    rising = {"type": "WarmupLR", "params": {"warmup_num_steps": 12}}
    engine, _, loader, _ = minizero.initialize(
        model=Dropping(),
        training_data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
        config={
            "train_batch_size": 8,
            "optimizer": ADAMW,
            "scheduler": rising,
            "zero_optimization": PLANS[plan],
            **more,
        },
    )
    return engine, endless(loader)


def take(engine: minizero.Engine, stream: Any, steps: int) -> list[tuple[Any, ...]]:
    seen = []
    while len(seen) < steps:
        loss = engine(*next(stream))
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if boundary:
            norm = engine.get_global_grad_norm()
            seen.append((loss.item(), norm, *engine.get_lr(), engine.global_samples))
    return seen


def resumed(
    plan: str, folder: Path, load: bool, training: bool = True, **more: Any
) -> list[tuple[Any, ...]]:
    """Steps after a save in mid-epoch, or after its load; on into the next epoch."""
    engine, stream = dropping(plan, **more)
    engine.train(training)
    take(engine, stream, 2 if load else 7)  # the 2 are forgotten
    if load:
        path, client = engine.load_checkpoint(folder)
        assert path == str(folder / "global_step7") and client == {"best": (1.5, None)}
    else:
        assert engine.save_checkpoint(folder, client_state={"best": (1.5, None)})
    rest = take(engine, stream, 8)
    engine.destroy()
    return rest


@pytest.mark.parametrize("name", PLANS)
def test_resumed_under_another_plan_it_is_the_same_run(
    two: Pool, tmp_path: Path, name: str
) -> None:
    names = list(PLANS)
    reference = two.run(resumed, name, tmp_path, False)
    assert len({step[0] for step in reference[0]}) == 8
    for further in (1, 3):
        other = names[(names.index(name) + further) % len(names)]
        assert two.run(resumed, other, tmp_path, True) == reference, other


def test_resumed_with_fp16_and_accumulation(two: Pool, tmp_path: Path) -> None:
    more = {
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3},
    }
    reference = two.run(resumed, "2", tmp_path, False, **more)
    assert two.run(resumed, "3, all on cpu", tmp_path, True, **more) == reference


def test_resumed_on_another_number_of_ranks(
    two: Pool, four: Pool, tmp_path: Path
) -> None:
    """The global batches are the same, divided differently; so is the mean loss."""

    def losses(runs: list[list[tuple[Any, ...]]]) -> Tensor:
        return torch.tensor([[step[0] for step in run] for run in runs]).mean(0)

    reference = four.run(resumed, "3", tmp_path, False, training=False)
    got = two.run(resumed, "1", tmp_path, True, training=False)
    torch.testing.assert_close(losses(got), losses(reference))
    norms = ([step[1:] for step in runs[0]] for runs in (got, reference))
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in norms)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_what_is_loaded(two: Pool, tmp_path: Path) -> None:
    def run(folder: Path) -> None:
        engine, stream = dropping("1")
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            assert engine.load_checkpoint(folder) == (None, None)
        assert len(shown) == (rank() == 0)
        take(engine, stream, 2)
        engine.save_checkpoint(folder, tag=5, background=True)
        engine.finish_checkpoint()
        weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
        rates = engine.get_lr()
        take(engine, stream, 1)
        engine.save_checkpoint(folder, "not-the-latest", save_latest=False)
        other, stream = dropping("3")
        other.load_checkpoint(folder, load_module_only=True)
        assert other.global_steps == 0 and not any(other.optimizer.state.values())
        got = other.module_state_dict()
        assert all(torch.equal(v, weights[k]) for k, v in got.items())
        assert other.training_dataloader.seen in (None, 0)
        other.load_checkpoint(folder, load_optimizer_states=False)
        assert other.global_steps == 2
        assert not any(other.optimizer.state_dict()["state"].values())
        other.load_checkpoint(folder, load_lr_scheduler_states=False)
        assert any(other.optimizer.state_dict()["state"].values())
        assert other.global_samples == 16 and other.get_lr() == rates
        other.load_checkpoint(folder, "not-the-latest")
        assert other.global_steps == 3 and other.get_lr() == engine.get_lr()
        with pytest.raises(minizero.checkpoint.CheckpointError, match="'5'"):
            other.load_checkpoint(folder, "none")
        minizero.checkpoint.save(engine.net, folder / "bare", "x", extra={"a": 1})
        assert other.load_checkpoint(folder / "bare")[1] == {"a": 1}

    two.run(run, tmp_path)
    assert (tmp_path / "latest").read_text().strip() == "5"


def states(plan: str) -> list[Tensor]:
    engine, stream = dropping(plan, gradient_clipping=0.0)
    take(engine, stream, 2)
    found = engine.optimizer.state_dict()["state"].values()
    engine.destroy()
    return [torch.cat([s["exp_avg"], s["exp_avg_sq"]]) for s in found]


def test_optimizer_states_are_shown_wherever_they_are_stored(two: Pool) -> None:
    expected = two.run(states, "3")[0]
    for plan in ("3, all on cpu", "3, all on nvme"):
        got = two.run(states, plan)[0]
        assert all(map(torch.equal, got, expected)) and len(got) == len(expected) > 0


@pytest.mark.parametrize("make", ["StepLR", "OneCycleLR", "SequentialLR", "LambdaLR"])
def test_schedulers_of_torch_are_resumed(make: str, tmp_path: Path) -> None:
    def schedule(inner: Any) -> Any:
        if make == "SequentialLR":
            first = schedulers.LinearLR(inner, 0.1, total_iters=3)
            parts = [first, schedulers.MultiStepLR(inner, [2, 4])]
            return schedulers.SequentialLR(inner, parts, [3])
        options: dict[str, Any] = {
            "StepLR": {"step_size": 2, "gamma": 0.5},
            "OneCycleLR": {"max_lr": 0.1, "total_steps": 20},
            "LambdaLR": {"lr_lambda": lambda step: 0.5**step},
        }
        return getattr(schedulers, make)(inner, **options[make])

    def rates(engine: minizero.Engine, steps: int) -> list[float]:
        return [rate for _ in range(steps) for rate in (go(engine) and engine.get_lr())]

    engine = small(0, schedule)
    rates(engine, 4)
    engine.save_checkpoint(tmp_path)
    expected = rates(engine, 4)
    other = small(0, schedule)
    other.load_checkpoint(tmp_path)
    assert rates(other, 4) == expected and len(set(expected)) > 1


MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another scheduler": (
        {"make": lambda o: schedulers.StepLR(o, 2)},
        {"make": lambda o: schedulers.LambdaLR(o, lambda step: 0.5**step)},
        "is a LambdaLR and was a StepLR; load_lr_scheduler_states=False",
    ),
    "another schedule of DeepSpeed's": (
        {"make": SCHEDULES["WarmupLR"]},
        {"make": SCHEDULES["LRRangeTest"]},
        "is a LRRangeTest and was a WarmupLR",
    ),
    "other data": (
        {"training_data": [torch.ones(2)] * 8},
        {"training_data": [torch.ones(2)] * 7},
        "of 8 samples, and this has 7",
    ),
}


def misfit(stage: int, folder: Path, name: str, only_on: int | None) -> str:
    saved, here, sentence = MISFITS[name]
    before = small(stage, **saved)
    go(before, 3)
    before.save_checkpoint(folder)
    engine = small(stage, **(here if only_on in (None, rank()) else saved))
    go(engine)
    weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
    rates, random = engine.get_lr(), torch.get_rng_state()
    with pytest.raises(minizero.checkpoint.CheckpointError, match=sentence) as error:
        engine.load_checkpoint(folder)
    assert same_weights(engine.module_state_dict(), weights)
    assert engine.get_lr() == rates and engine.global_steps == 1
    assert torch.equal(torch.get_rng_state(), random)
    engine.training_dataloader = None  # and then without what does not fit
    engine.load_checkpoint(folder, load_lr_scheduler_states="data" in name)
    assert engine.global_steps == 3
    assert same_weights(engine.module_state_dict(), before.module_state_dict())
    return str(error.value)


@pytest.mark.parametrize("name", MISFITS)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    two: Pool, tmp_path: Path, name: str
) -> None:
    for stage, only_on in ((0, None), (3, None), (3, 1)):
        folder = tmp_path / f"{stage}, {only_on}"
        first, second = two.run(misfit, stage, folder, name, only_on)
        assert first == second


@pytest.mark.parametrize("stage", STAGES)
def test_no_checkpoint_within_a_step(tmp_path: Path, stage: int) -> None:
    engine, stream = dropping(str(stage), gradient_accumulation_steps=4)
    for _ in range(2):
        engine.backward(engine(*next(stream)))
        engine.step()
    with pytest.raises(minizero.checkpoint.CheckpointError, match="gradients"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.zero_grad()
    assert engine.save_checkpoint(tmp_path)
    engine.backward(engine(*next(stream)))
    engine.load_checkpoint(tmp_path)  # gradients from before a load are gone
    assert not engine.net.has_gradients and engine.micro_steps == 0
    take(engine, stream, 1)
    assert engine.save_checkpoint(tmp_path)


# --- Imports, and scripts ---


def test_an_import_leaves_the_engine_out() -> None:
    """Configs and checkpoints cost time that other programs need not pay."""
    code = (
        "import sys, minizero; loaded = set(sys.modules)\n"
        "late = 'config engine checkpoint offload lab'.split()\n"
        "late = ['minizero.' + m for m in late] + ['safetensors']\n"
        "print([m for m in late if m in loaded])\n"
        "minizero.initialize; print('initialize' in dir(minizero))\n"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
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


@pytest.mark.thorough
def test_a_script_for_deepspeed_under_torchrun(tmp_path: Path, tool: Tool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    source = {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 2,
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
        "zero_optimization": {"stage": 3},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(source))
    ranks = ("--nproc-per-node=2", "--local-addr=127.0.0.1")
    script = ("train.py", "--deepspeed", "--deepspeed_config=ds_config.json")
    out = tool("torchrun", *ranks, *script, cwd=tmp_path)
    assert "steps 4 samples 48" in out
    assert "rate [0.01]" in out
