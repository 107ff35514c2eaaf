"""Ranks: launch a function on several processes that can talk to each other.

`launch` starts the ranks, runs a function on each and ends them. A `Pool`
keeps them for more. Inside, `rank`, `world_size` and `device` say who is
asking. A script that `torchrun` starts calls `init_distributed` first, and is
then the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .pool import Pool
from .worker import pack

ACCELERATOR = "cuda"  # tests have one that is not there


def rank() -> int:
    """The number of this process among the ranks; 0 if it is alone."""
    return 0 if dist.group.WORLD is None else dist.group.WORLD.rank()


def world_size() -> int:
    """The number of ranks; 1 if this process is alone."""
    return 1 if dist.group.WORLD is None else dist.group.WORLD.size()


def device() -> torch.device:
    """Where this rank computes: its GPU, or the CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device(ACCELERATOR, torch.cuda.current_device())
    return torch.device("cpu")


def launch(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    backend: str | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs `fn(*args, **kwargs)` on `nprocs` ranks; returns their results.

    The function may be defined anywhere, a notebook cell included. What the
    ranks print is shown in rank order, behind the number of the rank.

    Args:
        fn: the function; it and its arguments must pickle (with cloudpickle).
        nprocs, backend, timeout: as for `Pool`.

    Raises:
        TypeError, ValueError: an argument makes no sense or cannot be
            pickled.
        RankError: a rank has raised, ended or hung. The others have been
            ended.
    """
    task = pack(fn, *args, **kwargs)
    with Pool(nprocs, backend, timeout) as pool:
        return pool.call(task)
