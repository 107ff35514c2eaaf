"""Rows, and how they travel from rank to rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks.launch import rank, world_size

Rows = list[Tensor]

# Transfers that nobody waited for: see `exchange`.
_forgotten: list[dist.Work] = []


def rows(buffer: Tensor | Sequence[Tensor]) -> Rows:
    """Row j of a buffer is what belongs to rank j: ceil(n/N) elements, 1-D.

    The last rows of an uneven buffer are shorter, as if it were padded. A list of N
    tensors is taken as the rows.
    """
    n_ranks = world_size()
    if not isinstance(buffer, Tensor):
        parts = [part.detach() for part in buffer]
        if len(parts) != n_ranks:
            raise ValueError(f"{len(parts)} rows were given for {n_ranks} ranks")
        return parts
    if not buffer.is_contiguous():
        raise ValueError(
            f"a collective needs a contiguous tensor, not one of shape "
            f"{tuple(buffer.shape)} and strides {buffer.stride()}; call .contiguous()"
        )
    flat = buffer.detach().view(-1)
    size = -(-flat.numel() // n_ranks)
    return [flat[j * size : (j + 1) * size] for j in range(n_ranks)]


def full_row(op: str, row: Tensor, parts: Rows) -> Tensor:
    """`row`, flat, if it is as long as a full row of `parts`; else a ValueError."""
    if row.numel() != parts[0].numel():
        raise ValueError(
            f"{op}: the row given has {row.numel()} elements, a full row of the buffer "
            f"on rank {rank()} has {parts[0].numel()}; make them equal"
        )
    return row.detach().view(-1)


def staged(like: Tensor) -> bool:
    """Gloo moves host memory only: device tensors go through it."""
    return like.device.type != "cpu" and dist.get_backend() == "gloo"


def exchange(
    sends: dict[int, Tensor], receives: dict[int, Tensor], tag: int
) -> Callable[[], None]:
    """Post all sends and receives (by peer) at once; the result waits.

    If the result is dropped instead, the next call waits for them: once gloo has lost a
    receive that is under way, nothing else of that peer arrives.
    """
    while _forgotten:
        _forgotten.pop(0).wait()
    landing = {
        peer: t.new_empty(t.shape, device="cpu") if staged(t) else t
        for peer, t in receives.items()
        if t.numel()
    }
    leaving = {
        peer: t.cpu() if staged(t) else t for peer, t in sends.items() if t.numel()
    }
    # As bytes: the transport need not know the dtype.
    ops = [
        dist.P2POp(kind, t.view(torch.uint8), peer, tag=tag)
        for kind, side in ((dist.isend, leaving), (dist.irecv, landing))
        for peer, t in side.items()
    ]
    works = dist.batch_isend_irecv(ops) if ops else []

    def wait() -> None:
        dropped.detach()
        for work in works:
            work.wait()
        for peer, t in landing.items():
            if t is not receives[peer]:
                receives[peer].copy_(t)
        leaving.clear()

    dropped = weakref.finalize(wait, _forgotten.extend, works)
    dropped.atexit = False
    return wait
