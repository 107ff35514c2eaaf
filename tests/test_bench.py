"""The benchmarks' arithmetic; how fast anything is, no test says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from bench import gpu, planner, runner
from bench.runner import Comparison, interleaved, table

from minizero.activations import recompute_units
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.lab.toymachine import TOY, shape_of
from minizero.scale.cost import Candidate, Costs, Job, layers_of


def test_cases_take_turns_and_the_warm_up_is_dropped() -> None:
    order: list[str] = []

    def case(name: str) -> float:
        order.append(name)
        return float(len(order))

    values = interleaved({"a": lambda: case("a"), "b": lambda: case("b")}, 2, warmup=1)
    assert order == ["a", "b"] * 3
    assert values == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_the_ratio_is_the_median_of_pairs() -> None:
    # the machine was four times slower in the last turn, for both
    c = Comparison("copy", "s", "new", "old", [1, 1, 4], [2, 2, 8], at_most=0.5)
    assert c.ratio == 0.5 and c.met
    slow = Comparison("copy", "s", "new", "old", [1, 3], [1, 1], at_most=1.5)
    assert slow.ratio == 2 and not slow.met
    assert not Comparison("copy", "s", "new", "old", [1], [2], at_least=0.6).met
    assert Comparison("copy", "s", "new", "old", [1], [2]).met
    text = table([c, slow])
    assert "at most 0.5: met" in text and "at most 1.5: MISSED" in text


def test_results_are_kept_with_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fake:
        @staticmethod
        def compare(repeats: int) -> list[Comparison]:
            return [Comparison("x", "s", "a", "b", [1.0] * repeats, [2.0] * repeats)]

    monkeypatch.setattr(runner, "NAMES", ("fake",))
    monkeypatch.setattr(runner.importlib, "import_module", lambda name: Fake)
    out = tmp_path / "new" / "bench.json"
    runner.run([], 3, str(out))
    stored = json.loads(out.read_text())
    assert stored["machine"]["cores"] >= 1
    assert stored["comparisons"][0]["ratio"] == 0.5
    assert len(stored["comparisons"][0]["a_values"]) == 3
    assert "0.500" in capsys.readouterr().out


@pytest.mark.parametrize("name", runner.NAMES)
def test_what_is_listed_is_a_benchmark(name: str) -> None:
    assert callable(importlib.import_module(f"bench.{name}").compare)


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no benchmark 'speed'; choose from"):
        runner.run(["speed"], 5, str(tmp_path / "bench.json"))
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        interleaved({}, 0)


def test_gpu_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What needs more GPUs than there are is left out."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    gpu.main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [*gpu.PARTS]
    assert all("left out: 0 GPUs of" in line for line in lines)
    with pytest.raises(ValueError, match="there is no part speed"):
        gpu.main(["speed"])


def waits(how: str) -> tuple[float, float, bool]:
    """Seconds asked for in a step of two blocks, those counted, and equal gradients."""
    sizes = GPTConfig(2, 32, 2, sequence=16)
    torch.manual_seed(0)
    model, tokens = GPT(sizes), torch.zeros(2, 16, dtype=torch.long)
    model(tokens, tokens).backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    recompute_units(model, how)
    costs = Costs(Job(shape_of(sizes), TOY, 2, 4, 16, "fp32"), tokens.numel())
    asked: list[float] = []
    with (
        mock.patch.object(planner, "sleep_until", lambda t: asked.append(t)),
        mock.patch.object(planner.time, "thread_time", lambda: 0.0),
        mock.patch.object(planner.time, "perf_counter", lambda: 0.0),
        planner.computing(costs, how),
    ):
        model(tokens, tokens).backward()
    layers = layers_of(costs, Candidate(0, how), 0.0)
    counted = sum(layer.forward + layer.backward for layer in layers)
    same = all(map(torch.equal, plain, (p.grad for p in model.parameters())))
    return sum(asked), counted, same


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_blocks_take_what_the_planner_counts(how: str) -> None:
    asked, counted, same = waits(how)
    assert asked == pytest.approx(counted) and same
