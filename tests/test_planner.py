"""The planner: the fastest that fits, its config, its words, and the commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.planner import build
from bench.planner import step as train_step

from minizero import comm
from minizero.__main__ import count, main, sequences
from minizero.config import read
from minizero.lab.models.gpt import GPTConfig
from minizero.lab.recorded import Case
from minizero.lab.toymachine import TOY, shape_of
from minizero.ranks import Pool
from minizero.scale import MACHINES, MODELS, Candidate, Job, choose
from minizero.scale.planner import SAME, Result, candidates, describe, ds_config

V100 = replace(MACHINES["v100-32gb"], gpus=8)
SLOW = replace(V100, network=1.25e9 / 8)


def job(
    model: str = "gpt2-xl", machine: Any = V100, gpus: int = 16, each: int = 16,
    sequence: int = 1024, **more: Any,
) -> Job:  # fmt: skip
    more.setdefault("precision", "fp16")
    return Job(MODELS[model], machine, gpus, each * gpus, sequence, **more)


def test_the_fastest_that_fits_is_chosen() -> None:
    choice = choose(job())
    found = [Result(choice.job, c) for c in candidates(choice.job)]
    least = min(r.seconds for r in found if r.fits and r.allowed)
    assert choice.best.fits and choice.best.seconds == least
    kinds = {choice.best.candidate.kind, *(r.candidate.kind for r in choice.others)}
    assert kinds == {r.candidate.kind for r in found}
    assert "\n  the fastest that fits\n" in describe(choice)


def test_of_equals_the_one_with_fewest_options_is_chosen_and_that_is_said() -> None:
    """Chapter 18's job: offload is faster by less than a prediction is off."""
    shape = shape_of(GPTConfig(layers=6, hidden=96, heads=3, sequence=64))
    choice = choose(Job(shape, TOY, 4, 8, 64, "fp32"))
    assert choice.best.candidate.extras == 0
    least = min(choice.loses(r) for r in choice.others if r.fits)
    assert -SAME / (1 + SAME) <= least < 0
    text = describe(choice)
    assert "within 4% of the fastest that fits, and with fewer options" in text
    assert "the fastest that fits\n" not in text and "% faster (" in text


def test_only_equals_are_compared_by_their_options() -> None:
    """A way that is slower, or that rounds without leave, is not among them."""
    plain, copy = Candidate(3, "full", 16, 1), Candidate(3, "full", 16, 1, secondary=8)
    late = replace(plain, micro_batch=1, accumulation=16)
    coded = replace(copy, weight_bits=8, gradient_bits=4)
    away = replace(plain, offload_optimizer="cpu", offload_param="cpu")
    assert away.extras == coded.extras
    for ways, quantize, best in (
        ((plain, copy), False, copy),
        ((plain, late), False, plain),
        ((away, coded), False, away),
        ((away, coded), True, coded),
    ):
        for among in (ways, ways[::-1]):
            slow = job(machine=SLOW, quantize=quantize)
            assert choose(slow, among).best.candidate == best


def test_parameters_go_to_the_host_where_nothing_else_fits() -> None:
    small = replace(V100, memory=4e9)
    best = choose(job("gpt2-xl", small, 1, each=1)).best.candidate
    assert (best.offload_optimizer, best.offload_param) == ("cpu", "cpu")


