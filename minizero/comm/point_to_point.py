"""Rows, and how they travel from rank to rank."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..memory.labels import label
from ..ranks.launch import device
from .offers import Lent, Offered, Taken, is_read
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

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.__getitem__, range(self.ranks))

    def __getitem__(self, j: Any) -> Any:
        if not 0 <= j < self.ranks:
            raise IndexError(j)
        if self.buffer.dim() == 2:
            return self.buffer[j]
        if self.ranks == 1:
            return self.buffer
        return self.buffer[j * self.size : (j + 1) * self.size]


def count(parts: Rows) -> int:
    """Elements of all rows."""
    if isinstance(parts, Cuts):
        return parts.buffer.numel()
    return sum(part.numel() for part in parts)


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
    return Cuts(flat(buffer), n_ranks)


def flat(tensor: Tensor) -> Tensor:
    """As one dimension, and no part of a graph."""
    return tensor.detach() if tensor.dim() == 1 else tensor.detach().view(-1)


def full_row(op: str, row: Tensor, full: Tensor) -> Tensor:
    """`row`, flat, if it is as long as a full row; else a ValueError."""
    if row.numel() != full.numel():
        raise ValueError(
            f"{op}: the row given has {row.numel()} elements, a full row of the buffer "
            f"on rank {rank()} has {full.numel()}; make them equal"
        )
    return flat(row)


@cache
def _backends(config: str) -> dict[str, str]:
    """The backend of each type of device, as in "cpu:gloo,cuda:nccl"."""
    pairs = (part.partition(":") for part in config.split(","))
    return {device: backend for device, _, backend in pairs}


# of the group that was asked last; torch puts it together anew each time
_known: tuple[Callable[[], Any], str] = (object, "")


def backend_of(tensor: Tensor) -> str:
    """What moves this tensor: "gloo", "nccl"; "" for a process that is alone."""
    global _known
    if (world := dist.group.WORLD) is None:
        return ""
    if _known[0]() is not world:
        _known = weakref.ref(world), dist.get_backend_config(world)
    return _backends(_known[1]).get(tensor.device.type, "")


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


def _wait_apart(works: list[Any]) -> None:
    """In a thread: once gloo has lost a receive that is under way, nothing else of that
    peer arrives; and other ranks may still wait for what this one has dropped."""
    if not works:
        return

    def wait() -> None:
        with contextlib.suppress(RuntimeError):  # they may as well have ended
            while works:
                works.pop(0).wait()

    threading.Thread(target=wait, daemon=True).start()


def _nothing() -> None:
    """What a rank that is alone waits for."""


def exchange(
    sends: dict[int, Tensor], receives: dict[int, Tensor], tag: int
) -> Callable[[], None]:
    """Post all sends and receives (by place in the scope) at once; the result waits.

    If the result is dropped instead, a thread waits.
    """
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
    # what is read is waited for first: those that offer wait until it has been
    works: list[Any] = [
        Taken(t, peer, tag) for peer, t in landing.items() if is_read(t)
    ]
    # As bytes: the transport need not know the dtype.
    ops = [
        dist.P2POp(kind, t.view(torch.uint8), member(peer), tag=tag)
        for kind, side in ((dist.isend, leaving), (dist.irecv, landing))
        for peer, t in side.items()
        if not is_read(t)
    ]
    works += dist.batch_isend_irecv(ops) if ops else []
    works += [Offered(t, peer, tag) for peer, t in leaving.items() if is_read(t)]

    def wait() -> None:
        dropped.detach()
        while works:
            works.pop(0).wait()
        for peer, t in landing.items():
            if t is not receives[peer]:
                receives[peer].copy_(t)
        leaving.clear()

    dropped = weakref.finalize(wait, _wait_apart, works)
    dropped.atexit = False
    return wait


def borrow(
    sends: dict[int, Tensor], like: Tensor, tag: int
) -> Callable[[], contextlib.AbstractContextManager[dict[int, Any]]]:
    """Send rows, and get one of the same peers each, as long as `like`.

    They are there inside a block of what is returned, to be cut. Those that can be read
    where they are take no memory.
    """
    if not sends:
        return lambda: contextlib.nullcontext({})
    lent = {peer: Lent(like, peer, tag) for peer in sends} if is_read(like) else {}
    landing = (
        {} if lent else {p: label(torch.empty_like(like), "buffers") for p in sends}
    )
    wait = exchange(sends, landing, tag)

    @contextlib.contextmanager
    def block() -> Iterator[dict[int, Any]]:
        dropped.detach()
        if not lent:
            wait()
        for each in lent.values():
            each.begin()
        yield lent or landing
        for each in lent.values():
            each.end()
        if lent:
            wait()

    dropped = weakref.finalize(block, _wait_apart, list(lent.values()))
    dropped.atexit = False
    return block
