"""Learning rates and betas are DeepSpeed's, at every step and after a resume."""

from __future__ import annotations

import json

import pytest
import torch
from parity import rates
from parity.rates import RECORD, SETTINGS, STEPS, Columns, optimizer, sequence

from minizero.engine import lr_schedules
from minizero.engine.lr_schedules import SCHEDULES, OneCycle, WarmupLR


def assert_same(got: Columns, expected: Columns) -> None:
    for key, groups in expected.items():
        for group, values in enumerate(groups):
            assert got[key][group] == pytest.approx(values, rel=1e-12, abs=1e-17)


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_as_deepspeed(index: int) -> None:
    assert_same(sequence(lr_schedules, *SETTINGS[index]), RECORD["sequences"][index])


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_a_loaded_schedule_goes_on(index: int, at: int = 3) -> None:
    """With a new optimizer, or with one that has other rates by now."""
    name, options, groups = SETTINGS[index]
    expected = RECORD["sequences"][index]
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


def test_what_is_refused() -> None:
    moved = optimizer([0.1, 0.2])
    with pytest.raises(ValueError, match="'log' or 'linear', not 'exp'"):
        WarmupLR(moved, warmup_type="exp")
    with pytest.raises(ValueError, match="one value for each of 2 groups"):
        OneCycle(moved, 0.1, [1.0, 1.0, 1.0])
    assert [group["lr"] for group in moved.param_groups] == [0.1, 0.2]
