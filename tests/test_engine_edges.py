"""An engine that only evaluates, whose batches change size, or that is misused."""

from __future__ import annotations

import contextlib
import operator
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nasty
import pytest
import torch
from nasty import Nasty, batches, own
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

import minizero
from minizero.checkpoint.api import CheckpointError
from minizero.engine.data import Loader
from minizero.engine.delegate import REFUSED
from minizero.engine.lr_schedules import SCHEDULES
from minizero.ranks.launch import Pool, rank, world_size

STAGES = (0, 1, 2, 3)
ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    with Pool(3) as pool:
        yield pool


def config(stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        **more,
    }


def nasty_engine(stage: int, accumulation: int = 1, **more: Any) -> minizero.Engine:
    torch.manual_seed(0)
    more = {"optimizer": ADAMW} | more
    return minizero.initialize(
        model=Nasty(), config=config(stage, accumulation, **more)
    )[0]


def small(
    stage: int = 0, make: Callable[[Any], Any] | None = None, **given: Any
) -> minizero.Engine:
    """A linear model under SGD, with a scheduler; `given`: to `initialize`."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return minizero.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=make and make(optimizer),
        config={
            "train_batch_size": world_size(),
            "zero_optimization": {"stage": stage},
        },
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


def copied(engine: minizero.Engine) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in engine.module_state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# no optimizer


def evaluated(zero: dict[str, Any], folder: Path) -> None:
    """Weights of a training run, in an engine that cannot train."""
    torch.manual_seed(0)
    with minizero.zero.Init(
        config={"zero_optimization": zero}, enabled="offload_param" not in zero
    ):
        model = Nasty()
    engine, optimizer, loader, scheduler = minizero.initialize(
        model=model,
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero},
    )
    assert optimizer is loader is scheduler is engine.optimizer is None
    flats = [flat for unit in engine.net.units for flat in unit.flats]
    assert not any(f.trainable or f.grad is not None or f.grad_shard for f in flats)
    assert engine.get_lr() == engine.get_mom() == []
    assert engine.get_global_grad_norm() is None

    trained = nasty_engine(2)
    for x, y in batches(2, 1, rows=2):
        trained.backward(trained(own(x, 2), own(y, 2)))
        trained.step()
    trained.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 2
    x, y = batches(1, 1, rows=2)[0]
    expected = trained(own(x, 2), own(y, 2))
    loss = engine(own(x, 2), own(y, 2))
    assert torch.equal(loss, expected) and not loss.requires_grad
    with torch.no_grad():
        assert torch.equal(engine(own(x, 2), own(y, 2)), expected)
    for use in (lambda: engine.backward(expected), engine.step):
        with pytest.raises(RuntimeError, match="no optimizer: it evaluates"):
            use()
    weights = engine.module_state_dict()
    expected_weights = trained.module_state_dict()
    if rank() == 0:
        assert equal(weights, expected_weights)

    engine.zero_grad()
    engine.save_checkpoint(folder, "weights")
    other = nasty_engine(1)
    with pytest.raises(CheckpointError, match="was frozen"):
        other.load_checkpoint(folder, "weights")
    other.load_checkpoint(folder, "weights", load_optimizer_states=False)
    assert equal(other.module_state_dict(), expected_weights)
    engine.destroy()


PLACES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "3, on cpu": {"stage": 3, "offload_param": {"device": "cpu"}},
    "3, on nvme": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/tmp"},
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_without_an_optimizer_it_evaluates(
    two: Pool, tmp_path: Path, place: str
) -> None:
    two.run(evaluated, PLACES[place], tmp_path)


def test_gradients_of_inputs_without_an_optimizer() -> None:
    engine, *_ = minizero.initialize(
        model=nn.Linear(2, 1), config={"train_batch_size": 1}
    )
    x = torch.ones(1, 2, requires_grad=True)
    engine(x).sum().backward()
    assert torch.equal(x.grad, engine.module.weight)


def test_a_scheduler_without_an_optimizer_has_no_effect() -> None:
    with pytest.warns(UserWarning, match="scheduler has no effect: there is no opt"):
        *_, scheduler = minizero.initialize(
            model=nn.Linear(2, 1),
            config={"train_batch_size": 1, "scheduler": {"type": "WarmupLR"}},
        )
    assert scheduler is None


# a checkpoint that does not fit


def a_step(optimizer: Any) -> Any:
    return schedulers.StepLR(optimizer, 2)


def a_lambda(optimizer: Any) -> Any:
    return schedulers.LambdaLR(optimizer, lambda step: 0.5**step)


def in_turn(parts: int) -> Callable[[Any], Any]:
    def make(optimizer: Any) -> Any:
        constant = [schedulers.ConstantLR(optimizer) for _ in range(parts)]
        return schedulers.SequentialLR(optimizer, constant, list(range(2, parts + 1)))

    return make


def samples(number: int) -> list[Tensor]:
    return [torch.ones(2)] * number


MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another scheduler": (
        {"make": a_step},
        {"make": a_lambda},
        "the scheduler is LambdaLR here and was StepLR; without its scheduler",
    ),
    "another schedule of DeepSpeed's": (
        {"make": SCHEDULES["WarmupLR"]},
        {"make": SCHEDULES["LRRangeTest"]},
        "the scheduler is LRRangeTest here and was WarmupLR; without its scheduler",
    ),
    "a scheduler of other parts": (
        {"make": in_turn(3)},
        {"make": in_turn(2)},
        "load_lr_scheduler_states=False",
    ),
    "other data": (
        {"make": a_step, "training_data": samples(8)},
        {"make": a_step, "training_data": samples(7)},
        "of 8 samples, and this is of 7 samples; .*training_dataloader is None",
    ),
}


def misfit(stage: int, folder: Path, name: str) -> None:
    saved, here, sentence = MISFITS[name]
    before = small(stage, **saved)
    go(before, 3)
    before.save_checkpoint(folder)
    engine = small(stage, **here)
    go(engine)
    weights, rates = copied(engine), engine.get_lr()
    schedule = str(engine.lr_scheduler.state_dict())
    torch.manual_seed(5 + rank())
    random = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=sentence):
        engine.load_checkpoint(folder)
    assert equal(copied(engine), weights) and engine.get_lr() == rates
    assert str(engine.lr_scheduler.state_dict()) == schedule
    assert engine.global_steps == 1 and torch.equal(torch.get_rng_state(), random)
    # and then without what does not fit
    engine.training_dataloader = None
    engine.load_checkpoint(folder, load_lr_scheduler_states="data" in name)
    assert engine.global_steps == 3 and equal(copied(engine), copied(before))


@pytest.mark.parametrize("name", MISFITS)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    two: Pool, tmp_path: Path, name: str
) -> None:
    for stage in (0, 3):
        two.run(misfit, stage, tmp_path / str(stage), name)


def test_a_misfit_on_one_rank_is_refused_on_all(two: Pool, tmp_path: Path) -> None:
    def run() -> str:
        go(engine := small(3, a_step))
        engine.save_checkpoint(tmp_path)
        engine = small(3, a_lambda if rank() else a_step)
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(tmp_path)
        return str(error.value)

    first, second = two.run(run)
    assert first == second and "LambdaLR here and was StepLR" in first


def test_a_scheduler_that_has_no_copy_is_resumed_all_the_same(tmp_path: Path) -> None:
    class Awkward(schedulers.StepLR):
        def __deepcopy__(self, copies: Any) -> Any:
            raise TypeError("no copy")

    engine = small(0, lambda optimizer: Awkward(optimizer, 2))
    go(engine, 3)
    engine.save_checkpoint(tmp_path)
    rates = engine.get_lr()
    go(engine, 2)
    engine.load_checkpoint(tmp_path)
    assert engine.get_lr() == rates


# batches


class Numbers(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((2,), 0.01 * i) for i in range(23))


def streamed(folder: Path | None = None, load: bool = False) -> list[float]:
    """Losses of a run over a stream; it is saved, or loaded, after two steps."""
    engine = small(3, training_data=Numbers())
    assert engine.training_dataloader is not None
    stream = minizero.utils.RepeatingLoader(engine.training_dataloader)
    losses = []
    if load:
        assert folder is not None
        engine.load_checkpoint(folder)
    for step in range(engine.global_steps, 10):
        if step == 5 and folder and not load:
            engine.save_checkpoint(folder)
        loss = engine(next(stream)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_training_on_a_stream_is_resumed(three: Pool, tmp_path: Path) -> None:
    unbroken = three.run(streamed, tmp_path)
    assert unbroken == three.run(streamed)
    assert three.run(streamed, tmp_path, load=True) == [run[5:] for run in unbroken]
    # ranks see different samples; the last round of 2 is left out, for 7 of 3
    assert len({run[0] for run in unbroken}) == 3


def test_loaders_of_an_engine(three: Pool) -> None:
    def run() -> None:
        engine = small(collate_fn=lambda samples: {"x": torch.stack(samples)})
        data = [torch.tensor(float(i)) for i in range(7)]
        for route in ("eval", "predict"):
            loader = engine.deepspeed_io(data, batch_size=2, route=route)
            assert isinstance(loader, Loader)
            seen = torch.cat([batch["x"] for batch in loader]).tolist()
            assert seen == [i % 7 for i in range(rank(), 9, 3)]
        loader = engine.deepspeed_io(data)
        assert len(next(iter(loader))["x"]) == 1
        every = engine.deepspeed_io(
            data, 7, data_sampler=SequentialSampler(data), collate_fn=torch.stack
        )
        assert isinstance(every, DataLoader)
        assert torch.equal(next(iter(every)), torch.arange(7.0))
        with pytest.raises(ValueError, match="one of train, eval, predict, not 'test'"):
            engine.deepspeed_io(data, route="test")

    three.run(run)


def resized(stage: int, change: bool) -> tuple[list[int], dict[str, Tensor]]:
    """2 micro-batches a step, then 3; by the engine's counting, or the script's."""
    engine = nasty_engine(stage, 2)
    boundaries = [False, True] * 2 + [False, False, True] * 2
    steps = []
    for i, (x, y) in enumerate(batches(10, 1, rows=2)):
        if i == 4 and change:
            engine.set_train_batch_size(6 * world_size())
        elif i == 4:
            engine.config = nasty_engine(stage, 3).config
        if not change:
            engine.set_gradient_accumulation_boundary(boundaries[i])
        engine.module.step = engine.global_steps
        engine.backward(engine(own(x, 2), own(y, 2)))
        engine.step()
        steps.append(engine.global_steps)
    assert engine.get_batch_info() == (6 * world_size(), 2, 3)
    assert engine.global_samples == (2 * 4 + 2 * 6) * world_size()
    return steps, engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_another_number_of_micro_batches(three: Pool, stage: int) -> None:
    steps, weights = three.run(resized, stage, True)[0]
    assert steps == [0, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    expected_steps, expected = three.run(resized, stage, False)[0]
    assert steps == expected_steps and equal(weights, expected)


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    data = samples(12)
    engine = minizero.initialize(
        model=nn.Linear(2, 1),
        training_data=data,
        config={"train_batch_size": 4, "gradient_accumulation_steps": 2}
        | {"optimizer": ADAMW},
    )[0]
    with pytest.raises(ValueError, match="5 is no multiple .* use 4 or 6"):
        engine.set_train_batch_size(5)
    for size in (0, -2, True, 2.0, "4"):
        for change in (engine.set_train_batch_size, engine.set_train_micro_batch_size):
            with pytest.raises(ValueError, match="a whole number of samples"):
                change(size)  # type: ignore[arg-type]
    assert engine.get_batch_info() == (4, 2, 2)
    loss = engine(torch.ones(1, 2)).mean()
    engine.backward(loss)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="under way, at micro-batch . of 2"):
            engine.set_train_batch_size(8)
        engine.step()
    engine.set_train_micro_batch_size(1)
    assert engine.get_batch_info() == (2, 1, 2)
    assert [len(b) for b in engine.training_dataloader or []] == [1] * 12
    engine.set_train_batch_size(3)
    go(engine, 3)
    assert engine.global_steps == 2
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert engine.position() == 0


# schedulers


def test_a_scheduler_that_needs_a_loss() -> None:
    engine = small(
        0, lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0)
    )
    loss = engine(torch.ones(1, 2)).mean()
    before = copied(engine)
    engine.backward(loss)
    for wrong in (None, {"loss": 1.0}):
        with pytest.raises(TypeError, match=r"ReduceLROnPlateau.step .*lr_kwargs="):
            engine.step(wrong)
        assert equal(copied(engine), before) and engine.micro_steps == 0
    engine.step({"metrics": 1.0})
    assert engine.was_step_applied() and engine.get_lr() == [0.1]
    engine.backward(engine(torch.ones(1, 2)).mean())
    engine.step(lr_kwargs={"metrics": 2.0})
    assert engine.get_lr() == pytest.approx([0.01])


def test_an_update_counts_though_its_scheduler_has_ended() -> None:
    engine = small(0, lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=2))
    go(engine)
    with pytest.raises(ValueError, match="Tried to step"):
        go(engine, 5)
    assert (engine.global_steps, engine.micro_steps) == (3, 3)
    assert engine.was_step_applied()


# wrong orders


def used_up(stage: int) -> None:
    engine = nasty_engine(stage)
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


def test_a_model_has_one_engine() -> None:
    for stage in STAGES:
        model = nn.Linear(2, 1)
        given = {"model": model, "config": config(stage, optimizer=ADAMW)}
        engine, *rest = minizero.initialize(**given)
        with pytest.warns(UserWarning, match="this model had an engine, which is over"):
            second, *_ = minizero.initialize(**given)
        with pytest.raises(RuntimeError, match="another minizero.initialize has taken"):
            go(engine)
        go(second)


def by_hand(stage: int, mixed: bool) -> Tensor:
    """Losses of six steps; with `loss.backward()` in every other one, if mixed."""
    engine = nasty_engine(stage, 2)
    losses = []
    for i, (x, y) in enumerate(batches(6, 1, rows=2)):
        engine.module.step = i
        loss = engine(own(x, 2), own(y, 2))
        if mixed:
            loss *= 1.0  # in place, as transformers' Trainer scales it
        loss.backward() if mixed and i % 2 else engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_a_backward_of_the_loss_itself_is_as_the_engines(three: Pool) -> None:
    for stage in STAGES:
        expected = three.run(by_hand, stage, False)
        assert all(map(torch.equal, three.run(by_hand, stage, True), expected))


def test_backward_twice_without_the_graph(two: Pool) -> None:
    """The second fails, on every rank, and the next step is as new."""

    def run(stage: int) -> bool:
        engine = nasty_engine(stage)
        data = [(own(x, 2), own(y, 2)) for x, y in batches(2, 1, rows=2)]
        loss = engine(*data[0])
        engine.backward(loss)
        with pytest.raises(RuntimeError, match="second time"):
            engine.backward(loss)
        engine.backward(engine(*data[1]))
        engine.step()
        other = nasty_engine(stage)
        other.backward(other(*data[1]))
        other.step()
        return equal(engine.module_state_dict(), other.module_state_dict())

    for stage in STAGES:
        assert two.run(run, stage) == [True, True]


def test_groups_without_parameters(three: Pool, tmp_path: Path) -> None:
    def run(stage: int) -> list[float]:
        torch.manual_seed(0)
        model = Nasty()
        filled = nasty.groups(model)
        engine, *_ = minizero.initialize(
            model=model,
            model_parameters=[{"params": []}, *filled, {"params": [], "lr": 0.5}],
            config=config(stage, optimizer=ADAMW),
        )
        x, y = batches(1, 1, rows=2)[0]
        engine.backward(engine(own(x, 2), own(y, 2)))
        engine.step()
        folder = tmp_path / str(stage)
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        return engine.get_lr()

    for stage in (0, 3):
        assert three.run(run, stage) == [[0.01, 0.01, 3e-3, 0.5]] * 3


def test_a_parameter_that_no_group_has() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with pytest.warns(UserWarning, match="2 parameters are in no group.*: 1.weight"):
        minizero.initialize(
            model=model,
            optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1),
            config=config(2),
        )
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]
    with pytest.raises(ValueError, match="that is not the model's; make the optimizer"):
        minizero.initialize(
            model=model,
            optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1),
            config=config(2),
        )


# what other libraries ask an engine for


def test_names_that_integrations_use(two: Pool) -> None:
    def run(stage: int) -> None:
        zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 3}
        engine = nasty_engine(stage, zero_optimization=zero)
        assert engine.zero_optimization_partition_gradients() == (stage > 1)
        assert engine.zero_optimization_partition_weights() == (stage > 2)
        assert engine.zero_gather_16bit_weights_on_model_save() == (stage > 2)
        weights = engine._zero3_consolidated_16bit_state_dict()
        frozen = engine._zero3_consolidated_16bit_state_dict(
            exclude_frozen_parameters=True
        )
        assert equal(weights, engine.module_state_dict())
        assert bool(weights.keys() - frozen.keys()) == bool(weights)
        x, y = batches(1, 1, rows=2)[0]
        with torch.no_grad():
            expected = engine(own(x, 2), own(y, 2))
            with contextlib.suppress(AttributeError):
                engine.empty_partition_cache()
                assert stage < 3 or not any(
                    flat.whole for unit in engine.net.units for flat in unit.flats
                )
            assert torch.equal(engine(own(x, 2), own(y, 2)), expected)

    for stage in (2, 3):
        two.run(run, stage)


def test_what_the_engine_does_not_do_is_said() -> None:
    engine = small()
    with pytest.raises(AttributeError, match="no reload_states: states rest where"):
        engine.reload_states  # noqa: B018
    assert not hasattr(engine, "offload_states")
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'x'"):
        engine.x  # noqa: B018


def test_the_methods_that_the_reference_lists(root: Path) -> None:
    page = (root / "book/config-reference.md").read_text()
    table, _, absent = page.split("engine's methods")[1].partition(
        "\n`allreduce_gradients`"
    )
    engine = small()
    names = set(re.findall(r"`([\w.]+)`", table)) - {"num_local_io_workers"}
    assert len(names) > 40
    for name in names:
        operator.attrgetter(name)(engine)
    absent = absent.partition("\n## ")[0]
    for name in re.findall(r"`(\w+)`", "`allreduce_gradients`" + absent):
        assert name in REFUSED and not hasattr(engine, name)


def compiled(stage: int, compile_it: bool) -> list[float]:
    """Blocks and a root; "eager" compiles to the same operations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 1)))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    given = config(stage, optimizer=ADAMW)
    if stage == 3:
        given["zero_optimization"] = zero
    engine = minizero.initialize(model=model, config=given)[0]
    if compile_it:
        engine.compile(backend="eager", compile_kwargs={"dynamic": False})
        engine.compile()
        assert engine.is_compiled and "forward" in vars(model[0])
    return go(engine, 3)


def test_compiled_blocks(two: Pool) -> None:
    for stage in (0, 3):
        assert two.run(compiled, stage, True) == two.run(compiled, stage, False)


# building


def test_init_and_initialize_agree_on_offload_below_stage_3(two: Pool) -> None:
    def run() -> list[str]:
        given = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": ADAMW,
            "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
        }
        with minizero.zero.Init(config=given):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            go(minizero.initialize(model=model, config=given)[0])
        return [str(w.message) for w in shown]

    [said], others = two.run(run)
    assert "offload_param" in said and "has no effect" in said and others == []
