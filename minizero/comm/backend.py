"""The backend's own collectives."""

from __future__ import annotations

from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .groups import Group
from .transport import Finish, Rows, backend_of, flat, store

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
        missing = inp.size * group.size - inp.numel
        equal = pad(flat(inp.given.contiguous()), (0, missing))
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
        if target is None:
            given = out.given.detach()
            given.copy_(arrived[: out.numel].view_as(given))

    return finish


def all_reduce_whole(tensor: Tensor, average: bool, group: Group) -> Finish:
    """The backend's own, in place."""
    op = dist.ReduceOp.SUM
    if average and backend_of(tensor) == "gloo":
        tensor /= group.size
    elif average:
        op = dist.ReduceOp.AVG
    return dist.all_reduce(tensor, op, communicator(group), async_op=True).wait
