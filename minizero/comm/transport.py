"""Rows, and how they travel from rank to rank: as messages, or by the backend.

What starts something returns what finishes it: it blocks until the result is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks.launch import device
from .groups import Group, everyone

ALGORITHMS = "direct", "backend"
_chosen: list[str] = []  # the innermost `algorithm` last

Finish = Callable[[], Any]


class Rows(Sequence[Tensor]):
    """The rows of a buffer: row j belongs to rank j, and has ceil(n/N) elements, 1-D.

    The last rows of an uneven buffer are shorter, as if it were padded. `given`: a
    contiguous tensor, or some columns of a table of shape [N, k]. Rows are cut when
    they are used: there may be thousands.
    """

    flat: Tensor | None  # all rows as one tensor, if they are contiguous

    def __init__(self, given: Tensor, count: int) -> None:
        self.ranks, self.given, self.numel = count, given, given.numel()
        self.flat = flat(given) if given.is_contiguous() else None
        self.size = -(-self.numel // count)
        columns = given.dim() == 2 and len(given) == count and given.stride(1) == 1
        if self.flat is None and not columns:
            raise ValueError(
                f"a collective needs a contiguous tensor, not one of shape "
                f"{tuple(given.shape)} and strides {given.stride()}; call .contiguous()"
            )

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, j: Any) -> Any:
        if not 0 <= j < self.ranks:
            raise IndexError(j)
        if self.flat is None:
            return self.given[j].detach()
        return self.flat[j * self.size : (j + 1) * self.size]

    @property
    def whole(self) -> Tensor | None:
        """All rows as one contiguous tensor, if they are one and equally long."""
        return self.flat if self.numel == self.ranks * self.size else None


def flat(tensor: Tensor) -> Tensor:
    """As one dimension, and no part of a graph."""
    return tensor.detach() if tensor.dim() == 1 else tensor.detach().view(-1)


def store(out: Tensor, row: Tensor) -> None:
    """Write a row, unless it is there; where it is shorter than `out`, zeros follow."""
    there = row.untyped_storage()._cdata == out.untyped_storage()._cdata
    if not there or row.storage_offset() != out.storage_offset():
        out[: row.numel()].copy_(row)
    out[row.numel() :].zero_()


CACHED = 1 << 17  # elements


def store_by_pieces(
    out: Tensor, parts: Sequence[Tensor], add: Callable[..., Tensor]
) -> None:
    """Write what `add(parts, out=out)` gives.

    On a CPU it is done by pieces that stay in its cache: sums of several rows, and of
    16-bit rows in fp32, would go through memory several times.
    """
    n = parts[0].numel()
    width = CACHED if out.device.type == "cpu" else max(n, 1)
    for start in range(0, n, width):
        piece = slice(start, min(start + width, n))
        rows = [part[piece] for part in parts]
        store(out[piece], add(rows, out=out[piece]))
    out[n:].zero_()


@cache
def _backends(config: str) -> dict[str, str]:
    """The backend of each type of device, as in "cpu:gloo,cuda:nccl"."""
    pairs = (part.partition(":") for part in config.split(","))
    return {device: backend for device, _, backend in pairs}


def backend_of(tensor: Tensor) -> str:
    """What moves this tensor: "gloo", "nccl"; "" for a process that is alone."""
    if (world := dist.group.WORLD) is None:
        return ""
    return _backends(dist.get_backend_config(world)).get(tensor.device.type, "")


def is_staged(tensor: Tensor) -> bool:
    """Whether it travels through host memory: gloo moves nothing else."""
    return tensor.device.type != "cpu" and backend_of(tensor) == "gloo"


@contextmanager
def algorithm(name: str) -> Iterator[None]:
    """Choose how the collectives inside are done: "direct" or "backend".

    Without it gloo takes "direct" and NCCL takes "backend". Only "direct" promises that
    all elements are summed in one order.
    """
    if name not in ALGORITHMS:
        raise ValueError(
            f"algorithm must be one of {', '.join(ALGORITHMS)}, not {name!r}"
        )
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def current_algorithm(tensor: Tensor | None = None) -> str:
    """The algorithm of the next collective of `tensor`, or of one on the device."""
    like = torch.empty(0, device=device()) if tensor is None else tensor
    usual = "direct" if backend_of(like) in ("", "gloo") else "backend"
    wanted = _chosen[-1] if _chosen else usual
    # gloo's own collectives do not reach a device
    return "direct" if wanted == "backend" and is_staged(like) else wanted


def reachable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy on the device if no backend moves host memory.

    Process groups of `minizero` move both; a script may have made one that does not.
    """
    return tensor if backend_of(tensor) else tensor.to(device())


# Gloo never delivers what follows a receive whose tensor is gone: what an exception
# has kept from being waited for stays here until it has been delivered.
_under_way: dict[int, Any] = {}


def _post(sends: dict[int, Tensor], receives: dict[int, Tensor], tag: int) -> list[Any]:
    """Hand messages to the backend, by rank; returns what is waited for."""
    world = dist.group.WORLD
    assert world is not None
    if backend_of(next(iter([*sends.values(), *receives.values()]))) == "gloo":
        works: list[Any] = [world.send([t], peer, tag) for peer, t in sends.items()]
        return works + [world.recv([t], peer, tag) for peer, t in receives.items()]
    ops = [  # as bytes: the backend need not know the dtype
        dist.P2POp(kind, t.view(torch.uint8), peer, tag=tag)
        for kind, messages in ((dist.isend, sends), (dist.irecv, receives))
        for peer, t in messages.items()
    ]
    return list(dist.batch_isend_irecv(ops))


def exchange(
    sends: dict[int, Tensor],
    receives: dict[int, Tensor],
    tag: int = 0,
    group: Group | None = None,
) -> Finish:
    """Send a tensor to each of some places of the group, receive one from others.

    All messages are posted at once. A receive takes a message of its sender and tag.
    """
    ranks = (group or everyone()).ranks
    wanted = {ranks[p]: t for p, t in receives.items() if t.numel()}
    arriving = {
        peer: torch.empty_like(t, device="cpu") if is_staged(t) else t
        for peer, t in wanted.items()
    }
    # a row that goes to all peers is staged once
    rows = {id(t): t for t in sends.values() if t.numel()}
    host = {key: t.cpu() if is_staged(t) else t for key, t in rows.items()}
    leaving = {ranks[p]: host[id(t)] for p, t in sends.items() if t.numel()}
    if not (leaving or arriving):
        return lambda: None
    works = _post(leaving, arriving, tag)
    _under_way[id(works)] = works, leaving, arriving

    def finish() -> None:
        _under_way.pop(id(works), None)
        while works:
            works.pop(0).wait()
        for peer, t in arriving.items():
            if t is not wanted[peer]:
                wanted[peer].copy_(t)

    return finish
