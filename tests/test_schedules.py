"""Learning rates and betas are DeepSpeed's, at every step and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import rates
from parity.rates import SETTINGS, STEPS, Columns, optimizer, sequence

from minizero.config.sections import SCHEDULERS
from minizero.engine import lr_schedules
from minizero.engine.lr_schedules import SCHEDULES, OneCycle, WarmupCosineLR, WarmupLR

RECORD = json.loads(Path(__file__).with_name("deepspeed_schedules.json").read_text())


def recorded(index: int) -> Columns:
    """What DeepSpeed's class did: one number for all steps where nothing moved."""
    return {
        key: [
            values if isinstance(values, list) else [values] * (STEPS + 1)
            for values in groups
        ]
        for key, groups in RECORD["sequences"][index].items()
    }


def assert_same(got: Columns, expected: Columns) -> None:
    for key, groups in expected.items():
        for group, values in enumerate(groups):
            assert got[key][group] == pytest.approx(values, rel=1e-12, abs=1e-17)


def test_the_record_is_of_these_settings() -> None:
    assert RECORD["settings"] == json.loads(json.dumps(SETTINGS)), (
        "tests/parity/rates.py was changed; record again with "
        "`make parity ARGS=--record`"
    )


@pytest.mark.filterwarnings("ignore:the schedule ends")
@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_as_deepspeed(index: int) -> None:
    assert_same(sequence(lr_schedules, *SETTINGS[index]), recorded(index))


@pytest.mark.filterwarnings("ignore:the schedule ends")
@pytest.mark.parametrize("index", range(len(SETTINGS)))
@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_loaded_schedule_goes_on(index: int, at: int) -> None:
    """With a new optimizer, or with one that has other rates by now."""
    name, options, groups = SETTINGS[index]
    expected = recorded(index)
    first = optimizer(groups)
    schedule = SCHEDULES[name](first, **options)
    for _ in range(at):
        schedule.step()
    state = json.loads(json.dumps(schedule.state_dict()))
    assert state == {"last_batch_iteration": at - 1}
    again = optimizer(groups)
    resumed = SCHEDULES[name](again, **options)
    for group in again.param_groups:
        group["lr"] = 77.0
    resumed.load_state_dict(state)
    assert resumed.get_last_lr() == [g["lr"] for g in again.param_groups]
    columns: Columns = {key: [[] for _ in groups] for key in expected}
    for _ in range(STEPS + 1 - at):
        rates.read(again, columns)
        resumed.step()
    rest = {key: [values[at:] for values in every] for key, every in expected.items()}
    assert_same(columns, rest)


def test_a_start_in_the_middle_leaves_the_rates_alone() -> None:
    moved = optimizer([0.5])
    schedule = WarmupLR(moved, warmup_num_steps=4, last_batch_iteration=1)
    assert moved.param_groups[0]["lr"] == 0.5
    schedule.step()
    expected = optimizer([0.5])
    other = WarmupLR(expected, warmup_num_steps=4)
    other.step(2)
    assert moved.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
    assert schedule.get_lr() == schedule.get_last_lr() == other.get_lr()


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_option_of_the_config_is_taken(name: str) -> None:
    """The engine passes a schedule all that the config has for it."""
    assert SCHEDULES.keys() == SCHEDULERS.keys()
    needed = {"total_num_steps": 2000, "cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    fields = SCHEDULERS[name].model_fields
    params = SCHEDULERS[name](**{k: v for k, v in needed.items() if k in fields})
    defaults: dict[str, Any] = {k: v for k, v in needed.items() if k in fields}
    a, b = optimizer([0.3]), optimizer([0.3])
    full, short = SCHEDULES[name](a, **vars(params)), SCHEDULES[name](b, **defaults)
    for _ in range(3):
        full.step()
        short.step()
        assert a.param_groups[0]["lr"] == b.param_groups[0]["lr"]
    assert a.param_groups[0]["lr"] > 0


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupCosineLR"])
def test_a_rate_in_a_tensor_is_filled(name: str) -> None:
    """Fused and compiled optimizers hold on to the tensor."""
    rate = torch.tensor(0.5)
    moved = torch.optim.SGD([torch.zeros(1)], lr=rate)
    options = {"total_num_steps": 10**9} if "Cosine" in name else {}
    schedule = SCHEDULES[name](moved, warmup_num_steps=4, **options)
    assert moved.param_groups[0]["lr"] is rate and rate == 0
    for _ in range(5):
        schedule.step()
    assert moved.param_groups[0]["lr"] is rate and rate == 0.5
    assert schedule.get_last_lr() == [pytest.approx(0.5)]


def test_a_wrapper_of_an_optimizer_will_do() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    moved = optimizer([0.5])
    WarmupLR(Wrapper(moved))
    assert moved.param_groups[0]["lr"] == 0


def test_one_cycle_and_an_optimizer_without_betas() -> None:
    moved = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.5)
    with pytest.warns(UserWarning, match="does nothing, since SGD has no betas"):
        schedule = OneCycle(moved, 0.1, 0.2)
    schedule.step()
    assert schedule.get_mom() is None
    assert moved.param_groups[0]["momentum"] == 0.5
    assert "betas" not in moved.param_groups[0]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps must be a whole number"),
    ("WarmupLR", {"warmup_num_steps": 1.5}, "at least 1, not 1.5"),
    ("WarmupLR", {"warmup_type": "exp"}, "must be 'log' or 'linear', not 'exp'"),
    ("WarmupLR", {"warmup_min_lr": [0.1]}, "lists 1 values, and the optimizer has 2"),
    (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 0},
        "cycle_first_step_size must be above 0",
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": [1.0, 1.0, 1.0]},
        "cycle_max_lr lists 3 values",
    ),
    ("LRRangeTest", {"lr_range_test_step_size": 0}, "size must be a whole number of"),
    ("LRRangeTest", {"lr_range_test_min_lr": [0.1]}, "lr_range_test_min_lr lists 1 v"),
]


@pytest.mark.parametrize("name, options, sentence", REFUSED)
def test_what_is_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    moved = optimizer([0.1, 0.2])
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        SCHEDULES[name](moved, **options)
    # and the optimizer is as it was
    assert [group["lr"] for group in moved.param_groups] == [0.1, 0.2]


def test_only_optimizers_have_rates() -> None:
    with pytest.raises(TypeError, match="not of a Linear"):
        WarmupLR(torch.nn.Linear(1, 1))


def test_an_end_within_the_warm_up_is_told() -> None:
    with pytest.warns(UserWarning, match="ends after 3 steps .* warm-up of 9"):
        WarmupCosineLR(optimizer([0.1]), 3, warmup_num_steps=9)
