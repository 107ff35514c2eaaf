"""The engine: a config becomes what `parallelize` makes by hand, and runs resume.

Most tests run in this process, one rank of one; `two` is for what ranks do together.
Equality of stages is in test_equal, equality with DeepSpeed in test_parity.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nasty
import pytest
import torch
from nasty import Nasty, batches, on_two_ranks, own, same
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import minizero
from minizero.checkpoint import CheckpointError
from minizero.ranks import Pool, device, rank, world_size

ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}
SGD = {"type": "SGD", "params": {"lr": 0.1}}
ONE = {"train_batch_size": 1}


def config(stage: int, m: int = 1, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 100}
    zero |= {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
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


def trained(stage: int, m: int = 1, steps: int = 6, **more: Any) -> dict[str, Tensor]:
    """The weights after some steps of m micro-batches."""
    engine = start(stage, m, **more)
    for x, y in batches(steps, m, rows=2):
        engine.module.step = engine.global_steps
        feed(engine, x, y)
    return {k: v.clone() for k, v in engine.module_state_dict().items()}


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


# --- Optimizers and schedulers ---


def test_a_scheduler_that_needs_a_loss() -> None:
    engine = small(0, partial(schedulers.ReduceLROnPlateau, patience=0))
    for metric, rate in ((1.0, 0.1), (2.0, 0.01)):
        engine.backward(engine(torch.ones(1, 2)).mean())
        engine.step(lr_kwargs={"metrics": metric})
        assert engine.was_step_applied() and engine.get_lr() == pytest.approx([rate])


def test_what_the_engine_and_its_optimizer_refuse() -> None:
    engine = small(2)
    optimizer = engine.optimizer
    assert optimizer is not None and optimizer.loss_scale == 1.0
    assert engine.to(engine.device) is engine.float() is engine
    for use, sentence in (
        (lambda: optimizer.add_param_group({"params": []}), "all parameter groups"),
        (lambda: optimizer.load_state_dict({}), "engine.load_checkpoint"),
        (lambda: optimizer.step(lambda: 0.0), "no closure: call engine"),
        (lambda: setattr(optimizer, "loss_scale", 2.0), "exists with fp16 only"),
        (optimizer.optimizer.step, "engine.step"),
        (engine.half, "before minizero.initialize"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=sentence):
            use()
    go(engine)
    engine.destroy()
    other = engine.save_checkpoint, engine.load_checkpoint
    for call in (engine, engine.backward, *other):
        with pytest.raises(RuntimeError, match="was destroyed; make a new one"):
            call(torch.ones(1, 2))


# --- What `initialize` takes ---


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


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "takes one config, config=..., not 0"),
    ({"config": ONE, "config_params": ONE}, "not 2"),
    ({"config": {}}, "train_batch_size"),
    ({"config": ONE, "lr_scheduler": lambda o: 3}, "needs an optimizer"),
    ({"config": ONE, "mpu": object()}, "all ranks are data-parallel"),
    ({"config": ONE, "model": None}, "takes a torch.nn.Module, not None"),
    ({"config": ONE, "optimizer": lambda p: p}, "makes one of parameters"),
    (
        {"config": ONE, "optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
        "not the model's",
    ),
    ({"config": ONE | {"optimizer": SGD}, "lr_scheduler": lambda o: 3}, "with step"),
    ({"config": ONE | {"optimizer": {"type": "SGD", "params": {"lrr": 1}}}}, "lrr"),
)


@pytest.mark.parametrize("given, sentence", REFUSED)
def test_what_initialize_refuses(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        minizero.initialize(**{"model": nn.Linear(2, 2), **given})


ELSEWHERE = schedulers.StepLR(torch.optim.SGD([torch.ones(1)]), 1)
NO_EFFECT: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"scheduler": {"type": "WarmupLR"}}, {}, "scheduler .* there is no optimizer"),
    ({"optimizer": SGD}, {"lr_scheduler": ELSEWHERE}, "moves another optimizer"),
    (
        {"optimizer": SGD},
        {"optimizer": torch.optim.SGD},
        "optimizer has no effect: initialize got another",
    ),
    (
        {"zero_optimization": {"offload_param": {"device": "cpu"}}},
        {},
        "offload_param has no effect at stage 0",
    ),
)


@pytest.mark.parametrize("sections, given, sentence", NO_EFFECT)
def test_what_has_no_effect_is_reported(
    sections: dict[str, Any], given: dict[str, Any], sentence: str
) -> None:
    with pytest.warns(UserWarning, match=sentence):
        minizero.initialize(model=nn.Linear(2, 1), config=ONE | sections, **given)


# --- Misuse ---


def test_an_update_after_a_failed_backward_is_refused() -> None:
    engine = start(3)
    x, y = batches(1, 1, rows=2)[0]
    loss = engine(own(x, 2), own(y, 2))
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.backward(nasty.Fails.apply(loss))
    with pytest.raises(RuntimeError, match="gradients are incomplete"):
        engine.step()
    engine.zero_grad()
    feed(engine, x, y)


# --- Weights, getters, reports ---


@on_two_ranks
def test_state_dicts_have_no_holes() -> None:
    engine = start(3, fp16={"enabled": True})
    feed(engine, *batches(1, 1, rows=2)[0])
    assert all(name.startswith("module.") for name, _ in engine.named_parameters())
    weights = engine._zero3_consolidated_16bit_state_dict()
    some = engine.module_state_dict(exclude_frozen_parameters=True)
    frozen = {"places.weight", *(f"blocks.{i}.scale" for i in range(4))}
    assert weights.keys() - some.keys() == (frozen if weights else set())
    with minizero.zero.GatheredParameters(engine.module.parameters()):
        inside = {k: v.clone() for k, v in engine.state_dict().items()}
    assert all(torch.equal(inside[f"module.{k}"].cpu(), v) for k, v in weights.items())
    for module in (engine, engine.module, engine.module.blocks[0].up):
        with pytest.raises(RuntimeError, match="engine.module_state_dict()"):
            module.state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_loaded_weights_outlive_an_update(stage: int) -> None:
    half = {"enabled": True, "loss_scale": 1}
    engine = start(stage, fp16=half, gradient_clipping=0.0)
    torch.manual_seed(5)
    new = Nasty().half().state_dict()
    with minizero.zero.GatheredParameters(engine.module.parameters(), 0):
        engine.load_state_dict({f"module.{k}": v for k, v in new.items()})
    for group in engine.optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    feed(engine, *batches(1, 1, rows=2)[0])
    assert engine.was_step_applied()
    got, names = engine.module_state_dict(), dict(engine.module.named_parameters())
    assert same(*({name: state[name] for name in names} for state in (got, new)))


def test_whole_weights_in_one_file(two: Pool, tmp_path: Path) -> None:
    def run() -> dict[str, Tensor]:
        for stage in (1, 3):
            engine = start(stage, bf16={"enabled": True})
            assert engine.save_16bit_model(tmp_path, f"{stage}.bin")
        return engine.module_state_dict()

    expected = two.run(run)[0]
    for stage in (1, 3):
        got = torch.load(tmp_path / f"{stage}.bin", weights_only=True)
        assert same(got, expected)
    assert expected["head.weight"].dtype == torch.bfloat16


def test_getters() -> None:
    engine = start(3)
    for name, value in {
        "train_micro_batch_size_per_gpu": 2,
        "get_batch_info": (2, 2, 1),
        "gradient_clipping": 0.5,
        "fp16_enabled": False,
        "zero_optimization_stage": 3,
        "zero_optimization_partition_gradients": True,
        "zero_gather_16bit_weights_on_model_save": False,
        "get_mom": [(0.9, 0.999), (0.9, 0.999)],
    }.items():
        assert getattr(engine, name)() == value, name
    assert engine.blocks is engine.module.blocks  # what only the model has
    with pytest.raises(AttributeError, match="nonsense"):
        engine.nonsense()
    x, y = batches(1, 1, rows=2)[0]
    with torch.no_grad():
        expected = engine(own(x, 2), own(y, 2))
        engine.empty_partition_cache()
        assert torch.equal(engine(own(x, 2), own(y, 2)), expected)


def test_reports(two: Pool) -> None:
    """What is asked for is printed once a step, on rank 0."""

    def run() -> str:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            trained(1, 2, steps_per_print=3)
        return text.getvalue()

    text, other = two.run(run)
    assert other == "" and len(text.splitlines()) == 2
    for step, line in zip((3, 6), text.splitlines(), strict=True):
        assert line.startswith(f"step={step}, skipped=0, lr=[0.01, 0.003], mom=[(0.9")
        assert ", loss_scale=1, samples/s=" in line


# --- Without an optimizer ---


@on_two_ranks
def test_without_an_optimizer_it_evaluates(tmp_path: Path) -> None:
    """Weights of a training run, in an engine that cannot train."""
    torch.manual_seed(0)
    zero = placed(3) | {"stage3_param_persistence_threshold": 0}
    with minizero.zero.Init(config={"zero_optimization": zero}):
        model = Nasty()
    engine, *rest = minizero.initialize(
        model=model,
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero},
    )
    assert rest == [None] * 3 and engine.optimizer is None
    assert engine.get_lr() == engine.get_mom() == []
    assert engine.get_global_grad_norm() is None
    x, y = batches(1, 1, rows=2)[0]
    other = start(2)
    feed(other, x, y)
    other.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 1
    expected, loss = (e(own(x, 2), own(y, 2)) for e in (other, engine))
    assert torch.equal(loss, expected) and not loss.requires_grad
    for use in (lambda: engine.backward(expected), engine.step):
        with pytest.raises(RuntimeError, match="no optimizer, so it only evaluates"):
            use()
    weights = engine.module_state_dict()
    assert same(weights, other.module_state_dict()) or rank() > 0
    engine.destroy()


# --- Checkpoints ---


class Dropping(nn.Module):
    """Draws random numbers, so that a resumed run needs their state."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 1)
        self.blocks = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.blocks(x), y)


