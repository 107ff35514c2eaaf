"""`python -m minizero plan` and `dryrun`: arguments in, text out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import machines, shapes
from .decoder import Decoder
from .planner import Job, choose, describe, ds_config

if TYPE_CHECKING:
    from .dryrun import DryRun


def add_arguments(commands: Any) -> None:
    """The two commands' parsers."""
    plan = commands.add_parser("plan", help="the fastest plan that fits, and why")
    rehearse = commands.add_parser(
        "dryrun", help="the engine's step as one rank of many, with no hardware"
    )
    for parser in (plan, rehearse):
        parser.add_argument("--model", help="a name such as llama-8b, or a config.json")
        parser.add_argument("--params", type=float, help="instead of --model: 7e9")
        parser.add_argument("--gpus", type=int, required=True)
        parser.add_argument("--sequence", type=int, default=2048, help="tokens")
        parser.add_argument("--machine", default="h100-80gb", help="such as a100-40gb")
    plan.add_argument("--batch-tokens", default="4M", help="of a step, all GPUs")
    plan.add_argument("--precision", default="bf16", help="bf16 or fp16")
    plan.add_argument("--out", type=Path, help="write the ds_config.json there")
    rehearse.add_argument("--config", type=Path, required=True, help="ds_config.json")
    rehearse.add_argument(
        "--checkpointing", action="store_true", help="recompute each block"
    )


def _shape(options: argparse.Namespace) -> shapes.Shape:
    if (options.model is None) == (options.params is None):
        raise ValueError("give --model or --params, one of them")
    if options.params is not None:
        return shapes.of_parameters(options.params)
    return shapes.find(options.model)


def _count(text: str) -> int:
    """A number such as 4M or 500_000."""
    unit = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower(), 1)
    digits = text[:-1] if unit > 1 else text
    try:
        return int(float(digits) * unit)
    except ValueError:
        raise ValueError(f"a number such as 4M is wanted, not {text!r}") from None


def plan(options: argparse.Namespace) -> None:
    """Print the plan, and write its config if asked for."""
    if options.precision not in ("bf16", "fp16"):
        raise ValueError(f"precision must be bf16 or fp16, not {options.precision!r}")
    machine = machines.find(options.machine)
    tokens = _count(options.batch_tokens)
    each = tokens // (options.sequence * options.gpus)
    # a power of two where that is near: micro-batches divide it
    each = 1 << (each.bit_length() - 1) if each else 0
    sequences = each * options.gpus or tokens // options.sequence
    job = Job(
        _shape(options), machine, options.gpus, sequences, options.sequence,
        options.precision,
    )  # fmt: skip
    choice = choose(job)
    print(describe(choice))
    config = json.dumps(ds_config(choice), indent=2)
    if options.out is None:
        print(config)
    else:
        options.out.write_text(config + "\n", "utf-8")
        print(f"wrote {options.out}")


def rehearse(options: argparse.Namespace) -> None:
    """Print what a rank would need."""
    from .dryrun import dryrun  # what it plays with takes a second to import

    shape, machine = _shape(options), machines.find(options.machine)
    config = json.loads(options.config.read_text("utf-8"))
    size = config.get("train_micro_batch_size_per_gpu", 1)
    tokens = torch.zeros(size, options.sequence, dtype=torch.long)
    found = dryrun(
        lambda: Decoder(shape, options.checkpointing),
        config,
        world_size=options.gpus,
        batch=(tokens, tokens),
        budget=machine.memory,
    )
    print(report(found))


def report(found: DryRun) -> str:
    """A dry run in words."""
    lines = [
        f"rank {found.rank} of {found.world_size}, {found.parameters / 1e9:.2f}B "
        "parameters",
        f"peak {found.peak / 1e9:.2f} GB at {found.when!r}; host "
        f"{found.host / 1e9:.2f} GB; while building {found.building / 1e9:.2f} GB",
        *(f"  {name:12}{n / 1e9:9.2f} GB" for name, n in found.peaks.items()),
        "live at the peak:",
        *(f"  {n / 1e9:9.2f} GB  {kind}, {line}" for kind, line, n in found.lines),
        found.calls.table(),
    ]
    if found.budget is not None:
        word = "fits" if found.fits else "does not fit"
        lines.append(f"{word} in {found.budget / 1e9:.1f} GB")
    lines += [f"  {key} needs {n / 1e9:.2f} GB" for key, n in found.fixes.items()]
    if not (found.fits or found.fixes):
        lines.append("  and with no change that was tried")
    return "\n".join(lines)
