"""A dry run, against the real engine on real ranks."""

from __future__ import annotations

import functools
import gc
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import minizero
from minizero import Tracker, dryrun, launch
from minizero.__main__ import main
from minizero.activations import recompute_units
from minizero.config import MICRO, STEPS
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.scale import MACHINES, MODELS, Candidate, Job, Shape, predict
from minizero.scale.dryrun import Decoder
from minizero.scale.planner import ds_config

THOROUGH = pytest.mark.thorough
SHAPE = Shape(2, 64, 4, 128, kv_heads=2, ffn_hidden=96, gated=True)
TOKENS = torch.zeros(2, 16, dtype=torch.long)


def gpt(kind: str = "") -> GPT:
    """`kind`: checkpoint, frozen, untied, or several of them."""
    torch.manual_seed(0)
    again = "checkpoint" in kind
    model = GPT(GPTConfig(2, 32, 4, sequence=16, vocabulary=64, checkpoint=again))
    if "frozen" in kind:
        model.blocks[0].requires_grad_(False)
    if "untied" in kind:
        model.head.weight = torch.nn.Parameter(model.tokens.weight.detach().clone())
    return model


def settings(
    stage: int, on: str = "", what: str = "optimizer", /, **zero: Any
) -> dict[str, Any]:
    """bf16 at a stage, with `what` on "cpu" or "nvme"; sections of the config apart."""
    sections = {key: zero.pop(key) for key in SECTIONS & zero.keys()}
    place = {"device": on} | (
        {"nvme_path": tempfile.gettempdir()} if on == "nvme" else {}
    )
    zero |= {f"offload_{part}": place for part in what.split() if on}
    zero = {"stage": stage, "overlap_comm": False} | zero
    if stage == 3:
        zero.setdefault("stage3_param_persistence_threshold", 0)
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "bf16": {"enabled": True},
    } | sections


SECTIONS = {"bf16", "fp16", "gradient_accumulation_steps", "gradient_clipping"}
BOTH = "optimizer param"
PLACES: list[tuple[Any, ...]] = [
    (0,), (1,), (1, "cpu"), (2,), (2, "nvme"), (3,), (3, "cpu", BOTH), (3, "nvme", BOTH)
]  # fmt: skip
OVERLAP = {"overlap_comm": True}
FP16 = {"bf16": {}, "fp16": {"enabled": True, "initial_scale_power": 4}}  # no overflow
Runs = list[tuple[dict[str, Any], str]]
TWO: Runs = [
    *(
        (settings(*place, overlap_comm=i % 2 == 0), "checkpoint" * (i % 2))
        for i, place in enumerate(PLACES)
    ),
    (settings(3, "cpu", BOTH, **OVERLAP, **FP16, gradient_accumulation_steps=2), ""),
    (settings(1, gradient_accumulation_steps=2, reduce_bucket_size=1000), "frozen"),
    (settings(2, bf16={}, gradient_clipping=1.0), "untied"),
    (settings(3, stage3_param_persistence_threshold=10**6, **OVERLAP), "frozen"),
    (settings(3, zero_quantized_weights=True, zero_quantized_gradients=True), ""),
]
GROUPS = {"mics_shard_size": 2} | OVERLAP
FOUR: Runs = [
    *((settings(*place, **GROUPS), "") for place in ((1, "cpu"), (3, "cpu", BOTH))),
    (settings(3, zero_hpz_partition_size=2, gradient_accumulation_steps=2), ""),
]


def calls_of(calls: Any) -> list[tuple[Any, ...]]:
    return [
        (c.op, c.elements, c.sent, c.bytes, c.dtype, c.phase, c.unit, c.group)
        for c in calls
    ]


def step(engine: Any) -> None:
    loss = engine(TOKENS, TOKENS)
    engine.backward(loss)
    engine.step()


