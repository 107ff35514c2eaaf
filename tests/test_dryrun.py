"""A dry run, against the real engine on real ranks."""

from __future__ import annotations

import functools
import gc
import json
import tempfile
from typing import Any

import pytest
import torch

import minizero
from minizero import Tracker, dryrun, estimate, launch
from minizero.__main__ import main
from minizero.activations import Offloaded, Recompute, recompute_units
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.scale.command import report
from minizero.scale.decoder import Decoder
from minizero.scale.dryrun import DryRun
from minizero.scale.fixes import Run, changes, everything
from minizero.scale.shapes import MODELS, Shape

SHAPE = Shape(2, 64, 4, 128, kv_heads=2, ffn_hidden=96, gated=True)
TOKENS = torch.zeros(2, 16, dtype=torch.long)


def gpt(kind: str = "") -> GPT:
    """`kind`: checkpoint, to the host, frozen, untied, or several of them."""
    torch.manual_seed(0)
    again = "checkpoint" in kind
    model = GPT(GPTConfig(2, 32, 4, sequence=16, vocabulary=64, checkpoint=again))
    if "host" in kind:
        recompute_units(model, Recompute("full", Offloaded()))
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
    (0,), (1,), (1, "cpu"), (1, "nvme"), (2,), (2, "cpu"), (2, "nvme"), (3,),
    (3, "cpu"), (3, "nvme"), (3, "cpu", BOTH), (3, "nvme", BOTH), (3, "nvme", "param"),
]  # fmt: skip
OVERLAP = {"overlap_comm": True}
FP16 = {"bf16": {}, "fp16": {"enabled": True, "initial_scale_power": 4}}  # no overflow
Runs = list[tuple[dict[str, Any], str]]
TWO: Runs = [
    *((settings(*place), "") for place in PLACES),
    *((settings(*place, **OVERLAP), "checkpoint") for place in PLACES),
    (settings(3, "cpu", BOTH, **OVERLAP, **FP16, gradient_accumulation_steps=2), ""),
    (settings(1, gradient_accumulation_steps=2, reduce_bucket_size=1000), "frozen"),
    (settings(2, bf16={}, gradient_clipping=1.0), "untied host"),
    (settings(3, stage3_param_persistence_threshold=10**6, **OVERLAP), "frozen"),
    (settings(3, zero_quantized_weights=True, zero_quantized_gradients=True), ""),
]
GROUPS = {"mics_shard_size": 2} | OVERLAP
FOUR: Runs = [
    *(
        (settings(*place, overlap_comm=i % 2 == 0), "checkpoint" * (i % 2))
        for i, place in enumerate(PLACES)
    ),
    *(
        (settings(*place, **GROUPS), "")
        for place in ((1, "cpu"), (2,), (3, "cpu", BOTH))
    ),
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
        with Tracker() as seen, minizero.comm.ledger() as calls:
            for _ in range(2 * engine.gradient_accumulation_steps()):
                step(engine)
            rests = dict(seen.live)
        found.append((seen.peaks, seen.peak, seen.host_peak, rests, calls_of(calls)))
        del engine
        gc.collect()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("runs", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_peaks_and_ledger_are_those_of_real_ranks(runs: Runs) -> None:
    ranks = 2 if runs is TWO else 4
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
            device="cpu",
            rank=rank,
        )
        got = found.peaks, found.peak, found.host, found.rests, calls_of(found.calls)
        assert got == results[rank][i], (rank, config, kind)


def decoder(world_size: int = 1024, /, **config: Any) -> DryRun:
    batch = (TOKENS, TOKENS)
    return dryrun(lambda: Decoder(SHAPE), config, world_size=world_size, batch=batch)


def test_state_at_many_ranks_is_what_the_estimate_says() -> None:
    for stage in (1, 3):
        found = decoder(**settings(stage))
        expected = estimate(SHAPE.parameters, 1024, stage)
        assert found.parameters == SHAPE.parameters
        for category in ("parameters", "gradients", "optimizer"):
            padded = 2 * 14 * 3 * 1024  # each unit is padded to 1,024 shards
            want = getattr(expected, category)
            assert want <= found.rests[category] <= want + padded, category


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "ranks"), [("llama-7b", 8), ("llama-70b", 1024)])
def test_state_of_a_large_model_is_exactly_the_estimate(model: str, ranks: int) -> None:
    shape, tokens = MODELS[model], torch.zeros(1, 512, dtype=torch.long)
    build = functools.partial(Decoder, shape)
    batch = (tokens, tokens)
    found = dryrun(build, settings(3), world_size=ranks, batch=batch, steps=1)
    state, counters = estimate(shape.parameters, ranks, 3), 4 * (shape.layers + 1)
    assert found.parameters == shape.parameters
    assert found.rests["parameters"] == state.parameters
    assert found.rests["gradients"] == state.gradients
    assert found.rests["optimizer"] == state.optimizer + counters


