"""The figure of a step's calls: what a real step does, and what a stage changes."""

from __future__ import annotations

import itertools
import sys

import pytest

from minizero.lab.plots.step_calls import (
    LANES,
    NAMES,
    StepCall,
    before,
    changed,
    small_step,
    step_calls,
)
from minizero.zero.data_parallel import DataParallel
from minizero.zero.stage1 import ZeRO1
from minizero.zero.stage2 import ZeRO2
from minizero.zero.stage3 import ZeRO3
from minizero.zero.verbs import Verbs

STAGES = (DataParallel, ZeRO1, ZeRO2, ZeRO3)


def flat(calls: list[StepCall]) -> list[str]:
    return [call.name for top in calls for _, call in top.walk()]


def test_every_name_is_called_in_some_stage() -> None:
    called = {name for stage in range(4) for name in flat(small_step(stage)[1])}
    assert called == set(NAMES)
    assert set(NAMES.values()) <= set(LANES)


def test_calls_of_data_parallelism() -> None:
    net, calls = small_step(0)
    assert type(net) is DataParallel
    forward, backward, step = calls
    assert flat([forward]) == ["__call__"]
    (hook,) = backward.calls
    # a weight and a bias; the second one makes the unit complete
    assert (hook.name, hook.times) == ("_on_grad", 2)
    assert [(c.name, c.times) for c in hook.calls] == [("collect", 2), ("_arrived", 2)]
    reduce = ["_reduce", "reduce", "all_reduce", "reduced"]
    assert flat(hook.calls[1].calls) == reduce
    assert flat([step]) == ["step", "_update", "publish", "clear_grads"]


@pytest.mark.parametrize(
    ("stage", "sent"),
    [
        (0, ["all_reduce"]),
        (1, ["reduce_scatter", "all_gather"]),
        (2, ["reduce_scatter", "all_gather"]),
        (3, ["all_gather", "all_gather", "reduce_scatter"]),
    ],
)
def test_collectives_are_those_of_the_plan(stage: int, sent: list[str]) -> None:
    names = flat(small_step(stage)[1])
    assert [name for name in names if NAMES[name] == "comm"] == sent


def test_what_a_stage_changes_is_read_from_the_classes() -> None:
    assert changed(DataParallel) == {}
    for old, new in itertools.pairwise(STAGES):
        assert before(new) is old
        assert changed(new)
        for name in set(changed(new)) & set(vars(Verbs)):
            assert getattr(new, name) is not getattr(old, name)
    assert set(changed(ZeRO1)) == {"reduce", "landing", "owned_shards", "publish"}
    assert {"gather", "release", "publish"} <= set(changed(ZeRO3))


def test_a_schedule_answers_with_moves() -> None:
    asked = {
        call.name: call.answer
        for top in small_step(3, "schedule")[1]
        for _, call in top.walk()
        if call.lane == "asked"
    }
    assert asked["schedule.needed"] == "gather, wait"
    assert asked["schedule.updated"] == "publish, wait"


def test_the_profile_function_is_taken_away() -> None:
    small_step(0)
    assert sys.getprofile() is None


@pytest.mark.parametrize("stage", range(4))
def test_figure_names_every_call_and_colours_what_changed(stage: int) -> None:
    (axes,) = step_calls(stage).axes
    net, calls = small_step(stage)
    rows = [call for top in calls for _, call in top.walk()]
    assert len(axes.lines) == 2 * len(rows) - len(calls)  # dots, and lines to them
    new = changed(type(net))
    overridden = [c for c in rows if c.name in new]
    texts = [text.get_text() for text in axes.texts]
    assert all(call.by in texts for call in overridden)
    assert len(axes.patches) >= len(overridden)
    assert bool(axes.patches) == (stage > 0)
