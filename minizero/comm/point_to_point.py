"""Rows, and how they travel from rank to rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks.launch import device
from .scope import member
from .scope import rank, world_size

Rows = Sequence[Tensor]


class Cuts(Sequence[Tensor]):
    """The rows of a buffer, each cut when it is asked for: N may be thousands.

    `buffer`: [n], the last rows may be short; or columns of a table, [N, k].
    """

    def __init__(self, buffer: Tensor, ranks: int) -> None:
        self.buffer, self.ranks = buffer, ranks
        self.size = -(-buffer.numel() // ranks)

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, j: Any) -> Any:
        if not 0 <= j < self.ranks:
            raise IndexError(j)
        if self.buffer.dim() == 2:
            return self.buffer[j]
        return self.buffer[j * self.size : (j + 1) * self.size]


def count(parts: Rows) -> int:
    """Elements of all rows."""
    if isinstance(parts, Cuts):
        return parts.buffer.numel()
    return sum(part.numel() for part in parts)


# Transfers that nobody waited for: see `exchange`.
_forgotten: list[dist.Work] = []


def rows(buffer: Tensor | Sequence[Tensor]) -> Rows:
    """Row j of a buffer is what belongs to rank j: ceil(n/N) elements, 1-D.

    The last rows of an uneven buffer are shorter, as if it were padded. A list of N
    tensors is taken as the rows, and so is a slice of the columns of a table, [N, k].
    """
    n_ranks = world_size()
    if not isinstance(buffer, Tensor):
        parts = [part.detach() for part in buffer]
        if len(parts) != n_ranks:
            raise ValueError(f"{len(parts)} rows were given for {n_ranks} ranks")
        return parts
    columns = buffer.dim() == 2 and len(buffer) == n_ranks and buffer.stride(1) == 1
    if columns and not buffer.is_contiguous():
        return Cuts(buffer.detach(), n_ranks)
    if not buffer.is_contiguous():
        raise ValueError(
            f"a collective needs a contiguous tensor, not one of shape "
            f"{tuple(buffer.shape)} and strides {buffer.stride()}; call .contiguous()"
        )
    return Cuts(buffer.detach().view(-1), n_ranks)


def full_row(op: str, row: Tensor, full: Tensor) -> Tensor:
    """`row`, flat, if it is as long as a full row; else a ValueError."""
    if row.numel() != full.numel():
        raise ValueError(
            f"{op}: the row given has {row.numel()} elements, a full row of the buffer "
            f"on rank {rank()} has {full.numel()}; make them equal"
        )
    return row.detach().view(-1)


@cache
def _backends(config: str) -> dict[str, str]:
    """The backend of each type of device, as in "cpu:gloo,cuda:nccl"."""
    pairs = (part.partition(":") for part in config.split(","))
    return {device: backend for device, _, backend in pairs}


def backend_of(tensor: Tensor) -> str:
    """What moves this tensor: "gloo", "nccl"; "" for a process that is alone."""
    world = dist.group.WORLD
    if world is None:
        return ""
    return _backends(dist.get_backend_config(world)).get(tensor.device.type, "")


def staged(tensor: Tensor) -> bool:
    """Gloo moves host memory only: device tensors go through it."""
    return tensor.device.type != "cpu" and backend_of(tensor) == "gloo"


def reachable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy on the device if no backend moves host memory.

    Groups that `minizero` makes move both; a script may have made one that does not.
    """
    return tensor if backend_of(tensor) else tensor.to(device())


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors begin at one place of one storage."""
    alike = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return alike and a.storage_offset() == b.storage_offset()


def _nothing() -> None:
    """What a rank that is alone waits for."""


def exchange(
    sends: dict[int, Tensor], receives: dict[int, Tensor], tag: int
) -> Callable[[], None]:
    """Post all sends and receives (by place in the scope) at once; the result waits.

    If the result is dropped instead, the next call waits for them: once gloo has lost a
    receive that is under way, nothing else of that peer arrives.
    """
    while _forgotten:
        _forgotten.pop(0).wait()
    if not (sends or receives):
        return _nothing
    landing = {
        peer: t.new_empty(t.shape, device="cpu") if staged(t) else t
        for peer, t in receives.items()
        if t.numel()
    }
    # a row that goes to all peers is staged once
    rows_once = {id(t): t for t in sends.values() if staged(t)}
    host = {key: t.cpu() for key, t in rows_once.items()}
    leaving = {peer: host.get(id(t), t) for peer, t in sends.items() if t.numel()}
    # As bytes: the transport need not know the dtype.
    ops = [
        dist.P2POp(kind, t.view(torch.uint8), member(peer), tag=tag)
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
