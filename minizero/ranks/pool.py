"""Ranks that stay: processes that have joined one another, for function after function."""

from __future__ import annotations

import contextlib
import os

import torch
import torch.distributed as dist

from minizero.ranks.processes import LEAVE, Processes, RankError, pack
from minizero.ranks.rendezvous import (
    START,
    check_timeout,
    choose_backend,
    join,
    leave,
    use_loopback,
)


def default_ranks() -> int:
    """Ranks to start when nobody says: MINIZERO_RANKS, the GPUs, or 4.

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
        whole = isinstance(nprocs, int) and not isinstance(nprocs, bool)
        if not whole or nprocs < 1:
            raise ValueError(
                f"nprocs is {nprocs!r}; give a number of ranks, 1 or more."
            )
        backend = choose_backend(backend, nprocs)
        super().__init__(nprocs, check_timeout(timeout))
        task = pack(_join, backend, self.timeout, str(self._folder / "store"))
        with self._ended_by_errors():
            self.call(task, keep=False, timeout=START)

    def close(self) -> None:
        """Ends the ranks. To close them again does nothing."""
        if self.alive:
            with contextlib.suppress(RankError), self._ended_by_errors():
                self.call(pack(_leave), keep=False, timeout=LEAVE)
        super().close()


def _join(backend: str, timeout: float, rendezvous: str) -> None:
    use_loopback()
    if "OMP_NUM_THREADS" not in os.environ:  # else torch has read it
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        cores = len(usable) or os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ["WORLD_SIZE"])))
    # The parent, which can explain a hang, should speak long before torch gives up.
    join(backend, timeout + 3600, rendezvous)


def _leave() -> None:
    dist.barrier()  # nobody leaves while another still talks
    leave()
