"""The backend's own collectives, and the choice between them and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks.launch import rank, world_size
from .algorithms import (
    direct_all_gather,
    direct_reduce_scatter,
    ring_all_gather,
    ring_reduce_scatter,
    store,
)
from .point_to_point import Rows, staged

# torch 2.13 renamed both and warns at the old names, which 2.11 alone has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def _pad(row: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, size - row.numel()))


def _side_by_side(parts: Rows) -> Tensor | None:
    """The rows as one tensor, if they are equal and lie so in memory."""
    size, step = parts[0].numel(), parts[0].nbytes
    start, storage = parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
    for j, part in enumerate(parts):
        same = part.untyped_storage().data_ptr() == storage
        if not same or part.numel() != size or part.data_ptr() != start + j * step:
            return None
    return parts[0].as_strided((size * len(parts),), (1,))


def backend_reduce_scatter(out: Tensor, inp: Rows, tag: int) -> Callable[[], None]:
    """The backend's own. It wants one contiguous input with equal rows."""
    size = inp[0].numel()
    padded = _side_by_side(inp)
    if padded is None:
        padded = torch.cat([_pad(row, size) for row in inp])
    target = torch.empty_like(inp[0])
    if staged(target):
        padded, target = padded.cpu(), target.cpu()
    work = _reduce_scatter(target, padded, async_op=True)

    def finish() -> None:
        work.wait()
        store(out, target[: inp[rank()].numel()].to(out.device))

    return finish


def backend_all_gather(out: Rows, inp: Tensor, tag: int) -> Callable[[], None]:
    """The backend's own, in place where the rows lie side by side."""
    size = out[0].numel()
    own = _pad(inp[: out[rank()].numel()], size)
    if staged(own):
        own = own.cpu()
    in_place = None if staged(out[0]) else _side_by_side(out)
    target = own.new_empty(size * world_size()) if in_place is None else in_place
    work = _all_gather(target, own, async_op=True)

    def finish() -> None:
        work.wait()
        for j, row in enumerate(out) if in_place is None else ():
            row.copy_(target[j * size : j * size + row.numel()])

    return finish


class Halves(NamedTuple):
    """The two halves of an all-reduce, each started by one call and finished by what
    that returns."""

    reduce_scatter: Callable[[Tensor, Rows, int], Callable[[], None]]
    all_gather: Callable[[Rows, Tensor, int], Callable[[], None]]


_HALVES = {
    "direct": Halves(direct_reduce_scatter, direct_all_gather),
    "ring": Halves(ring_reduce_scatter, ring_all_gather),
    "backend": Halves(backend_reduce_scatter, backend_all_gather),
}
ALGORITHMS = tuple(_HALVES)
_chosen: list[str] = []


@contextmanager
def algorithm(name: str) -> Iterator[None]:
    """Choose how collectives are done: "direct", "ring" or "backend".

    Without it gloo takes "direct" and NCCL takes "backend". Only "direct" promises that
    the order of a sum is the order of the ranks.
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


def current_algorithm() -> str:
    """The algorithm that the next collective takes."""
    if _chosen:
        return _chosen[-1]
    alone = not dist.is_initialized()
    return "direct" if alone or dist.get_backend() != "nccl" else "backend"


def halves() -> Halves:
    """Those of the current algorithm."""
    return _HALVES[current_algorithm()]


def natively(tensor: Tensor) -> bool:
    """Whether the backend's own whole collective is wanted, and can reach `tensor`."""
    return current_algorithm() == "backend" and not staged(tensor)