def measured(runs: Runs) -> list[tuple[Any, ...]]:
    gc.freeze()
    found = []
    for config, kind in runs:
        engine, *_ = minizero.initialize(model=gpt(kind), config=config)
        many = engine.gradient_accumulation_steps()
        for _ in range(many):
            step(engine)
        gc.collect()  # as the dry run does
        with Tracker() as seen, minizero.comm.ledger() as calls:
            for _ in range(many):
                step(engine)
            between = dict(seen.live)
        found.append((seen.peaks, seen.peak, seen.host_peak, between, calls_of(calls)))
        del engine
        gc.collect()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("runs", "ranks"),
    [
        pytest.param(TWO, 2, marks=THOROUGH),  # chapter 16 does it with three plans
        pytest.param(FOUR, 4, marks=THOROUGH),
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_peaks_and_ledger_are_those_of_real_ranks(runs: Runs, ranks: int) -> None:
    results = launch(measured, ranks, runs)
    # the last rank stands for all but the first
    chosen = [(0, i) for i in range(len(runs))]
    for rank, i in [*chosen, *((ranks - 1, i) for i in range(0, len(runs), 8))]:
        config, kind = runs[i]
        found = dryrun(
            lambda: gpt(kind),  # noqa: B023
            config,
            world_size=ranks,
            batch=(TOKENS, TOKENS),
            device="cuda" if torch.cuda.is_available() else "cpu",
            rank=rank,
        )
        got = found.peaks, found.peak, found.host, found.between, calls_of(found.calls)
        assert got == results[rank][i], (rank, config, kind)


WIDE = Shape(6, 512, 8, 256, 2, 1792, gated=True)


@pytest.mark.parametrize(
    ("shape", "stage", "precision", "size", "how"),
    [
        pytest.param(
            replace(MODELS["gpt2"], layers=4), 3, "bf16", 4, "none", marks=THOROUGH
        ),
        (replace(MODELS["llama-8b"], layers=4), 3, "bf16", 1, "selective"),
        pytest.param(WIDE, 2, "bf16", 8, "none", marks=THOROUGH),
        pytest.param(WIDE, 2, "bf16", 8, "selective", marks=THOROUGH),
        pytest.param(WIDE, 2, "bf16", 8, "full", marks=THOROUGH),
        (Shape(6, 512, 8, 256), 1, "fp32", 8, "full"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_planner_and_the_dry_run_have_one_model_of_memory(
    shape: Shape, stage: int, precision: str, size: int, how: str
) -> None:
    """Activations are equal where the logits decide, and else not below; and the peak
    of all categories is within their sum."""
    job = Job(shape, MACHINES["h100-80gb"], 8, 8 * size, 512, precision)
    candidate = Candidate(stage, how, size)
    tokens = torch.zeros(size, 512, dtype=torch.long)

    def build() -> Decoder:
        model = Decoder(shape)
        recompute_units(model, how)
        return model

    config = ds_config(job, candidate)
    found = dryrun(build, config, world_size=8, batch=(tokens, tokens))
    memory = predict(job, candidate).memory
    low = 0.999 if shape.vocab > 256 else 0.9
    assert low < found.peaks["activations"] / memory.activations < 1.01
    assert found.peaks["parameters"] == pytest.approx(memory.parameters, rel=1e-3)
    assert found.peaks["optimizer"] == pytest.approx(memory.optimizer, rel=1e-3)
    assert 0.7 < found.peak / memory.total < 1.01


def test_a_dry_run_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what an earlier one has left, or a GPU that is there, does not count."""
    build, batch = functools.partial(Decoder, SHAPE), (TOKENS, TOKENS)
    config, options = settings(3, "cpu", BOTH), {"world_size": 8, "budget": 1.0}
    found = dryrun(build, config, batch=batch, **options)
    assert not found.fits and sum(found.at_peak.values()) == found.peak
    assert sum(found.peaks.values()) > found.peak
    text = str(found)
    assert "do not add up" in text and "does not fit in 0.0 GB" in text
    with pytest.raises(TypeError, match="targets") as left:
        dryrun(build, config, batch=(TOKENS,), **options)
    assert not torch.distributed.is_initialized()
    assert torch.ones(1).item() == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    after = dryrun(build, config, batch=batch, **options)
    assert (after.peaks, after.host) == (found.peaks, found.host)
    assert after.building == found.building and left.tb is not None
    with pytest.raises(ValueError, match="device must be one of cuda, cpu, not 'mps'"):
        dryrun(build, {}, world_size=2, batch=(), device="mps")


@THOROUGH
def test_a_plan_fits_by_the_dry_run_of_its_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The file says which GPUs, sequence and recomputation it is for."""
    path = tmp_path / "ds_config.json"
    words = "plan --model gpt2 --machine v100-32gb --gpus 16 --precision fp16"
    words += " --sequence 1024 --batch 512"
    assert main([*words.split(), "--out", str(path)]) == 0
    planned = re.search(r"([\d.]+) GB of 28.8 GB", capsys.readouterr().out)
    assert planned
    config = json.loads(path.read_text())
    command = ["dryrun", "--model", "gpt2", "--config", str(path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "rank 0 of 16" in out and "fits in 32.0 GB" in out
    peak = re.search(r"together +([\d.]+)", out)
    assert peak and 0.7 < float(peak[1]) / float(planned[1]) < 1.01
    # what is given on the command line counts instead
    config["minizero_plan"].pop("gpus")
    config |= {"train_batch_size": 64, MICRO: None, STEPS: None}  # as many a GPU
    path.write_text(json.dumps(config))
    assert main(command) == 2
    assert "give --gpus" in capsys.readouterr().err
    assert main([*command, "--gpus", "4", "--machine", "rtx-4090"]) == 0
    out, said = capsys.readouterr()
    assert "some seconds" in said
    assert "rank 0 of 4" in out and "in 24.0 GB" in out and peak[0] in out
