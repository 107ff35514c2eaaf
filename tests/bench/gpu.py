"""Everything that concerns a GPU, run on one: `make gpu`.

Each part is a process of its own that may take `LIMIT` seconds. When it ends, its
result is written into the file of this card in book/measured. A part that needs more
GPUs than there are is left out, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import minizero
from bench.runner import NAMES, interleaved, machine
from minizero import comm
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.ranks import device, launch, rank

LIMIT = 530  # seconds of a part
ROOT = Path(__file__).parents[2]
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
    _wait()
    start = time.perf_counter()
    step()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _size() -> str:
    return "100m" if torch.cuda.is_available() else "0.1m"


# The parts. Each returns what JSON can hold.


def alone() -> dict[str, float]:
    """Median seconds of a step at world size 1, beside plain PyTorch in bf16."""
    steps = {"plain": plain(_size())}
    steps |= {f"stage {s}": trainer(_size(), s) for s in range(4)}
    cases = {k: lambda step=step: timed(step) for k, step in steps.items()}
    found = interleaved(cases, 15, warmup=5)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def waits() -> dict[str, list[str]]:
    """What made the host wait for the device in a step, by stage and precision."""
    found = {}
    for precision in PRECISIONS:
        for stage in range(4):
            step = trainer(_size(), stage, precision)
            step(), step()
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step()
            torch.cuda.set_sync_debug_mode("default")
            said = [f"{Path(w.filename).name}:{w.lineno}" for w in caught]
            found[f"stage {stage}, {precision}"] = said
    return found


def _stages(backend: str, algorithm: str) -> dict[str, Any]:
    with comm.algorithm(algorithm):
        losses = {}
        for stage in range(4):
            step = trainer("1m", stage, rows=2)
            losses[stage] = [float(step()) for _ in range(4)]
    alike = all(losses[stage] == losses[0] for stage in losses)
    return {"equal": alike, "losses": losses[0], "device": str(device())}


def shared() -> list[Any]:
    """Two ranks on one card, through gloo: are all stages equal, bit for bit?"""
    return launch(_stages, 2, "gloo", "direct", backend="gloo")


def cards() -> dict[str, list[Any]]:
    """A rank a card, on NCCL: its own collectives, and those that sum in one order."""
    ranks, ways = torch.cuda.device_count(), ("backend", "direct")
    return {way: launch(_stages, ranks, "nccl", way, backend="nccl") for way in ways}


PARTS: dict[str, Callable[[], Any]] = {
    "alone": alone, "waits": waits, "shared": shared, "cards": cards
}  # fmt: skip
FILES = "comm launch offload nvme activations float8 precision zero3 engine checkpoint"


def commands() -> dict[str, list[str]]:
    """All parts: those above, the tests that know of GPUs, notebooks, benchmarks."""
    here, test = ["tests/bench", "gpu", "--part"], ["-m", "pytest", "-q"]
    found = {name: [*here, name] for name in PARTS}
    for name in FILES.split():
        found[f"tests {name}"] = [*test, f"tests/test_{name}.py"]
    for path in sorted(ROOT.glob("notebooks/[0-9]*.ipynb")):
        found[f"notebook {path.stem}"] = [*test, str(path)]
    for name in NAMES:
        if not name.startswith("peers"):  # of processors; and longer than `LIMIT`
            found[f"bench {name}"] = ["tests/bench", name, "--repeats", "3"]
    return found


def run(name: str, command: list[str]) -> dict[str, Any]:
    """What the part found, or the end of what it said; and whether it went well."""
    start = time.perf_counter()
    command = ["timeout", str(LIMIT), sys.executable, *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found: dict[str, Any] = {"ok": done.returncode == 0}
    found["seconds"] = round(time.perf_counter() - start, 1)
    last = done.stdout.strip().rpartition("\n")[2]
    if found["ok"] and name in PARTS:
        found["found"] = json.loads(last)
    else:
        found["said"] = last if found["ok"] else (done.stdout + done.stderr)[-3000:]
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the parts that are named, or all; write what they found."""
    parser = argparse.ArgumentParser(prog="python tests/bench gpu", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts, by how they begin (all)")
    parser.add_argument("--out", default=str(ROOT / "book" / "measured"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        if options.part not in ("shared", "cards"):
            minizero.init_distributed()
        print(json.dumps(PARTS[options.part]()), flush=True)
        return
    wanted, gpus = tuple(options.names) or ("",), torch.cuda.device_count()
    about, results = machine(), dict[str, Any]()
    card = re.sub("[^a-z0-9]+", "-", str(about["gpu"]).lower())
    path = Path(options.out) / f"gpu-{card}.json"
    for name, command in commands().items():
        needs = 2 if name == "cards" else 1
        if name.startswith(wanted) and gpus < needs:
            print(f"{name}: left out: {gpus} GPUs of {needs}", flush=True)
        elif name.startswith(wanted):
            results[name] = this = run(name, command)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"machine": about, "parts": results}, indent=1))
            state = "done" if this["ok"] else "FAILED"
            print(f"{name}: {state} in {this['seconds']} s", flush=True)
