"""Ranks: launch a function on several processes that can talk to each other.

`launch` starts the ranks, runs a function on each and ends them. A `Pool` keeps them
for more. Inside, `rank`, `world_size` and `device` say who is asking. A script that
`torchrun` starts calls `init_distributed` first, and is then the same program.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store

from .pool import LEAVE, Processes, RankError, pack, report

__all__ = [
    "Pool",
    "RankError",
    "default_ranks",
    "device",
    "init_distributed",
    "launch",
    "rank",
    "report",
    "world_size",
]

TIMEOUT = 300.0  # seconds without progress after which ranks count as hanging
START = 600.0  # seconds that ranks may take to start: importing torch is slow


def rank() -> int:
    """The number of this process among the ranks; 0 if there are no others."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 if this process is alone."""
    return dist.get_world_size() if dist.is_initialized() else 1


def device() -> torch.device:
    """Where this rank computes: its GPU, or the CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def default_ranks() -> int:
    """How many ranks to start when nobody says: MINIZERO_RANKS, the GPUs, or 4.

    Raises:
        ValueError: MINIZERO_RANKS is not a positive number.
    """
    wanted = os.environ.get("MINIZERO_RANKS")
    if wanted is None:
        return torch.cuda.device_count() or 4
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ValueError(
            f"MINIZERO_RANKS is {wanted!r}; set it to a number of ranks, such as 4."
        )
    return int(wanted)


def _choose_backend(wanted: str | None, ranks: int) -> str:
    """NCCL needs a GPU for each of the machine's ranks. Gloo always works."""
    gpus = torch.cuda.device_count()
    if wanted is None:
        return "nccl" if gpus >= ranks else "gloo"
    if wanted not in ("nccl", "gloo"):
        raise ValueError(f"backend is {wanted!r}; choose 'nccl', 'gloo' or None.")
    if wanted == "nccl" and gpus < ranks:
        raise ValueError(
            f"backend 'nccl' needs a GPU for each rank, and there are {gpus} GPUs for "
            f"{ranks} ranks; choose 'gloo' or start fewer ranks."
        )
    return wanted


def _check_timeout(timeout: float | None) -> float:
    if timeout is None:
        return TIMEOUT
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; give a positive number of seconds.")
    return timeout


def _use_loopback() -> None:
    """Lets gloo talk within this machine, whatever networks it has or has not."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def _join(backend: str, timeout: float, rendezvous: str | None = None) -> None:
    """Makes this process one of the ranks, as its environment names it.

    The ranks find each other through the file `rendezvous`, or else as torchrun says.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    store: Store | None = None
    if rendezvous is not None:
        store = FileStore(rendezvous, ranks)
    elif "WORLD_SIZE" not in os.environ:
        store = HashStore()  # alone
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        store=store,
        rank=int(os.environ.get("RANK", "0")),
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )


def _join_pool(backend: str, timeout: float, rendezvous: str) -> None:
    _use_loopback()
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    cores = len(usable) or os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // int(os.environ["WORLD_SIZE"])))
    # The parent, which can explain a hang, should speak long before torch gives up.
    _join(backend, timeout + 3600, rendezvous)


def _leave_pool() -> None:
    dist.barrier()  # nobody leaves while another still talks
    _leave()


def _leave() -> None:
    """Ends the process group. Without it some runs abort at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def init_distributed(backend: str | None = None, timeout: float | None = None) -> None:
    """Makes this process a rank, if it is not one yet.

    Within `launch` and `Pool` there is nothing to do. Under torchrun the environment
    says which rank of how many. Elsewhere the process is rank 0 of 1.

    Args:
        backend: "nccl", "gloo", or None for nccl where each rank has its own GPU.
        timeout: seconds that a collective may take.
    """
    if dist.is_initialized():
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if here == int(os.environ.get("WORLD_SIZE", "1")):
        _use_loopback()
    _join(_choose_backend(backend, here), _check_timeout(timeout))
    atexit.register(_leave)


class Pool(Processes):
    """Ranks that live until they are closed, for one function after another.

    Args:
        nprocs: how many ranks.
        backend: "nccl", "gloo", or None for nccl where each rank has its own GPU. With
            gloo, ranks share the GPUs there are, or compute on the CPU.
        timeout: seconds without progress after which a call counts as hanging. A rank
            makes progress when it enters or leaves a collective, prints or returns.

    Raises:
        ValueError: an argument makes no sense.
        RankError: a rank could not start.
    """

    def __init__(
        self, nprocs: int, backend: str | None = None, timeout: float | None = None
    ) -> None:
        if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
            raise ValueError(
                f"nprocs is {nprocs!r}; give a number of ranks, 1 or more."
            )
        chosen = _choose_backend(backend, nprocs)
        super().__init__(nprocs, _check_timeout(timeout))
        join = pack(_join_pool, chosen, self.timeout, str(self._folder / "store"))
        with self._ended_by_errors():
            self._call(join, keep=False, timeout=START)

    def close(self) -> None:
        """Ends the ranks. To close them again does nothing."""
        if self.alive:
            with contextlib.suppress(RankError), self._ended_by_errors():
                self._call(pack(_leave_pool), keep=False, timeout=LEAVE)
        super().close()


def launch(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    backend: str | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs `fn(*args, **kwargs)` on `nprocs` ranks, and returns the result of each.

    The function may be defined anywhere, a notebook cell included. What the ranks
    print is shown in rank order, behind the number of the rank.

    Args:
        fn: the function; it and its arguments must pickle (with cloudpickle).
        nprocs, backend, timeout: as for `Pool`.

    Raises:
        TypeError, ValueError: an argument makes no sense or cannot be pickled.
        RankError: a rank has raised, ended or hung. The others have been ended.
    """
    task = pack(fn, *args, **kwargs)
    with Pool(nprocs, backend, timeout) as pool:
        return pool._call(task, keep=False)
