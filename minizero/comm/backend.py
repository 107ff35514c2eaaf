"""The backend's own collectives, and the choice between them, direct and ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..ranks.launch import device
from . import algorithms
from .groups import Group
from .quantized import Quantized, quantized_all_gather, quantized_reduce_scatter
from .transport import Finish, Rows, backend_of, is_staged, store

# torch 2.13 renamed both and warns at the old names, which 2.11 alone has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@cache
def _communicator(
    world: dist.ProcessGroup, ranks: tuple[int, ...], beside: bool
) -> dist.ProcessGroup:
    """Torch's group for these ranks, which make it when they first need it."""
    if not beside and len(ranks) == world.size():
        return world
    return dist.new_group(list(ranks), timeout(), use_local_synchronization=True)


def timeout() -> timedelta | None:
    """The timeout that the script has given; torch gives a new group its default."""
    world = dist.distributed_c10d._get_default_group()
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def communicator(group: Group) -> dist.ProcessGroup:
    """Torch's group for the next of the backend's own collectives.

    NCCL does what one communicator is given in turn, each after what its stream waits
    for. So what is launched on a stream of its own, as a gather of shards that are
    copied from the host, goes to another communicator than reductions do.
    """
    assert dist.group.WORLD is not None
    beside = torch.cuda.is_initialized() and (
        torch.cuda.current_stream() != torch.cuda.default_stream()
    )
    return _communicator(dist.group.WORLD, group.ranks, beside)


def backend_reduce_scatter(
    out: Tensor, inp: Rows, tag: int, average: bool, group: Group
) -> Finish:
    """The backend's own. It takes one contiguous input with equal rows."""
    equal, to = inp.whole, communicator(group)
    if equal is None:
        equal = torch.cat([pad(row, (0, inp.size - row.numel())) for row in inp])
    if backend_of(out) != "gloo":
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return _reduce_scatter(out, equal, op, to, async_op=True).wait
    equal = equal / group.size if average else equal
    target = torch.empty_like(out)  # gloo has no place for an input in its output
    work = _reduce_scatter(target, equal, group=to, async_op=True)

    def finish() -> None:
        work.wait()
        store(out, target[: inp[group.rank].numel()])

    return finish


def backend_all_gather(out: Rows, inp: Tensor, tag: int, group: Group) -> Finish:
    """The backend's own, into `out` itself where that is contiguous and even."""
    own = inp[: out[group.rank].numel()]
    own = pad(own, (0, out.size - own.numel())) if own.numel() < out.size else own
    target = out.whole
    arrived = own.new_empty(out.size * group.size) if target is None else target
    work = _all_gather(arrived, own, communicator(group), async_op=True)

    def finish() -> None:
        work.wait()
        for j, row in enumerate(out if target is None else ()):
            row.copy_(arrived[j * out.size :][: row.numel()])

    return finish


def all_reduce_whole(tensor: Tensor, average: bool, group: Group) -> Finish:
    """The backend's own, in place."""
    op = dist.ReduceOp.SUM
    if average and backend_of(tensor) == "gloo":
        tensor /= group.size
    elif average:
        op = dist.ReduceOp.AVG
    return dist.all_reduce(tensor, op, communicator(group), async_op=True).wait


class Halves(NamedTuple):
    """The two halves of an all-reduce; each call starts one and returns its finish."""

    reduce_scatter: Callable[[Tensor, Rows, int, bool, Group], Finish]
    all_gather: Callable[[Rows, Tensor, int, Group], Finish]


_HALVES = {
    "direct": Halves(algorithms.direct_reduce_scatter, algorithms.direct_all_gather),
    "ring": Halves(algorithms.ring_reduce_scatter, algorithms.ring_all_gather),
    "backend": Halves(backend_reduce_scatter, backend_all_gather),
}
ALGORITHMS = tuple(_HALVES)
_chosen: list[str] = []  # the innermost `algorithm` last


@contextmanager
def algorithm(name: str) -> Iterator[None]:
    """Choose how the collectives inside are done: "direct", "ring" or "backend".

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


def halves(tensor: Tensor, quantized: Quantized | None = None) -> Halves:
    """The halves of the current algorithm, for rows as they are or quantized."""
    found = _HALVES[current_algorithm(tensor)]
    if quantized is None:
        return found
    return Halves(
        partial(quantized_reduce_scatter, quantized),
        partial(quantized_all_gather, quantized, found.all_gather),
    )


def is_native(tensor: Tensor, quantized: Quantized | None = None) -> bool:
    """Whether one of the backend's own collectives does it all."""
    return quantized is None and current_algorithm(tensor) == "backend"
