"""The planner: the fastest that fits, its config, and what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minizero import comm
from minizero.__main__ import main
from minizero.config.read import read
from minizero.lab.bench.planner import MODEL, Case, build, step
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.lab.toymachine import TOY, shape_of
from minizero.ranks.launch import Pool
from minizero.scale import MACHINES, MODELS, Job, choose, planner
from minizero.scale.advice import candidate_of, describe, large_buckets, warnings
from minizero.scale.candidates import Candidate, candidates
from minizero.scale.command import count, sequences
from minizero.scale.exact import exactly
from minizero.scale.planner import SAME, Choice, Result, ds_config

V100 = replace(MACHINES["v100-32gb"], gpus=8)
SLOW = replace(V100, network=1.25e9 / 8)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def job(
    model: str = "gpt2-xl", machine: Any = V100, gpus: int = 16, each: int = 16,
    sequence: int = 1024, **more: Any,
) -> Job:  # fmt: skip
    more.setdefault("precision", "fp16")
    return Job(MODELS[model], machine, gpus, each * gpus, sequence, **more)


def test_the_fastest_that_fits_is_chosen() -> None:
    choice = choose(job())
    found = [Result(choice.job, c) for c in candidates(choice.job)]
    least = min(
        r.prediction.step_seconds
        for r in found
        if r.fits and not r.candidate.weight_bits
    )
    assert choice.best.fits and choice.best.prediction.step_seconds == least
    kinds = {r.candidate.kind for r in found}
    assert {choice.best.candidate.kind, *(r.candidate.kind for r in choice.others)} == (
        kinds
    )


def test_of_equals_the_simplest_is_chosen() -> None:
    """Chapter 18's job: offload is faster by less than a prediction is off."""
    shape = shape_of(GPTConfig(layers=6, hidden=96, heads=3, sequence=64))
    choice = choose(Job(shape, TOY, 4, 8, 64, "fp32"))
    assert choice.best.candidate.extras == 0
    least = min(choice.loses(r) for r in choice.others if r.fits)
    assert -SAME / (1 + SAME) <= least < 0


def choose_among(*ways: Candidate, **about: Any) -> Candidate:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "candidates", lambda job: iter(ways))
        return choose(job(machine=SLOW, **about)).best.candidate


def test_what_is_simpler_is_chosen_of_equals_alone() -> None:
    """A way that is slower, or that rounds without leave, is not among them."""
    plain, copy = Candidate(3, "full", 16, 1), Candidate(3, "full", 16, 1, secondary=8)
    assert choose_among(plain, copy) == choose_among(copy, plain) == copy
    late = replace(plain, micro_batch=1, accumulation=16)
    assert choose_among(plain, late) == choose_among(late, plain) == plain
    coded = replace(copy, weight_bits=8, gradient_bits=4)
    away = replace(plain, offload_optimizer="cpu", offload_param="cpu")
    assert away.extras == coded.extras
    assert choose_among(away, coded) == away
    assert choose_among(away, coded, quantize=True) == coded


def test_parameters_go_to_the_host_where_nothing_else_fits() -> None:
    small = replace(V100, memory=4e9)
    best = choose(job("gpt2-xl", small, 1, each=1)).best.candidate
    assert (best.offload_optimizer, best.offload_param) == ("cpu", "cpu")


def test_a_rehearsal_is_asked_where_the_formula_is_not_sure() -> None:
    plain, asked = choose(job()), []

    def peak(candidate: Candidate) -> float:
        asked.append(candidate)
        return plain.job.room * (1 + (candidate == plain.best.candidate))

    choice = choose(replace(plain.job, peak=peak))
    best = choice.best
    assert plain.best.candidate in asked and best.candidate != plain.best.candidate
    assert best.fits and best.unsure and best.needs == plain.job.room
    assert ", rehearsed" in describe(choice)
    for result in (Result(choice.job, c) for c in candidates(choice.job)):
        near = 0.75 <= result.memory.total / plain.job.room <= 1.25
        assert near or result.candidate not in asked


def test_what_fits_is_what_the_engine_takes() -> None:
    """The formula has this plan within the memory, and the engine does not."""
    tiny = Case(1.5e6, 20e6).job
    found = Result(tiny, Candidate(3, "full", 1, 2, "cpu"))
    exact = Result(exactly(tiny, partial(GPT, MODEL), "cpu"), found.candidate)
    assert found.fits and not exact.fits and exact.unsure


def test_hierarchical_or_not_is_chosen_by_the_network() -> None:
    fast = replace(V100, network=100e9)
    assert choose(job(machine=fast)).best.candidate.group is None
    best = choose(job(machine=SLOW)).best.candidate
    assert 8 in (best.group, best.secondary)
    # what rounds is chosen only when that is allowed
    coded = choose(job(machine=SLOW, quantize=True)).best.candidate
    assert coded.weight_bits == 8 and best.weight_bits is None
    assert "--quantize" in describe(choose(job(machine=SLOW)))


