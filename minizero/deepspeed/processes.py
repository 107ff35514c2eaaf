"""`deepspeed.comm` beside torch's own: ranks that find each other, and their groups."""

from __future__ import annotations

import atexit
import datetime
import os
from typing import Any

import torch.distributed as dist

from ..ranks import TIMEOUT, rendezvous, world_size
from ..ranks.launch import rank


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: float | datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """`minizero.init_distributed`; or as `init_method`, `rank` and `world_size` say.

    `dist_init_required` false: RuntimeError unless the ranks talk already. There is
    nothing to do for the other arguments: torchrun says where the ranks are.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "dist_init_required is False, but the ranks cannot talk yet; leave it out"
        )
    if init_method is None and rank < 0:
        return rendezvous.init_distributed(dist_backend, timeout)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", max(world_size, 1)))
    seconds = timeout if timeout is not None else TIMEOUT
    if not isinstance(seconds, datetime.timedelta):
        seconds = datetime.timedelta(seconds=seconds)
    backend = rendezvous.choose_backend(dist_backend, here)
    dist.init_process_group(
        backend, init_method, seconds, world_size=world_size, rank=rank
    )
    atexit.register(rendezvous.leave)


def get_local_rank() -> int:
    """The number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def get_rank(group: Any = None) -> int:
    """The number of this process in a group; 0 if it is alone."""
    return rank() if group is None else dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """The number of ranks in a group; 1 if this process is alone."""
    return world_size() if group is None else dist.get_world_size(group)


def get_world_group() -> Any:
    """The group of all ranks, which are all data-parallel."""
    return dist.group.WORLD


def one() -> int:
    """How many ranks share a layer."""
    return 1


def zero() -> int:
    """Which of these this rank is."""
    return 0
