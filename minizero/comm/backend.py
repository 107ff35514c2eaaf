"""The backend's own collectives, and the choice between them and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks.launch import device
from .algorithms import (
    direct_all_gather,
    direct_reduce_scatter,
    ring_all_gather,
    ring_reduce_scatter,
    store,
)
from .point_to_point import Cuts, Rows, backend_of, staged
from .quantized import coded_all_gather, coded_reduce_scatter, current_code
from .scope import Scope, current_scope, rank, world_size

# torch 2.13 renamed both and warns at the old names, which 2.11 alone has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def _pad(row: Tensor, size: int) -> Tensor:
    missing = size - row.numel()
    return torch.nn.functional.pad(row, (0, missing)) if missing else row


def _side_by_side(parts: Rows) -> Tensor | None:
    """The rows as one tensor, if they are equal and lie so in memory."""
    if isinstance(parts, Cuts):
        equal = parts.buffer.numel() == len(parts) * parts.size
        return parts.buffer if equal and parts.buffer.is_contiguous() else None
    first, size = parts[0], parts[0].numel()
    storage, start = first.untyped_storage()._cdata, first.storage_offset()
    for j, part in enumerate(parts):
        same = part.untyped_storage()._cdata == storage and part.numel() == size
        if not same or part.storage_offset() != start + j * size:
            return None
    return first.as_strided((size * len(parts),), (1,))


def backend_reduce_scatter(
    out: Tensor, inp: Rows, tag: int, average: bool
) -> Callable[[], None]:
    """The backend's own. It wants one contiguous input with equal rows."""
    size = inp[0].numel()
    padded = _side_by_side(inp)
    if padded is None and isinstance(inp, Cuts):
        padded = _pad(inp.buffer.reshape(-1), size * len(inp))
    elif padded is None:
        padded = torch.cat([_pad(row, size) for row in inp])
    if backend_of(out) != "gloo":
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return _reduce_scatter(out, padded, op, queue(), async_op=True).wait
    if average:
        padded = padded / len(inp)
    target = torch.empty_like(inp[0], device="cpu")
    work = _reduce_scatter(target, padded.cpu(), group=queue(), async_op=True)

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
    work = _all_gather(target, own, queue(), async_op=True)

    def finish() -> None:
        work.wait()
        for j, row in enumerate(out) if in_place is None else ():
            row.copy_(target[j * size : j * size + row.numel()])

    return finish


def backend_all_reduce(tensor: Tensor, average: bool) -> Callable[[], None]:
    """The backend's own, in place."""
    op = dist.ReduceOp.SUM
    if average and backend_of(tensor) == "gloo":
        tensor /= world_size()
    elif average:
        op = dist.ReduceOp.AVG
    return dist.all_reduce(tensor, op, queue(), async_op=True).wait


class Halves(NamedTuple):
    """The two halves of an all-reduce, each started by one call and finished by what
    that returns."""

    reduce_scatter: Callable[[Tensor, Rows, int, bool], Callable[[], None]]
    all_gather: Callable[[Rows, Tensor, int], Callable[[], None]]


_HALVES = {
    "direct": Halves(direct_reduce_scatter, direct_all_gather),
    "ring": Halves(ring_reduce_scatter, ring_all_gather),
    "backend": Halves(backend_reduce_scatter, backend_all_gather),
}
ALGORITHMS = tuple(_HALVES)
_chosen: list[str] = []
_beside: list[dist.ProcessGroup] = []  # the innermost `beside` last


@cache
def _second(world: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group()


@cache
def _part(scope: Scope, beside: bool, world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of some ranks: those alone make it, when they first need it."""
    return dist.new_group([*scope.ranks], use_local_synchronization=True)


@contextmanager
def beside() -> Iterator[None]:
    """The backend's collectives inside queue apart from those outside.

    NCCL does what one communicator is given in turn, each after what its stream waits
    for: a copy from the host, say, that would hold up reductions as well.
    """
    if not dist.is_initialized():
        yield
        return
    assert dist.group.WORLD is not None
    _beside.append(_second(dist.group.WORLD))
    try:
        yield
    finally:
        _beside.pop()


def queue() -> dist.ProcessGroup | None:
    """The group that the backend's next collective goes to; None is the default one."""
    scope = current_scope()
    if scope is not None and dist.group.WORLD is not None:
        return _part(scope, bool(_beside), dist.group.WORLD)
    return _beside[-1] if _beside else None


@contextmanager
def algorithm(name: str) -> Iterator[None]:
    """Choose how collectives are done: "direct", "ring" or "backend".

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
    """The algorithm that the next collective of `tensor` takes.

    One group moves tensors of the host and of the device, each in its own way; without
    a tensor, one on this rank's device is meant.
    """
    if _chosen:
        return _chosen[-1]
    like = torch.empty(0, device=device()) if tensor is None else tensor
    return "direct" if backend_of(like) in ("", "gloo") else "backend"


def halves(tensor: Tensor) -> Halves:
    """Those of the current algorithm, between which rows may travel in code."""
    inner, code = _HALVES[current_algorithm(tensor)], current_code()
    if code is None:
        return inner
    return Halves(
        partial(coded_reduce_scatter, code),
        partial(coded_all_gather, code, inner.all_gather),
    )


def natively(tensor: Tensor) -> bool:
    """Whether the backend's own whole collective is wanted, and can reach `tensor`."""
    if current_code() is not None:
        return False
    return current_algorithm(tensor) == "backend" and not staged(tensor)