def placed(stage: int, optimizer: str = "none", param: str = "none") -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    for name, on in (("optimizer", optimizer), ("param", param)):
        files = {"nvme_path": "/tmp"} if on == "nvme" else {}
        zero[f"offload_{name}"] = {"device": on} | files
    return zero


def dropping(
    plan: dict[str, Any], micro_batches: int = 1
) -> tuple[minizero.Engine, Any]:
    """An engine in fp16 and endless batches; 10 steps are an epoch."""
    torch.manual_seed(3 + rank())
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    rising = {"type": "WarmupLR", "params": {"warmup_num_steps": 12}}
    engine, _, loader, _ = minizero.initialize(
        model=Dropping(),
        training_data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
        config={
            "train_batch_size": 8,
            "gradient_accumulation_steps": micro_batches,
            "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3},
            "optimizer": ADAMW,
            "scheduler": rising,
            "zero_optimization": plan,
        },
    )
    return engine, minizero.utils.RepeatingLoader(loader)


def take(engine: minizero.Engine, stream: Any, steps: int) -> list[tuple[Any, ...]]:
    seen = []
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(*next(stream))
            engine.backward(loss)
            engine.step()
        norm = engine.get_global_grad_norm()
        seen.append((loss.item(), norm, *engine.get_lr(), engine.global_samples))
    return seen


