"""Train, plan and inspect: `python -m minizero COMMAND --help` says more of each."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minizero import default_ranks, estimate, init_distributed
from minizero.ranks import RankError, launch, rank, world_size
from minizero.scale import MACHINES, MODELS, Job, choose, machines, planner, shapes

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minizero", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, epilog: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=help, description=help, epilog=epilog,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            argument_default=argparse.SUPPRESS,  # what is not given is not there
        )  # fmt: skip

    guess = command("estimate", "bytes of model state on a rank, for each stage")
    guess.add_argument("--params", type=float, required=True, help="such as 7e9")
    guess.add_argument("--ranks", type=int, required=True)
    guess.add_argument("--precision", default="bf16", help="fp32, bf16 or fp16")
    guess.add_argument("--optimizer", default="adam", help="adam, momentum or sgd")

    train = command("train", "train a small GPT under a stage, on several ranks")
    train.add_argument("--stage", type=int, default=3, help="of ZeRO, 0 to 3")
    train.add_argument("--ranks", type=int, help="default: MINIZERO_RANKS, GPUs or 4")
    train.add_argument("--model", default="1m", help="a size from 0.1m to 1b")
    train.add_argument("--steps", type=int, default=200, help="optimizer steps")
    train.add_argument("--batch", type=int, default=16, help="sequences, all ranks")
    train.add_argument("--sequence", type=int, default=128, help="tokens")
    train.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    train.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    train.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16")
    for what in ("optimizer", "param"):
        name = f"--offload-{what}"
        train.add_argument(name, choices=("cpu", "nvme"), help="where it is stored")
    train.add_argument("--nvme", help="folder for files (default: MINIZERO_NVME, /tmp)")
    train.add_argument(
        "--overlap", action="store_true", help="communicate while computing"
    )
    train.add_argument(
        "--checkpointing", default="none", help="of blocks: none, selective or full"
    )
    train.add_argument("--data", help="a file or folder (default: Python's source)")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--out", default="runs/train", help="folder for the results")
    train.add_argument("--save-every", type=int, help="steps between checkpoints")
    train.add_argument("--keep", type=int, default=2, help="checkpoints that stay")
    train.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint"
    )
    train.add_argument("--trace", help="file for a trace, which Perfetto opens")

    whole = command(
        "consolidate", "write a sharded checkpoint as safetensors files for others"
    )
    whole.add_argument("folder", help="as given to save")
    whole.add_argument("out", help="folder for model.safetensors")
    whole.add_argument("--tag", help="which checkpoint (default: the latest)")
    whole.add_argument("--dtype", default="fp32", choices=sorted(DTYPES))
    whole.add_argument(
        "--max-shard-size", type=float, default=5e9, help="bytes of one file"
    )

    known = f"Models: {', '.join(MODELS)}. Machines: {', '.join(MACHINES)}."
    plan = command("plan", "choose a stage, say why, and write the config", known)
    plan.add_argument("--machine", default="h100-80gb", help="one of those below")
    plan.add_argument("--gpus", type=int, required=True)
    plan.add_argument("--sequence", type=int, default=2048, help="tokens")
    plan.add_argument("--batch", type=int, default=2048, help="sequences, all GPUs")
    plan.add_argument("--precision", default="bf16", help="bf16, fp16 or fp32")
    plan.add_argument(
        "--quantize", action="store_true", help="may send 8 and 4 bits (ZeRO++)"
    )
    plan.add_argument("--out", type=Path, help="write the ds_config.json there")
    dry = command("dryrun", "run the engine as one rank of many, without a GPU", known)
    dry.add_argument("--config", type=Path, required=True, help="a ds_config.json")
    for name, kind, text in (
        ("--machine", str, "one of those below"),
        ("--gpus", int, "ranks"),
        ("--sequence", int, "tokens"),
        ("--checkpointing", str, "of blocks: none, selective or full"),
    ):
        dry.add_argument(name, type=kind, help=f"{text} (default: the plan's)")
    for one in (plan, dry):
        one.add_argument(
            "--model", required=True, help="one of those below, or a config.json"
        )
    return parser


def _estimate(options: argparse.Namespace) -> None:
    for name in ("params", "ranks"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} is {getattr(options, name):g}; give 1 or more")
    print(
        f"GB (10^9 bytes) per rank, {options.params:g} parameters, without activations"
    )
    print(
        f"{'stage':8}{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'total':>12}"
    )
    for stage in range(4):
        b = estimate(
            options.params,
            options.ranks,
            stage,
            precision=options.precision,
            optimizer=options.optimizer,
        )
        parts = (b.parameters, b.gradients, b.optimizer, b.total)
        print(f"{stage:<8}" + "".join(f"{x / 1e9:12.2f}" for x in parts))


def _train(options: argparse.Namespace) -> None:
    from minizero.lab import training

    names = training.Job.__dataclass_fields__
    job = training.Job(**{k: v for k, v in vars(options).items() if k in names})
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started the ranks
        init_distributed()
        job.check(world_size())
        report = training.train(job)
    else:
        ranks = getattr(options, "ranks", None)
        ranks = default_ranks() if ranks is None else ranks
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {ranks}")
        job.check(ranks)
        report = launch(training.train, ranks, job)[0]
    if rank() == 0:
        print(training.describe(job, report))


def _consolidate(options: argparse.Namespace) -> None:
    import torch

    from minizero.checkpoint import export

    dtype = getattr(torch, DTYPES[options.dtype])
    size = int(options.max_shard_size)
    tag = getattr(options, "tag", None)
    for path in export(options.folder, options.out, tag, dtype, size):
        print(path)


def _plan(options: argparse.Namespace) -> None:
    job = Job(
        shapes.find(options.model), machines.find(options.machine), options.gpus,
        options.batch, options.sequence, options.precision, "quantize" in options,
    )  # fmt: skip
    choice = choose(job)
    print(planner.describe(choice))
    config = json.dumps(planner.ds_config(job, choice.best.candidate), indent=2)
    if "out" not in options:
        print(config)
    else:
        options.out.write_text(config + "\n", "utf-8")
        print(f"wrote {options.out}")


def _dryrun(options: argparse.Namespace) -> None:
    import torch

    from minizero.activations import recompute_units
    from minizero.scale.dryrun import Decoder, dryrun

    config: dict[str, Any] = json.loads(options.config.read_text("utf-8"))
    planned: dict[str, Any] = {
        "machine": "h100-80gb",
        "sequence": 2048,
        "checkpointing": "none",
    }
    planned |= config.pop("minizero_plan", {}) | vars(options)
    if "gpus" not in planned:
        raise ValueError("the config does not say how many GPUs; give --gpus")
    shape, machine = shapes.find(options.model), machines.find(planned["machine"])

    def build() -> Decoder:
        model = Decoder(shape)
        recompute_units(model, planned["checkpointing"])
        return model

    size = config.get("train_micro_batch_size_per_gpu", 1)
    many = config.get("gradient_accumulation_steps", 1)
    if many > 2:
        config["gradient_accumulation_steps"] = 2
        print(f"2 of {many} micro-batches a step: the others repeat the first")
    tokens = torch.zeros(size, planned["sequence"], dtype=torch.long)
    print("two steps of the engine, some seconds each ...", file=sys.stderr, flush=True)
    found = dryrun(
        build,
        config,
        world_size=planned["gpus"],
        batch=(tokens, tokens),
        budget=machine.memory,
    )
    print(found)


COMMANDS = {
    "estimate": _estimate,
    "train": _train,
    "consolidate": _consolidate,
    "plan": _plan,
    "dryrun": _dryrun,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        COMMANDS[options.command](options)
        sys.stdout.flush()
    except BrokenPipeError:  # its reader has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, RankError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
