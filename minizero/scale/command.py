"""`python -m minizero plan` and `dryrun`: arguments in, text out."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import machines, shapes
from .decoder import Decoder
from .advice import describe, judge
from .candidates import LARGEST, Job
from .planner import choose, ds_config
from .shapes import check_counts

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
    plan.add_argument("--precision", default="bf16", help="bf16, fp16 or fp32")
    plan.add_argument(
        "--quantize", action="store_true", help="may send 8 and 4 bits (ZeRO++)"
    )
    plan.add_argument("--config", type=Path, help="a ds_config.json to judge as well")
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


def count(text: str) -> int:
    """A number such as 4M or 500_000."""
    unit = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower(), 1)
    digits = text[:-1] if unit > 1 else text
    try:
        return int(float(digits) * unit)
    except (ValueError, OverflowError):
        raise ValueError(
            f"tokens of a step are a number such as 4M, not {text!r}"
        ) from None


def sequences(tokens: int, sequence: int, gpus: int) -> int:
    """So many that they make about `tokens`, and that every GPU has as many.

    Within 5 % it is the number for a GPU that most micro-batches divide.
    """
    wanted = tokens / (sequence * gpus)
    near = range(math.ceil(wanted / 1.05), math.floor(wanted * 1.05) + 1)

    def ways(n: int) -> tuple[int, float]:
        sizes = range(1, min(n, LARGEST) + 1)
        return sum(n % size == 0 for size in sizes), -abs(n - wanted)

    return gpus * max(near, key=ways, default=int(wanted))


def plan(options: argparse.Namespace) -> None:
    """Print the plan, and write its config if asked for."""
    machine, shape = machines.find(options.machine), _shape(options)
    check_counts(gpus=options.gpus, sequence=options.sequence)
    tokens = count(options.batch_tokens)
    many = sequences(tokens, options.sequence, options.gpus)
    job = Job(
        shape, machine, options.gpus, many or tokens // options.sequence,
        options.sequence, options.precision, options.quantize,
    )  # fmt: skip
    choice = choose(job)
    print(describe(choice))
    if options.config:
        print(judge(choice, options.config))
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
