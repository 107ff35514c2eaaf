"""All-to-all: what is cut one way on every rank becomes cut the other way."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .collectives import Work
from .ledger import enter
from .point_to_point import backend_of, exchange
from .scope import rank, world_size


def all_to_all(out: Tensor, inp: Tensor, async_op: bool = False) -> Work:
    """Row j of `inp` goes to rank j, and what comes from rank j is row j of `out`.

    Both [ranks, ...], contiguous, and not the same memory. Done twice, all is back.
    """
    n, mine = world_size(), rank()
    if inp.shape != out.shape or len(inp) != n:
        raise ValueError(
            f"all_to_all: {n} rows of one shape are needed, for as many ranks, not "
            f"{tuple(inp.shape)} and {tuple(out.shape)}"
        )
    peers = [j for j in range(n) if j != mine]
    source, target = inp.detach(), out.detach()
    sent = source.numel() - source[mine].numel()
    queued = backend_of(source) == "nccl"
    call = enter("all_to_all", source.numel(), sent, source.dtype, queued)

    def start(tag: int) -> Callable[[], None]:
        target[mine].copy_(source[mine])
        return exchange(
            {j: source[j] for j in peers}, {j: target[j] for j in peers}, tag
        )

    work = Work(call, start)
    if not async_op:
        work.wait()
    return work