def test_what_does_not_fit_is_told_with_the_keys_that_help() -> None:
    config, batch = settings(0), (TOKENS, TOKENS)
    whole = decoder(4, **config)
    assert whole.fits and whole.budget is None and whole.fixes == {}

    def budgeted(budget: float) -> DryRun:
        model = functools.partial(Decoder, SHAPE)
        return dryrun(model, config, world_size=4, batch=batch, budget=budget)

    found = budgeted(whole.peak - 1)
    assert not found.fits
    stage = decoder(4, **settings(1))  # as the config says, with this key
    assert found.fixes["zero_optimization.stage: 1"] == stage.peak < whole.peak
    assert "zero_optimization.stage: 2" not in found.fixes  # a smaller change does
    lines = {(kind, line) for kind, line, _ in found.lines}
    assert any(line.startswith("decoder.py:") for _, line in lines)
    assert ("optimizer", "the engine") in lines  # not the line that called `dryrun`
    assert sum(nbytes for *_, nbytes in found.lines) <= found.peak
    assert "with no change that was tried" in report(budgeted(1))


def test_changes_of_a_run_are_what_their_words_say() -> None:
    batch = {"x": torch.zeros(4, 3), "scale": torch.tensor(1.0)}
    run = Run(functools.partial(gpt, ""), {"zero_optimization": {"stage": 1}}, batch)
    half = run.of_rows(2)
    assert half.batch["x"].shape == (2, 3) and half.batch["scale"].ndim == 0
    assert half.config["train_micro_batch_size_per_gpu"] == 2
    assert half.config["gradient_accumulation_steps"] == 2
    words = [tried.words for tries in changes(run) for tried in tries]
    assert words[:4] == [
        "zero_optimization.stage: 2",
        "zero_optimization.stage: 3",
        "bf16.enabled: true",
        "train_micro_batch_size_per_gpu: 2 and gradient_accumulation_steps: 2",
    ]
    most = everything(run)
    assert most.zero["stage"] == 3 and most.zero["offload_param"] == {"device": "cpu"}
    assert len(most.batch["x"]) == 1 and run.zero == {"stage": 1}


def test_a_dry_run_leaves_torch_as_it_was_and_refuses_in_sentences() -> None:
    before = torch.nn.Module._apply
    with pytest.raises(TypeError, match="targets"):  # in the middle of a rehearsal
        dryrun(lambda: Decoder(SHAPE), settings(3), world_size=8, batch=(TOKENS,))
    assert torch.nn.Module._apply is before
    assert not torch.distributed.is_initialized()
    assert torch.ones(1).item() == 1
    with pytest.raises(ValueError, match="device must be cuda or cpu, not 'mps'"):
        dryrun(torch.nn.Identity, {}, world_size=2, batch=(), device="mps")


def test_nothing_around_a_dry_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what an earlier one has left, as one that failed does, nor a GPU."""
    config = settings(3, "cpu", BOTH)
    alone = decoder(8, **config)
    build = functools.partial(Decoder, SHAPE)
    with pytest.raises(TypeError, match="targets") as left:
        dryrun(build, config, world_size=8, batch=(TOKENS,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    after = decoder(8, **config)
    assert (after.peaks, after.host) == (alone.peaks, alone.host)
    assert after.building == alone.building and left.tb is not None


def test_plan_writes_a_config_that_a_dry_run_reads(capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "ds_config.json"
    words = "plan --params 1e8 --machine a100-40gb --gpus 16 --batch-tokens 256k"
    assert main([*words.split(), "--out", str(path)]) == 0
    out = capsys.readouterr().out
    assert "why not:" in out and "plan: stage" in out
    config = json.loads(path.read_text())
    assert config["train_micro_batch_size_per_gpu"] >= 1
    words = "dryrun --params 1e8 --gpus 16 --sequence 128 --config"
    assert main([*words.split(), str(path)]) == 0
    out = capsys.readouterr().out
    assert "fits in 80.0 GB" in out and "live at the peak" in out
    assert main(["plan", "--gpus", "8"]) == 2
    assert "give --model or --params" in capsys.readouterr().err
