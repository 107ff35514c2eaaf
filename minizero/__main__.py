"""`python -m minizero`: the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from minizero import default_ranks, estimate, init_distributed
from minizero.ranks import launch
from minizero.ranks.launch import RankError, rank, world_size
from minizero.scale import command


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minizero", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    guess = commands.add_parser("estimate", help="bytes of model state per rank")
    guess.add_argument("--params", type=float, required=True, help="such as 7e9")
    guess.add_argument("--ranks", type=int, required=True)
    guess.add_argument("--precision", default="bf16", help="fp32, bf16 or fp16")
    guess.add_argument("--optimizer", default="adam", help="adam, momentum or sgd")

    train = commands.add_parser(
        "train", help="train a small GPT", formatter_class=_Defaults
    )
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
        train.add_argument(name, choices=("cpu", "nvme"), help="where it rests")
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

    whole = commands.add_parser(
        "consolidate",
        help="write a sharded checkpoint as safetensors files that others read",
        formatter_class=_Defaults,
    )
    whole.add_argument("folder", help="as given to save")
    whole.add_argument("out", help="folder for model.safetensors")
    whole.add_argument("--tag", help="which checkpoint (default: the latest)")
    whole.add_argument("--dtype", default="fp32", choices=sorted(_DTYPES))
    whole.add_argument(
        "--max-shard-size", type=float, default=5e9, help="bytes of one file"
    )

    command.add_arguments(commands)

    bench = commands.add_parser(
        "bench", help="measure speed, as ratios", formatter_class=_Defaults
    )
    bench.add_argument("names", nargs="*", help="which benchmarks (default: all)")
    bench.add_argument("--repeats", type=int, default=5, help="turns that count")
    bench.add_argument("--out", default="runs/bench.json", help="file for the figures")
    return parser


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None:
            return action.help
        return super()._get_help_string(action)


def _estimate(options: argparse.Namespace) -> None:
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
    from minizero.lab.training.job import Job
    from minizero.lab.training.report import describe
    from minizero.lab.training.train import train

    settings = {k: v for k, v in vars(options).items() if k in Job.__annotations__}
    job = Job(**settings)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started the ranks
        init_distributed()
        job.check(world_size())
        report = train(job)
    else:
        ranks = default_ranks() if options.ranks is None else options.ranks
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {ranks}")
        job.check(ranks)
        report = launch(train, ranks, job)[0]
    if rank() == 0:
        print(describe(job, report))


def _consolidate(options: argparse.Namespace) -> None:
    import torch

    from minizero.checkpoint import export

    dtype = getattr(torch, _DTYPES[options.dtype])
    size = int(options.max_shard_size)
    for path in export(options.folder, options.out, options.tag, dtype, size):
        print(path)


def _bench(options: argparse.Namespace) -> None:
    from minizero.lab.bench import runner

    runner.run(options.names, options.repeats, options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = _arguments().parse_args(arguments)
    try:
        commands = {
            "estimate": _estimate,
            "train": _train,
            "consolidate": _consolidate,
            "bench": _bench,
            "plan": command.plan,
            "dryrun": command.rehearse,
        }
        commands[options.command](options)
        sys.stdout.flush()
    except BrokenPipeError:  # its reader has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, RankError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
