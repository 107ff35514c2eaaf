"""The planner: its rule, its config, its words, and the commands."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minizero import dryrun
from minizero.__main__ import main
from minizero.config import read
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.lab.recorded import MODEL, Case
from minizero.lab.toymachine import TOY, shape_of
from minizero.scale import MACHINES, MODELS, Candidate, Job, Prediction, choose, predict
from minizero.scale.planner import SAME, candidates, describe, ds_config, simplicity

V100 = replace(MACHINES["v100-32gb"], gpus=8)
SLOW = replace(V100, network=1.25e9 / 8)
SMALL = shape_of(GPTConfig(layers=6, hidden=96, heads=3, sequence=64))


def job(machine: Any = V100, gpus: int = 16, each: int = 16, **more: Any) -> Job:
    shape = replace(MODELS["gpt2-xl"], layers=8)
    return Job(shape, machine, gpus, each * gpus, 1024, "fp16", **more)


@pytest.mark.parametrize(
    "job",
    [
        Job(SMALL, TOY, 4, 8, 64, "fp32"),  # chapter 18's: offload is a little faster
        Job(SMALL, replace(TOY, network=1e8), 4, 8, 64, "fp32"),  # and here by more
        Job(SMALL, replace(TOY, memory=1e9), 4, 8, 64, "fp32"),  # everything fits
        Case(2.6e6, 3e6, ranks=4, gpus=2).job,  # groups
    ],
    ids=["toy", "faster link", "roomy", "two nodes"],
)
def test_the_lowest_stage_that_fits_unless_another_is_faster(job: Job) -> None:
    """By the rule, applied to predictions of every candidate."""
    every = [predict(job, c) for c in candidates(job)]
    fitting = [r for r in every if r.fits and job.allows(r.candidate)]
    least = min(r.step_seconds for r in fitting)
    near = [r for r in fitting if r.step_seconds <= (1 + SAME) * least]
    choice = choose(job)
    assert choice.best == min(near, key=simplicity)
    kinds: dict[str, list[Prediction]] = {}
    for result in every:
        kinds.setdefault(result.candidate.kind, []).append(result)
    for other in (choice.best, *choice.others):
        mine = [r for r in kinds.pop(other.candidate.kind) if r.fits]
        assert other.fits == bool(mine)
        assert not mine or other.step_seconds == min(r.step_seconds for r in mine)
    assert not kinds
    lowest = min(fitting, key=simplicity)
    text = describe(choice)
    assert ("the lowest stage that fits" in text) == (lowest == choice.best)
    assert (f"{lowest.candidate.kind} fits too" in text) == (lowest != choice.best)


def test_only_equals_are_compared_by_their_options() -> None:
    """A way that is slower, or that rounds without leave, is not among them."""
    plain, copy = Candidate(3, "full", 16, 1), Candidate(3, "full", 16, 1, secondary=8)
    late = replace(plain, micro_batch=1, accumulation=16)
    coded = replace(copy, weight_bits=8, gradient_bits=4)
    away = replace(plain, offload_optimizer="cpu", offload_param="cpu")
    for ways, quantize, best in (
        ((plain, copy), False, copy),
        ((plain, late), False, plain),
        ((away, coded), False, away),
        ((away, coded), True, coded),
    ):
        for among in (ways, ways[::-1]):
            slow = job(SLOW, quantize=quantize)
            assert choose(slow, among).best.candidate == best


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(2, "none", 1, 2, group=2),
        Candidate(3, "none", 2, 1, group=2),
        Candidate(3, "none", 1, 2, secondary=2, weight_bits=8, gradient_bits=4),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_a_config_does_what_was_predicted(candidate: Candidate) -> None:
    """The engine accepts it, its plan is the candidate's, and the ledger shows it."""
    toy = Case(1e9, 1e6, ranks=4, gpus=2).job
    config = read(json.loads(json.dumps(ds_config(toy, candidate))), 4)
    assert config.zero_optimization.stage == candidate.stage
    assert config.groups == (candidate.group, candidate.secondary)
    assert config.bits == (candidate.weight_bits, candidate.gradient_bits)
    tokens = torch.zeros(candidate.micro_batch, MODEL.sequence, dtype=torch.long)
    batch = {"world_size": 4, "batch": (tokens, tokens), "device": "cpu"}
    found = dryrun(lambda: GPT(MODEL), ds_config(toy, candidate), **batch)
    sent = (c for c in found.calls if c.unit not in ("", "gradient norm"))
    calls = {(c.group, c.op, c.dtype) for c in sent}
    kinds = {"int8", "int4"} if candidate.weight_bits else {"float32"}
    inside = {(op, kind) for scope, op, kind in calls if scope == "within"}
    outside = {(op, kind) for scope, op, kind in calls if scope == "across"}
    if candidate.stage == 3:
        assert "all_gather" in {op for op, _ in inside}
    assert "all" not in {scope for scope, _, _ in calls}
    assert kinds <= {kind for _, kind in inside | outside}
    wanted = "reduce_scatter" if candidate.secondary else "all_reduce"
    assert wanted in {op for op, _ in outside}