def resumed(plan: dict[str, Any], folder: Path, load: bool) -> list[tuple[Any, ...]]:
    """Steps after a save in mid-epoch, or after its load; on into the next epoch."""
    engine, stream = dropping(plan, 2)
    take(engine, stream, 2 if load else 7)  # the 2 are forgotten
    if load:
        path, client = engine.load_checkpoint(folder)
        assert path == str(folder / "global_step7") and client == {"best": (1.5, None)}
    else:
        assert engine.save_checkpoint(folder, client_state={"best": (1.5, None)})
    rest = take(engine, stream, 8)
    engine.destroy()
    return rest


def test_resumed_under_another_plan_it_is_the_same_run(
    two: Pool, tmp_path: Path
) -> None:
    """In mid-epoch and on into the next, with dropout; accumulated, in fp16."""
    reference = two.run(resumed, placed(2, "cpu"), tmp_path, False)
    assert len({step[0] for step in reference[0]}) == 8
    assert two.run(resumed, placed(3, "nvme", "nvme"), tmp_path, True) == reference


@on_two_ranks
def test_what_is_loaded(tmp_path: Path) -> None:
    engine, stream = dropping(placed(1))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert engine.load_checkpoint(tmp_path) == (None, None)
    assert len(shown) == (rank() == 0)
    take(engine, stream, 2)
    engine.save_checkpoint(tmp_path, tag=5, background=True)
    minizero.checkpoint.finish()
    weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
    rates = engine.get_lr()
    take(engine, stream, 1)
    engine.save_checkpoint(tmp_path, "not-the-latest", save_latest=False)
    other, stream = dropping(placed(3), 2)
    other.backward(other(*(torch.ones(2, n, device=device()) for n in (6, 1))))
    other.step()
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert not other.is_gradient_accumulation_boundary()  # the step begins anew
    assert other.global_steps == 0 and not any(other.optimizer.state.values())
    assert same(other.module_state_dict(), weights) or rank() > 0
    assert other.training_dataloader.seen in (None, 0)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert other.global_steps == 2
    assert not any(other.optimizer.state_dict()["state"].values())
    other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert any(other.optimizer.state_dict()["state"].values())
    assert other.global_samples == 16 and other.get_lr() == rates
    other.load_checkpoint(tmp_path, "not-the-latest")
    assert other.global_steps == 3 and other.get_lr() == engine.get_lr()
    with pytest.raises(CheckpointError, match="'5'"):
        other.load_checkpoint(tmp_path, "none")
    minizero.checkpoint.save(engine.net, tmp_path / "bare", "x", extra={"a": 1})
    assert other.load_checkpoint(tmp_path / "bare")[1] == {"a": 1}
    assert (tmp_path / "latest").read_text().strip() == "5"


