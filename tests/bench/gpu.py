"""What one card can show, or several: `make gpu`, or `make gpu ARGS="alone waits"`.

A part that needs more GPUs than there are is left out, and the output says so.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import minizero
from bench.runner import interleaved, machine
from minizero import comm
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.ranks import device, launch, rank

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True, "check_grad_overflow": False}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12}},
}


def trainer(
    size: str, stage: int, precision: str = "bf16", rows: int = 4
) -> Callable[[], Tensor]:
    """A function that makes one step of a GPT on random bytes and returns the loss."""
    torch.manual_seed(0)
    config = GPTConfig.named(size)
    model = GPT(config).to(device())
    engine, *_ = minizero.initialize(
        model=model,
        config=PRECISIONS[precision]
        | {
            "train_micro_batch_size_per_gpu": rows,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "fused": True}},
            "zero_optimization": {"stage": stage},
        },
    )
    x, y = _batch(config, rows)

    def step() -> Tensor:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def plain(size: str, rows: int = 4) -> Callable[[], Tensor]:
    """The same without minizero: bf16 by autocast, fused AdamW, clipping."""
    torch.manual_seed(0)
    config = GPTConfig.named(size)
    model = GPT(config).to(device(), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    x, y = _batch(config, rows)

    def step() -> Tensor:
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _batch(config: GPTConfig, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank())
    tokens = torch.randint(256, (rows, config.sequence + 1), generator=generator)
    return tokens[:, :-1].to(device()), tokens[:, 1:].to(device())


def timed(step: Callable[[], Any]) -> float:
    """Seconds, the device's work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


# The parts. Each returns what JSON can hold.


def alone() -> dict[str, float]:
    """Median seconds of a step at world size 1, beside plain PyTorch in bf16."""
    steps = {"plain": plain("100m")}
    steps |= {f"stage {s}": trainer("100m", s) for s in range(4)}
    cases = {k: lambda step=step: timed(step) for k, step in steps.items()}
    found = interleaved(cases, 15, warmup=5)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def waits() -> dict[str, list[str]]:
    """What made the host wait for the device in a step, by stage and precision."""
    found = {}
    for precision in PRECISIONS:
        for stage in range(4):
            step = trainer("100m", stage, precision)
            step(), step()
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step()
            torch.cuda.set_sync_debug_mode("default")
            said = [f"{Path(w.filename).name}:{w.lineno}" for w in caught]
            found[f"stage {stage}, {precision}"] = said
    return found


def _stages(algorithm: str) -> dict[str, Any]:
    with comm.algorithm(algorithm):
        losses = {}
        for stage in range(4):
            step = trainer("1m", stage, rows=2)
            losses[stage] = [float(step()) for _ in range(4)]
    alike = all(losses[stage] == losses[0] for stage in losses)
    return {"equal": alike, "losses": losses[0], "device": str(device())}


def shared() -> list[Any]:
    """Two ranks on one card, through gloo: are all stages equal, bit for bit?"""
    return launch(_stages, 2, "direct", backend="gloo")


def cards() -> dict[str, list[Any]]:
    """A rank a card, on NCCL: its own collectives, and those that sum in one order."""
    ranks, ways = torch.cuda.device_count(), ("backend", "direct")
    return {way: launch(_stages, ranks, way, backend="nccl") for way in ways}


PARTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "alone": (1, alone), "waits": (1, waits), "shared": (1, shared), "cards": (2, cards)
}  # fmt: skip
"""The GPUs that a part needs, and what it does."""


def main(names: list[str]) -> None:
    """Run the parts that are named, or all; print what they found as JSON."""
    if unknown := set(names) - set(PARTS):
        raise ValueError(f"there is no part {', '.join(unknown)}; there are {[*PARTS]}")
    gpus = torch.cuda.device_count()
    print(json.dumps(machine()))
    for name in names or PARTS:
        needs, part = PARTS[name]
        if gpus < needs:
            print(f"{name}: left out: {gpus} GPUs of {needs}", flush=True)
        else:
            minizero.init_distributed()
            print(f"{name}: {json.dumps(part())}", flush=True)
