"""A dry run, against the real engine on real ranks."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch

import minizero
from minizero import Tracker, dryrun, estimate, launch
from minizero.__main__ import main
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.scale.decoder import Decoder
from minizero.scale.dryrun import DryRun
from minizero.scale.shapes import Shape

SHAPE = Shape(2, 64, 4, 128, kv_heads=2, ffn_hidden=96, gated=True)
TOKENS = torch.zeros(2, 16, dtype=torch.long)


def gpt(checkpoint: bool) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(2, 32, 4, sequence=16, vocabulary=64, checkpoint=checkpoint))


def settings(
    stage: int, offload: tuple[str, ...] = (), overlap: bool = False, **more: Any
) -> dict[str, Any]:
    zero = {"stage": stage, "overlap_comm": overlap}
    zero |= {"stage3_param_persistence_threshold": 0}
    zero |= {f"offload_{what}": {"device": "cpu"} for what in offload}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        **more,
    }


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}  # no overflow
RUNS = [
    (settings(stage, off, overlap, **BF16), checkpoint)
    for stage, off in (
        (0, ()), (1, ()), (1, ("optimizer",)), (2, ()), (2, ("optimizer",)),
        (3, ()), (3, ("optimizer",)), (3, ("optimizer", "param")),
    )
    for overlap, checkpoint in ((False, False), (True, True))
] + [
    (settings(3, overlap=True, **FP16, gradient_accumulation_steps=2), False),
    (settings(1, gradient_accumulation_steps=2), True),
]  # fmt: skip


def calls_of(calls: Any) -> list[tuple[Any, ...]]:
    return [
        (c.op, c.elements, c.sent, c.bytes, c.dtype, c.phase, c.unit) for c in calls
    ]


def step(engine: Any) -> None:
    loss = engine(TOKENS, TOKENS)
    engine.backward(loss)
    engine.step()


def measured() -> list[tuple[Any, ...]]:
    found = []
    for config, checkpoint in RUNS:
        engine, *_ = minizero.initialize(model=gpt(checkpoint), config=config)
        with Tracker() as seen, minizero.comm.ledger() as calls:
            for _ in range(2 * engine.gradient_accumulation_steps()):
                step(engine)
        found.append((seen.peaks, seen.peak, seen.host_peak, calls_of(calls)))
        del engine
        gc.collect()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_peaks_and_ledger_are_those_of_real_ranks(ranks: int) -> None:
    for rank, results in enumerate(launch(measured, ranks)):
        if rank not in (0, ranks - 1):
            continue
        # the last rank of four stands for all but the first
        chosen = range(len(RUNS)) if rank == 0 else range(0, len(RUNS), 5)
        for i in chosen:
            config, checkpoint = RUNS[i]
            found = dryrun(
                lambda: gpt(checkpoint),  # noqa: B023
                config,
                world_size=ranks,
                batch=(TOKENS, TOKENS),
                device="cpu",
                rank=rank,
            )
            got = found.peaks, found.peak, found.host, calls_of(found.calls)
            assert got == results[i], (rank, config, checkpoint)


def decoder(world_size: int = 1024, /, **config: Any) -> DryRun:
    batch = (TOKENS, TOKENS)
    return dryrun(lambda: Decoder(SHAPE), config, world_size=world_size, batch=batch)


def test_state_at_many_ranks_is_what_the_estimate_says() -> None:
    for stage in (1, 3):
        found = decoder(**settings(stage, **BF16))
        expected = estimate(SHAPE.parameters, 1024, stage)
        assert found.parameters == SHAPE.parameters
        for category in ("parameters", "gradients", "optimizer"):
            padded = 2 * 14 * 3 * 1024  # each unit is padded to 1,024 shards
            want = getattr(expected, category)
            assert want <= found.rests[category] <= want + padded, category


def test_what_does_not_fit_is_told_with_the_key_that_helps() -> None:
    whole = decoder(4, **settings(0, **BF16))
    assert whole.fits and whole.budget is None and whole.fixes == {}
    found = dryrun(
        lambda: Decoder(SHAPE),
        settings(0, **BF16),
        world_size=4,
        batch=(TOKENS, TOKENS),
        budget=whole.peak - 1,
    )
    assert not found.fits
    assert "zero_optimization.stage: 3" in found.fixes
    assert all(peak < whole.peak for peak in found.fixes.values())
    assert any(line.startswith("decoder.py:") for _, line, _ in found.lines)
    assert sum(nbytes for *_, nbytes in found.lines) <= found.peak


def test_a_dry_run_leaves_torch_as_it_was_and_refuses_in_sentences() -> None:
    before = torch.nn.Module._apply
    with pytest.raises(TypeError, match="targets"):  # in the middle of a rehearsal
        dryrun(lambda: Decoder(SHAPE), settings(3), world_size=8, batch=(TOKENS,))
    assert torch.nn.Module._apply is before
    assert not torch.distributed.is_initialized()
    assert torch.ones(1).item() == 1
    nvme = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}
    with pytest.raises(ValueError, match="plays no files"):
        decoder(**settings(3) | {"zero_optimization": nvme})
    with pytest.raises(ValueError, match="device must be cuda or cpu, not 'mps'"):
        dryrun(torch.nn.Identity, {}, world_size=2, batch=(), device="mps")


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