def test_a_scheduler_of_torch_is_resumed(tmp_path: Path) -> None:
    def schedule(inner: Any) -> Any:
        first = schedulers.LinearLR(inner, 0.1, total_iters=3)
        second = schedulers.LambdaLR(inner, lambda step: 0.5**step)
        return schedulers.SequentialLR(inner, [first, second], [3])

    def rates(engine: minizero.Engine) -> list[float]:
        return [rate for _ in range(4) for rate in (go(engine) and engine.get_lr())]

    engine, other = small(0, schedule), small(0, schedule)
    rates(engine)
    engine.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    expected = rates(engine)
    assert rates(other) == expected and len(set(expected)) > 1


Misfit = tuple[dict[str, Any], dict[str, Any], str]
MISFITS: dict[str, Misfit] = {
    "another scheduler": (
        {"make": lambda o: schedulers.StepLR(o, 2)},
        {"make": lambda o: schedulers.LambdaLR(o, lambda step: 0.5**step)},
        "is a LambdaLR and was a StepLR; load_lr_scheduler_states=False",
    ),
    "other data": (
        {"training_data": [torch.ones(2)] * 8},
        {"training_data": [torch.ones(2)] * 7},
        "of 8 samples, and this has 7",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    two: Pool, tmp_path: Path, name: str
) -> None:
    """What does not fit on rank 1 alone is told by all ranks."""

    def run() -> str:
        saved, here, sentence = MISFITS[name]
        before = small(3, **saved)
        go(before, 3)
        before.save_checkpoint(tmp_path)
        engine = small(3, **(here if rank() == 1 else saved))
        go(engine)
        weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
        rates, random = engine.get_lr(), torch.get_rng_state()
        with pytest.raises(CheckpointError, match=sentence) as error:
            engine.load_checkpoint(tmp_path)
        assert same(engine.module_state_dict(), weights)
        assert engine.get_lr() == rates and engine.global_steps == 1
        assert torch.equal(torch.get_rng_state(), random)
        engine.training_dataloader = None  # and then without what does not fit
        engine.load_checkpoint(tmp_path, load_lr_scheduler_states="data" in name)
        assert engine.global_steps == 3
        assert same(engine.module_state_dict(), before.module_state_dict())
        return str(error.value)

    first, second = two.run(run)
    assert first == second
