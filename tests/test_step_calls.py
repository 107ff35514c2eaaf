"""The figure of a step's calls: what a real step does, and what a stage changes."""

from __future__ import annotations

import sys

import pytest

from minizero.lab.plots.step_calls import (
    LANES,
    NAMES,
    StepCall,
    changed,
    small_step,
    step_calls,
)
from minizero.zero import DataParallel, ZeRO1, ZeRO2, ZeRO3


def flat(calls: list[StepCall]) -> list[str]:
    return [call.name for top in calls for _, call in top.walk()]


def test_every_name_is_called_in_some_stage() -> None:
    called = {name for stage in range(4) for name in flat(small_step(stage)[1])}
    assert called == set(NAMES)
    assert set(NAMES.values()) <= set(LANES)
    assert sys.getprofile() is None


def test_what_a_stage_changes_is_read_from_the_classes() -> None:
    assert not changed(DataParallel)
    assert {"reduce", "publish"} <= changed(ZeRO1)
    assert "gather" not in changed(ZeRO2)
    assert {"gather", "release", "publish"} <= changed(ZeRO3)


def test_a_schedule_answers_with_actions() -> None:
    asked = {
        call.name: call.answer
        for top in small_step(3, "schedule")[1]
        for _, call in top.walk()
        if call.lane == "asked"
    }
    assert asked["needed"] == "gather, wait"
    assert asked["updated"] == "publish, wait"


@pytest.mark.parametrize("stage", range(4))
def test_figure_names_every_call_and_colours_what_changed(stage: int) -> None:
    (axes,) = step_calls(stage).axes
    net, calls = small_step(stage)
    rows = [call for top in calls for _, call in top.walk()]
    assert len(axes.lines) == 2 * len(rows) - len(calls)  # dots, and lines to them
    overridden = [c for c in rows if c.name in changed(type(net))]
    assert len(axes.patches) >= len(overridden)
    assert bool(axes.patches) == (stage > 0)
