"""Train, plan and inspect: `python -m minizero COMMAND --help` says more of each."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minizero import default_ranks, estimate, init_distributed
from minizero.config import MICRO, STEPS, TOTAL, read
from minizero.ranks import RankError, launch, rank, world_size
from minizero.scale import MACHINES, MODELS, Job, choose, machines, planner, shapes

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _estimate(options: argparse.Namespace) -> None:
    for name in ("params", "ranks"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} is {getattr(options, name):g}; give 1 or more")
    print(f"GB (10^9 bytes) a rank, {options.params:g} parameters, without activations")
    names = ("parameters", "gradients", "optimizer", "total")
    print(f"{'stage':8}" + "".join(f"{name:>12}" for name in names))
    sizes = options.params, options.ranks
    for stage in range(4):
        b = estimate(*sizes, stage, options.precision, options.optimizer)
        print(f"{stage:<8}" + "".join(f"{getattr(b, n) / 1e9:12.2f}" for n in names))


def _train(options: argparse.Namespace) -> None:
    from minizero.lab import training

    names = training.Job.__dataclass_fields__
    job = training.Job(**{k: v for k, v in vars(options).items() if k in names})
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started the ranks
        init_distributed()
        job.check(world_size())
        report = training.train(job)
    else:
        ranks = options.ranks if "ranks" in options else default_ranks()
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {ranks}")
        job.check(ranks)
        report = launch(training.train, ranks, job)[0]
    if rank() == 0:
        print(training.describe(job, report))


def _consolidate(options: argparse.Namespace) -> None:
    import torch

    from minizero.checkpoint import export

    tag = options.tag if "tag" in options else None
    dtype = getattr(torch, DTYPES[options.dtype])
    for path in export(options.folder, options.out, tag, dtype):
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
    planned: dict[str, Any] = {"machine": "h100-80gb", "sequence": 2048}
    planned |= {"checkpointing": "none"} | config.pop("minizero_plan", {})
    planned |= vars(options)
    if "gpus" not in planned:
        raise ValueError("the config does not say how many GPUs; give --gpus")
    shape, machine = shapes.find(options.model), machines.find(planned["machine"])

    def build() -> Decoder:
        model = Decoder(shape)
        recompute_units(model, planned["checkpointing"])
        return model

    ranks, budget = planned["gpus"], machine.memory
    micro, steps = (getattr(read(config, ranks), name) for name in (MICRO, STEPS))
    if steps > 2:
        print(f"2 of {steps} micro-batches a step: the others repeat the first")
    config |= {TOTAL: None, MICRO: micro, STEPS: min(steps, 2)}
    batch = (torch.zeros(micro, planned["sequence"], dtype=torch.long),) * 2
    print("two steps of the engine, some seconds each ...", file=sys.stderr, flush=True)
    print(dryrun(build, config, world_size=ranks, batch=batch, budget=budget))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minizero", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, runs: Callable[..., None], help: str, epilog: str = ""
    ) -> Callable[..., Any]:
        """Add a command; returns what adds an option or an argument to it."""
        made = commands.add_parser(
            name, help=help, description=help, epilog=epilog,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            argument_default=argparse.SUPPRESS,  # what is not given is not there
        )  # fmt: skip
        made.set_defaults(runs=runs)
        return made.add_argument

    add = command("estimate", _estimate, "bytes of model state on a rank, by stage")
    add("--params", type=float, required=True, help="such as 7e9")
    add("--ranks", type=int, required=True)
    add("--precision", default="bf16", help="fp32, bf16 or fp16")
    add("--optimizer", default="adam", help="adam, momentum or sgd")

    add = command("train", _train, "train a small GPT under a stage, on several ranks")
    add("--stage", type=int, default=3, help="of ZeRO, 0 to 3")
    add("--ranks", type=int, help="default: MINIZERO_RANKS, GPUs or 4")
    add("--model", default="1m", help="a size from 0.1m to 1b")
    add("--steps", type=int, default=200, help="optimizer steps")
    add("--batch", type=int, default=16, help="sequences, all ranks")
    add("--sequence", type=int, default=128, help="tokens")
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--precision", default="fp32", help="fp32, bf16 or fp16")
    add("--offload-optimizer", choices=("cpu", "nvme"), help="where it is stored")
    add("--offload-param", choices=("cpu", "nvme"), help="where they are stored")
    add("--nvme", help="folder for files (default: /tmp)")
    add("--overlap", action="store_true", help="communicate while computing")
    add("--checkpointing", default="none", help="of blocks: none, selective or full")
    add("--data", help="a file, or a folder of Python (default: its library)")
    add("--seed", type=int, default=0)
    add("--out", default="runs/train", help="folder for the results")
    add("--save-every", type=int, help="steps between checkpoints")
    add("--keep", type=int, default=2, help="checkpoints that stay")
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add("--trace", help="file for a trace, which Perfetto opens")

    purpose = "write a sharded checkpoint as safetensors files for others"
    add = command("consolidate", _consolidate, purpose)
    add("folder", help="as given to save")
    add("out", help="folder for model.safetensors")
    add("--tag", help="which checkpoint (default: the latest)")
    add("--dtype", default="fp32", choices=sorted(DTYPES))

    known = f"Models: {', '.join(MODELS)}. Machines: {', '.join(MACHINES)}."
    purpose = "choose a stage, say why, and write the config"
    add = command("plan", _plan, purpose, known)
    add("--model", required=True, help="one of those below, or a config.json")
    add("--machine", default="h100-80gb", help="one of those below")
    add("--gpus", type=int, required=True)
    add("--sequence", type=int, default=2048, help="tokens")
    add("--batch", type=int, default=2048, help="sequences, all GPUs")
    add("--precision", default="bf16", help="bf16, fp16 or fp32")
    add("--quantize", action="store_true", help="may send 8 and 4 bits (ZeRO++)")
    add("--out", type=Path, help="write the ds_config.json there")

    purpose = "run the engine as one rank of many, without a GPU"
    add = command("dryrun", _dryrun, purpose, known)
    add("--model", required=True, help="one of those below, or a config.json")
    add("--config", type=Path, required=True, help="a ds_config.json")
    add("--machine", help="one of those below (default: the plan's)")
    add("--gpus", type=int, help="ranks (default: the plan's)")
    add("--sequence", type=int, help="tokens (default: the plan's)")
    add("--checkpointing", help="none, selective or full (default: the plan's)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.runs(options)
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