@pytest.mark.filterwarnings("ignore")
def test_a_config_has_room_for_padded_units() -> None:
    """A block is gathered ahead, and no unit is reduced in two pieces."""
    config = ds_config(Job(SMALL, TOY, 4, 8, 64, "fp32"), Candidate(3, "none", 2))
    tokens = torch.zeros(2, 64, dtype=torch.long)
    gpt = GPTConfig(layers=6, hidden=96, heads=3, sequence=64)
    batch = {"world_size": 4, "batch": (tokens, tokens), "device": "cpu"}
    found = dryrun(lambda: GPT(gpt), config, **batch)
    reduced = [call.unit for call in found.calls if call.op == "reduce_scatter"]
    assert len(reduced) == len(set(reduced)) == gpt.layers + 1
    state = SMALL.parameters / 4 + SMALL.root + 2 * SMALL.block
    assert found.peaks["parameters"] >= 4 * state


@pytest.mark.parametrize(
    "words", ["llama-8b --gpus 64 --batch 128", "gpt2 --gpus 1 --machine rtx-4090"]
)
def test_plans_are_configs_that_are_read(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    assert main(["plan", "--model", *words.split(), "--out", str(path)]) == 0
    out, written = capsys.readouterr().out, json.loads(path.read_text())
    how = written["minizero_plan"]
    config = read(written, how["gpus"])
    assert not config.warnings and how["machine"] in MACHINES
    assert config.train_batch_size == (128 if "128" in words else 2048)
    assert f"plan: stage {config.zero_optimization.stage}" in out
    said = re.search(r'recompute_units\(model, "(\w+)"\)', out)
    assert how["checkpointing"] == (said[1] if said else "none")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--model llama-8b --gpus 64 --batch 1", "use 64, .* 131,072 tokens"),
        ("--model llama-8b --gpus 0", "gpus must be a whole number >= 1, not 0"),
        ("--model llama-8b --gpus 8 --batch=-4", "use 8, .* 16,384 tokens"),
        ("--model llama-9b --gpus 8", "model must be one of gpt2, .* not 'llama-9b'"),
        ("--model gpt2 --gpus 8 --machine tpu", "machine must be one of h100-80gb"),
        ("--model gpt2 --gpus 8 --precision int8", "precision must be one of bf16"),
        ("--model gpt2 --gpus 8 --sequence 0", "sequence must be a whole number >= 1"),
        ("--model llama-405b --gpus 8 --batch 16", "nothing fits 8 GPUs"),
        ("--model pyproject.toml --gpus 8", "pyproject.toml is no JSON"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(sentence, error), error


def test_help_lists_commands_machines_and_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for name in ("estimate", "train", "consolidate", "plan", "dryrun"):
        assert re.search(rf"^    {name}\s+\w", text, re.M), name
    for name in ("plan", "dryrun"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        words = re.split(r"[\s,.]+", capsys.readouterr().out)
        assert {*MACHINES, *MODELS} <= {*words}