def test_groups_are_chosen_by_the_network() -> None:
    fast = replace(V100, network=100e9)
    assert choose(job(machine=fast)).best.candidate.group is None
    best = choose(job(machine=SLOW)).best.candidate
    assert 8 in (best.group, best.secondary)
    # what rounds is chosen only when that is allowed
    coded = choose(job(machine=SLOW, quantize=True)).best.candidate
    assert coded.weight_bits == 8 and best.weight_bits is None
    assert "--quantize" in describe(choose(job(machine=SLOW)))


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def ledger(job: Job, candidate: Candidate) -> set[tuple[str, str, str]]:
    """Group, op and dtype of what two steps send, but for the norm and the barrier."""
    engine = build(job, candidate)
    with comm.ledger() as calls:
        for _ in range(2):
            train_step(engine, candidate)
    return {
        (c.group, c.op, c.dtype) for c in calls if c.unit not in ("", "gradient norm")
    }


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(2, "none", 1, 2, group=2),
        Candidate(3, "full", 2, 1, group=2),
        Candidate(3, "selective", 2, 1, secondary=2),
        Candidate(3, "none", 1, 2, secondary=2, weight_bits=8, gradient_bits=4),
    ],
    ids=str,
)
def test_a_config_does_what_was_predicted(four: Pool, candidate: Candidate) -> None:
    """The engine accepts it, its plan is the candidate's, and the ledger shows it."""
    toy = Case(1e9, 1e6, ranks=4, gpus=2).job
    config = read(json.loads(json.dumps(ds_config(toy, candidate))), 4)
    assert config.zero_optimization.stage == candidate.stage
    assert config.groups == (candidate.group, candidate.secondary)
    assert config.bits == (candidate.weight_bits, candidate.gradient_bits)
    calls = four.run(ledger, toy, candidate)[0]
    kinds = {"int8", "int4"} if candidate.weight_bits else {"float32"}
    inside = {(op, kind) for scope, op, kind in calls if scope == "within"}
    outside = {(op, kind) for scope, op, kind in calls if scope == "across"}
    if candidate.stage == 3:
        assert "all_gather" in {op for op, _ in inside}
    assert "all" not in {scope for scope, _, _ in calls}
    assert kinds <= {kind for _, kind in inside | outside}
    wanted = "reduce_scatter" if candidate.secondary else "all_reduce"
    assert wanted in {op for op, _ in outside}


def plan(capsys: pytest.CaptureFixture[str], words: str) -> str:
    status, out = main(["plan", *words.split()]), capsys.readouterr()
    assert not out.err and status == 0
    return out.out


@pytest.mark.parametrize(
    ("model", "gpus", "tokens", "more"),
    [
        ("llama-8b", 64, "4M", "--sequence 2048"),
        ("llama-70b", 1024, "3_333_333", "--machine a100-80gb --sequence 2048"),
        ("gpt2", 1, "7000", "--machine rtx-4090 --sequence 1000"),
    ],
)
def test_plans_are_configs_that_are_read(
    model: str, gpus: int, tokens: str, more: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "ds_config.json"
    words = f"--model {model} --gpus {gpus} --batch-tokens {tokens} {more}"
    out = plan(capsys, f"{words} --out {path}")
    written = json.loads(path.read_text())
    config = read(written, gpus)
    assert not config.warnings
    assert f"plan: stage {config.zero_optimization.stage}" in out
    made = config.train_batch_size * int(more.split()[-1])
    assert made == pytest.approx(count(tokens), rel=0.5 if gpus > 1000 else 0.06)
    how = written["minizero_plan"]
    assert how["gpus"] == gpus and how["machine"] in MACHINES
    said = re.search(r'recompute_units\(model, "(\w+)"\)', out)
    assert how["checkpointing"] == (said[1] if said else "none")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--model llama-8b --gpus 64 --batch-tokens 1000", "at least 131,072 tokens"),
        ("--model llama-8b --gpus 0", "gpus must be a whole number >= 1, not 0"),
        ("--model llama-8b --gpus 8 --batch-tokens many", "number such as 4M"),
        ("--model llama-8b --gpus 8 --batch-tokens nan", "number such as 4M"),
        ("--model llama-8b --gpus 8 --batch-tokens=-4M", "at least 16,384 tokens"),
        ("--model llama-9b --gpus 8", "model must be one of gpt2, .* not 'llama-9b'"),
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


def test_sizes_have_units_that_fit() -> None:
    tiny = Case(3e6, 1e6).job
    text = describe(choose(tiny))
    assert " MB of 3 MB" in text and "0.0" not in text.split("the other kinds")[0]
    assert "parameters on 2 GPUs of toy machine" in text


LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50_257}


@pytest.mark.parametrize(("config", "size"), [(LLAMA, "8.03B"), (GPT2, "124M")])
def test_a_model_of_hugging_face_is_planned(
    config: dict[str, Any], size: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    words = f"--model {path} --gpus 8 --batch-tokens 512k"
    assert plan(capsys, words).startswith(f"{size} parameters")
    path.write_text("{")
    assert main(["plan", "--model", str(path), "--gpus", "8"]) == 2
    assert "is no JSON" in capsys.readouterr().err