GROUPED = [
    Candidate(2, "none", 1, 2, group=2),
    Candidate(3, "full", 2, 1, group=2),
    Candidate(3, "matmuls", 2, 1, secondary=2),
    Candidate(3, "none", 1, 2, secondary=2, weight_bits=8, gradient_bits=4),
]


def ledger(job: Job, candidate: Candidate) -> set[tuple[str, str, str]]:
    """Scope, op and dtype of what two steps send, but for the norm and the barrier."""
    engine = build(job, candidate)
    with comm.ledger() as calls:
        for _ in range(2):
            step(engine, candidate)
    return {
        (c.group, c.op, c.dtype) for c in calls if c.unit not in ("", "gradient norm")
    }


def test_a_config_of_groups_does_what_was_predicted(pool: Pool) -> None:
    """Accepted by the engine, read back as the candidate, and seen in the ledger."""
    toy = Case(1e9, 1e6, ranks=4, gpus=2).job
    for candidate in GROUPED:
        config = ds_config(Choice(toy, Result(toy, candidate), []))
        read_back = candidate_of(toy, json.loads(json.dumps(config)))
        assert replace(read_back, checkpointing=candidate.checkpointing) == candidate
        calls = pool.run(ledger, toy, candidate)[0]
        kinds = {"int8", "int4"} if candidate.weight_bits else {"float32"}
        inside = {(op, kind) for scope, op, kind in calls if scope == "within"}
        outside = {(op, kind) for scope, op, kind in calls if scope == "across"}
        if candidate.stage == 3:
            assert "all_gather" in {op for op, _ in inside}
        assert "all" not in {scope for scope, _, _ in calls}
        assert kinds <= {kind for _, kind in inside | outside}
        wanted = "reduce_scatter" if candidate.secondary else "all_reduce"
        assert wanted in {op for op, _ in outside}, candidate


def alone(choice: Choice, candidate: Candidate) -> list[str]:
    return list(warnings(choice, Result(choice.job, candidate)))


def test_stage_3_on_a_slow_link_is_warned_of() -> None:
    slow = replace(V100, gpus=1, network=0.3e9)
    choice = choose(job(machine=slow, model="gpt2", gpus=8, each=4))
    assert choice.best.candidate.stage < 3
    [said] = alone(choice, Candidate(3, "none", 4, 1))
    assert said.startswith("stage 3 waits") and "need not be sharded" in said
    slow = job("mpt-7b", SLOW, each=4)
    [said] = alone(choose(slow), Candidate(3, "full", 4, 1))
    assert said.startswith("stage 3 waits") and "gathers within a node" in said
    fast = replace(V100, network=1e12)
    assert not alone(choose(job(machine=fast, gpus=8)), Candidate(3, "full", 16, 1))


def test_offload_where_checkpointing_would_do_is_warned_of() -> None:
    off = Candidate(2, "none", 8, 1, offload_optimizer="cpu")
    task = job(gpus=8, each=8, machine=replace(V100, pcie=0.1e9))
    for how, words in (("full", "full"), ("matmuls", "selective")):
        here = replace(off, offload_optimizer=None, checkpointing=how)
        memory = 1.001 * Result(task, here).memory.total / 0.9
        small = replace(task, machine=replace(task.machine, memory=memory))
        [said] = alone(choose(small), off)
        assert said.startswith(f"with {words} checkpointing it fits on the device")
    fast = replace(small, machine=replace(small.machine, pcie=1e12, dram=1e13))
    assert not alone(choose(fast), off)


def test_accumulation_at_stage_3_is_warned_of() -> None:
    choice = choose(job(each=8))
    [said] = [w for w in alone(choice, Candidate(3, "full", 1, 8)) if "micro" in w]
    assert "gather all parameters 16 times a step" in said
    assert not any("micro" in w for w in alone(choice, Candidate(3, "full", 8, 1)))
    assert not any("micro" in w for w in alone(choice, Candidate(2, "full", 1, 8)))


def test_buckets_above_a_shard_are_warned_of() -> None:
    task = job("gpt2", gpus=64)
    sizes = {"reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 50_000}
    config = {"train_batch_size": 64, "zero_optimization": {"stage": 3, **sizes}}
    [said] = large_buckets(task, config)
    assert said.startswith("reduce_bucket_size = 500,000,000 elements holds 1 GB")
    config["zero_optimization"] = {"stage": 0, **sizes}
    assert not list(large_buckets(task, config))
    choice = choose(task)
    assert not list(large_buckets(task, ds_config(choice)))


def test_a_config_of_your_own_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    path.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 64,
        "zero_optimization": zero,
    }))  # fmt: skip
    out = plan(capsys, "gpt2-xl", 8, "512k", "--config", str(path))
    said = out[out.index("yours: stage 3, optimizer on the CPU") :]
    assert "% with the plan" in said
    assert "warning: 64 micro-batches gather all parameters 128 times" in said


