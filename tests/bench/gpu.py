"""What one card can show, or several: `make gpu`, or `make gpu ARGS="alone waits"`.

A part that needs more GPUs than there are is left out, and the output says so.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import minizero
from bench.runner import interleaved, machine
from minizero import comm
from minizero.activations.recompute import recompute_units
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.ranks import device, launch, rank
from minizero.scale.cost import Candidate, Job
from minizero.scale.machines import MACHINES
from minizero.scale.planner import ds_config
from minizero.scale.predict import predict
from minizero.scale.shapes import Shape

ADAMW = {"type": "AdamW", "params": {"lr": 3e-4, "fused": True}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True, "check_grad_overflow": False}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12}},
}
Step = Callable[[], Tensor]


def build(config: GPTConfig) -> GPT:
    torch.manual_seed(0)
    with device():
        return GPT(config)


def batch(config: GPTConfig, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank())
    tokens = torch.randint(256, (rows, config.sequence + 1), generator=generator)
    return tokens[:, :-1].to(device()), tokens[:, 1:].to(device())


def trainer(model: GPT, config: dict[str, Any], rows: int) -> Step:
    """A function that makes one step on random bytes and returns the loss."""
    config = {"train_micro_batch_size_per_gpu": rows, **config, "optimizer": ADAMW}
    engine, *_ = minizero.initialize(model=model, config=config)
    x, y = batch(model.config, rows)

    def step() -> Tensor:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def stage(number: int, precision: str, size: str, rows: int = 4) -> Step:
    config = {**PRECISIONS[precision], "zero_optimization": {"stage": number}}
    return trainer(build(GPTConfig.named(size)), config, rows)


def by_hand(model: nn.Module, config: GPTConfig, rows: int = 4) -> Step:
    """Without minizero: fused AdamW, clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    x, y = batch(config, rows)

    def step() -> Tensor:
        loss: Tensor = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2(config: GPTConfig) -> nn.Module:
    """With fp32 masters, as minizero's bf16 has them."""
    model, policy = build(config), MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def timed(step: Callable[[], Any]) -> float:
    """Seconds, the device's work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


# The parts. Each returns what JSON can hold.


def alone() -> dict[str, float]:
    """Median seconds of a step in bf16 at world size 1, beside plain PyTorch."""
    config = GPTConfig.named("100m")
    steps = {
        "plain, no masters": by_hand(build(config).to(torch.bfloat16), config),
        "FSDP2": by_hand(fsdp2(config), config),
        **{f"stage {s}": stage(s, "bf16", "100m") for s in range(4)},
    }
    cases = {k: lambda step=step: timed(step) for k, step in steps.items()}
    found = interleaved(cases, 15, warmup=5)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def waits() -> dict[str, list[str]]:
    """What made the host wait for the device in a step, by stage and precision."""
    found = {}
    for precision in PRECISIONS:
        for number in range(4):
            step = stage(number, precision, "100m")
            step(), step()
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step()
            torch.cuda.set_sync_debug_mode("default")
            said = [f"{Path(w.filename).name}:{w.lineno}" for w in caught]
            found[f"stage {number}, {precision}"] = said
    return found


SHAPES = {
    "GPT 0.4B": Shape(24, 1024, 16, 50_304),
    "GPT 1.3B": Shape(24, 2048, 16, 50_304),
    "GPT 2.7B": Shape(32, 2560, 32, 50_304),
    "GPT 6.6B": Shape(32, 4096, 32, 50_304),
}
CASES = [
    ("GPT 0.4B", Candidate(0, "none", 16)),
    ("GPT 1.3B", Candidate(0, "none", 8)),
    ("GPT 1.3B", Candidate(0, "full", 8)),
    ("GPT 1.3B", Candidate(3, "full", 8)),
    ("GPT 2.7B", Candidate(0, "full", 8)),
    ("GPT 2.7B", Candidate(1, "full", 8, offload_optimizer="cpu")),
    ("GPT 6.6B", Candidate(1, "full", 8, offload_optimizer="cpu")),
]
SEQUENCE = 2048


def predicted() -> list[dict[str, Any]]:
    """Seconds and bytes of steps of large models, beside what `predict` says."""
    return [_predicted(name, how) for name, how in CASES]


def _predicted(name: str, how: Candidate) -> dict[str, Any]:
    shape, rows = SHAPES[name], how.micro_batch
    job = Job(shape, MACHINES["h100-80gb"], 1, rows, SEQUENCE)
    guess = predict(job, how)
    sizes = shape.layers, shape.hidden, shape.heads, SEQUENCE, shape.vocab
    model = build(GPTConfig(*sizes))
    step = trainer(model, ds_config(job, how), rows)
    recompute_units(model, how.checkpointing)
    step(), step()
    torch.cuda.reset_peak_memory_stats()
    seconds = [timed(step) for _ in range(5)]
    nbytes = torch.cuda.max_memory_allocated()
    del model, step
    gc.collect()
    torch.cuda.empty_cache()
    said = {
        "model": name, "plan": str(how), "tokens": rows * SEQUENCE,
        "seconds": statistics.median(seconds), "predicted": guess.step_seconds,
        "bytes": nbytes, "predicted bytes": int(guess.memory.total), "mfu": guess.mfu,
    }  # fmt: skip
    print(json.dumps(said), flush=True)
    return said


def _stages(algorithm: str) -> dict[str, Any]:
    with comm.algorithm(algorithm):
        losses = {}
        for number in range(4):
            step = stage(number, "bf16", "1m", rows=2)
            losses[number] = [float(step()) for _ in range(4)]
    alike = all(losses[number] == losses[0] for number in losses)
    return {"equal": alike, "losses": losses[0], "device": str(device())}


def shared() -> list[Any]:
    """Two ranks on one card, through gloo: are all stages equal, bit for bit?"""
    return launch(_stages, 2, "direct", backend="gloo")


def cards() -> dict[str, list[Any]]:
    """A rank a card, on NCCL: its own collectives, and those that sum in one order."""
    ranks, ways = torch.cuda.device_count(), ("backend", "direct")
    return {way: launch(_stages, ranks, way, backend="nccl") for way in ways}


PARTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "alone": (1, alone), "waits": (1, waits), "predicted": (1, predicted),
    "shared": (1, shared), "cards": (2, cards),
}  # fmt: skip
"""The GPUs that a part needs, and what it does."""


def main(names: list[str]) -> None:
    """Run the parts that are named, or all; print what they found as JSON."""
    if unknown := set(names) - set(PARTS):
        raise ValueError(f"there is no part {', '.join(unknown)}; there are {[*PARTS]}")
    gpus, found = torch.cuda.device_count(), {"machine": machine()}
    for name in names or PARTS:
        needs, part = PARTS[name]
        if gpus < needs:
            print(f"{name}: left out: {gpus} GPUs of {needs}", flush=True)
            continue
        minizero.init_distributed()
        found[name] = part()
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    Path("runs").mkdir(exist_ok=True)
    Path("runs/gpu.json").write_text(json.dumps(found, indent=1))