def plan(
    capsys: pytest.CaptureFixture[str], model: str, gpus: int, tokens: str, *more: str
) -> str:
    words = ["plan", "--gpus", str(gpus), "--batch-tokens", tokens, *more]
    if "--params" not in more:
        words += ["--model", model]
    status = main(words)
    out = capsys.readouterr()
    assert not out.err and status == 0
    return out.out


@pytest.mark.parametrize(
    ("model", "gpus", "tokens", "more"),
    [
        ("llama-8b", 64, "4M", ()),
        ("llama-70b", 1024, "3_333_333", ("--machine", "a100-80gb")),
        ("gpt2", 1, "7000", ("--machine", "rtx-4090", "--sequence", "1000")),
        ("", 8, "1M", ("--params", "7e9", "--machine", "a100-40gb")),
    ],
)
def test_plans_are_configs_that_are_read(
    model: str, gpus: int, tokens: str, more: tuple[str, ...], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "ds_config.json"
    out = plan(capsys, model, gpus, tokens, *more, "--out", str(path))
    config = read(json.loads(path.read_text()), gpus)
    assert f"plan: stage {config.zero_optimization.stage}" in out
    length = int(more[more.index("--sequence") + 1]) if "--sequence" in more else 2048
    made = config.train_batch_size * length
    assert made == pytest.approx(count(tokens), rel=0.5 if gpus > 1000 else 0.06)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--model llama-8b --gpus 64 --batch-tokens 1000", "at least 131,072 tokens"),
        ("--model llama-8b --gpus 0", "gpus must be a whole number >= 1, not 0"),
        ("--model llama-8b --gpus 8 --batch-tokens many", "number such as 4M"),
        ("--model llama-8b --gpus 8 --batch-tokens inf", "number such as 4M"),
        ("--model llama-8b --gpus 8 --batch-tokens nan", "number such as 4M"),
        ("--model llama-8b --gpus 8 --batch-tokens=-4M", "at least 16,384 tokens"),
        ("--model llama-9b --gpus 8", "model must be one of gpt2, .* not 'llama-9b'"),
        ("--model gpt2 --params 1e9 --gpus 8", "give --model or --params, one"),
        ("--gpus 8", "give --model or --params, one of them"),
        ("--params nan --gpus 8", "params must be .* not nan"),
        ("--params 1e30 --gpus 8", "params must be .* at most 1e15"),
        ("--model gpt2 --gpus 8 --machine tpu", "machine must be one of h100-80gb"),
        ("--model gpt2 --gpus 8 --precision int8", "precision must be one of bf16"),
        ("--model gpt2 --gpus 8 --sequence 0", "sequence must be a whole number >= 1"),
        ("--model llama-405b --gpus 8 --batch-tokens 32k", "nothing fits 8 GPUs"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(sentence, error), error


def test_a_reader_may_leave_early() -> None:
    """As `head` does."""
    read, write = os.pipe()
    os.close(read)
    words = "-m minizero estimate --params 7e9 --ranks 8".split()
    with os.fdopen(write) as pipe:
        done = subprocess.run(
            [sys.executable, *words], stdout=pipe, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_batches_are_near_what_was_asked_for() -> None:
    assert sequences(4_000_000, 2048, 64) == 64 * 30
    assert sequences(2**22, 2048, 64) == 64 * 32
    for tokens in (10**6, 3_333_333, 7_654_321):
        for gpus in (1, 8, 64):
            near = sequences(tokens, 2048, gpus)
            assert near % gpus == 0
            assert near * 2048 == pytest.approx(tokens, rel=0.14)


def test_sizes_are_told_in_units_that_fit() -> None:
    tiny = Case(3e6, 1e6).job
    text = describe(choose(tiny))
    assert " MB of 3 MB" in text and "0.0" not in text.split("why not")[0]
    assert "parameters on 2 GPUs of toy machine" in text
    assert "167K" in text.split()[0] or text.split()[0].endswith("M")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (
        {
            "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14_336,
            "vocab_size": 128_256, "hidden_act": "silu", "tie_word_embeddings": False,
        },
        "8.03B",
    ),
    "gpt2": (
        {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50_257},
        "124M",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_hugging_face_is_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    config, size = CONFIGS[name]
    path.write_text(json.dumps(config))
    assert plan(capsys, str(path), 8, "512k").startswith(f"{size} parameters")
    path.write_text("{")
    assert main(["plan", "--model", str(path), "--gpus", "8"]) == 2
    assert "is no JSON" in capsys.readouterr().err
