"""How rows travel from rank to rank: as messages, or by the backend's own collectives.

Each function starts something and returns what finishes it: a callable that blocks until
the result is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks.launch import device
from .groups import Group, everyone

Rows = Sequence[Tensor]
Finish = Callable[[], Any]

# torch 2.13 renamed both and warns at the old names, which 2.11 alone has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Cuts(Sequence[Tensor]):
    """The rows of a buffer, each cut when it is used: there may be thousands.

    `buffer`: [n], whose last rows may be short; or some columns of a table, [N, k].
    """

    def __init__(self, buffer: Tensor, count: int) -> None:
        self.buffer, self.count = buffer, count
        self.size = -(-buffer.numel() // count)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.__getitem__, range(self.count))

    def __getitem__(self, j: Any) -> Any:
        if self.buffer.dim() == 2:
            return self.buffer[j]
        return self.buffer[j * self.size : (j + 1) * self.size]


def rows(buffer: Tensor | Sequence[Tensor], group: Group) -> Rows:
    """Row j of a buffer belongs to place j of the group: ceil(n/N) elements, 1-D.

    The last rows of an uneven buffer are shorter, as if it were padded. A list of N
    tensors is taken as the rows, and so is a slice of the columns of a table, [N, k].
    """
    if not isinstance(buffer, Tensor):
        if len(buffer) != group.size:
            raise ValueError(f"{len(buffer)} rows were given for {group.size} ranks")
        return [row.detach() for row in buffer]
    if buffer.is_contiguous():
        return Cuts(flat(buffer), group.size)
    if buffer.dim() == 2 and len(buffer) == group.size and buffer.stride(1) == 1:
        return Cuts(buffer.detach(), group.size)
    raise ValueError(
        f"a collective needs a contiguous tensor, not one of shape "
        f"{tuple(buffer.shape)} and strides {buffer.stride()}; call .contiguous()"
    )


def count(parts: Rows) -> int:
    """Elements of all rows."""
    if isinstance(parts, Cuts):
        return parts.buffer.numel()
    return sum(part.numel() for part in parts)


def flat(tensor: Tensor) -> Tensor:
    """As one dimension, and no part of a graph."""
    return tensor.detach() if tensor.dim() == 1 else tensor.detach().view(-1)


def store(out: Tensor, total: Tensor) -> None:
    """Write a row that may be shorter than `out`: the padding is zero."""
    out[: total.numel()].copy_(total)
    out[total.numel() :].zero_()


# ---- who moves a tensor


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


def is_staged(tensor: Tensor) -> bool:
    """Whether it travels through host memory: gloo moves nothing else."""
    return tensor.device.type != "cpu" and backend_of(tensor) == "gloo"


def reachable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy on the device if no backend moves host memory.

    Groups that `minizero` makes move both; a script may have made one that does not.
    """
    return tensor if backend_of(tensor) else tensor.to(device())


# ---- messages

# Gloo never delivers what follows a receive whose tensor is gone: one that is dropped
# (an exception came between launch and wait) is kept until it has been delivered.
_under_way: dict[int, list[Any]] = {}


def _post(
    sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], tag: int
) -> list[Any]:
    """Hand messages to the backend, as (rank, tensor); returns what waits for them."""
    world = dist.group.WORLD
    assert world is not None
    if backend_of((sends + receives)[0][1]) == "gloo":
        works: list[Any] = [world.send([t], peer, tag) for peer, t in sends]
        return works + [world.recv([t], peer, tag) for peer, t in receives]
    ops = [  # as bytes: the backend need not know the dtype
        dist.P2POp(kind, t.view(torch.uint8), peer, tag=tag)
        for kind, messages in ((dist.isend, sends), (dist.irecv, receives))
        for peer, t in messages
    ]
    return list(dist.batch_isend_irecv(ops))


def exchange(
    sends: dict[int, Tensor],
    receives: dict[int, Tensor],
    tag: int = 0,
    group: Group | None = None,
) -> Finish:
    """Send a tensor to each of some places of the group and receive one from others.

    All messages are posted at once. A receive takes a message of its sender and tag.
    """
    ranks = (group or everyone()).ranks
    host: dict[int, Tensor] = {}  # a row that goes to all peers is staged once
    for t in sends.values():
        if is_staged(t) and id(t) not in host:
            host[id(t)] = t.cpu()
    leaving = [
        (ranks[p], host.get(id(t), t)) for p, t in sends.items() if t.numel()
    ]
    wanted = {ranks[p]: t for p, t in receives.items() if t.numel()}
    arriving = [
        (peer, torch.empty_like(t, device="cpu") if is_staged(t) else t)
        for peer, t in wanted.items()
    ]
    messages = leaving + arriving
    if not messages:
        return lambda: None
    works = _post(leaving, arriving, tag)
    key = id(works)
    _under_way[key] = [works, messages]

    def finish() -> None:
        _under_way.pop(key, None)
        while works:
            works.pop(0).wait()
        for peer, t in arriving:
            if t is not wanted[peer]:
                wanted[peer].copy_(t)

    return finish


# ---- the backend's own collectives


@cache
def _communicator(
    world: dist.ProcessGroup, ranks: tuple[int, ...], beside: bool
) -> dist.ProcessGroup:
    """Torch's group for these ranks, which make it when they first need it."""
    if not beside and len(ranks) == world.size():
        return world
    return dist.new_group(list(ranks), use_local_synchronization=True)


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


def _padded(parts: Rows) -> Tensor:
    """The rows one behind the other, all as long as the first."""
    size = parts[0].numel()
    if isinstance(parts, Cuts):
        flat = parts.buffer.reshape(-1)
        missing = size * len(parts) - flat.numel()
        return torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    pad = torch.nn.functional.pad
    return torch.cat([pad(row, (0, size - row.numel())) for row in parts])


def backend_reduce_scatter(
    out: Tensor, inp: Rows, tag: int, average: bool, group: Group
) -> Finish:
    """The backend's own. It takes one contiguous input with equal rows."""
    padded, to = _padded(inp), communicator(group)
    if backend_of(out) != "gloo":
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return _reduce_scatter(out, padded, op, to, async_op=True).wait  # type: ignore[no-any-return]
    if average:
        padded = padded / len(inp)
    target = torch.empty_like(inp[0], device="cpu")
    work = _reduce_scatter(target, padded.cpu(), group=to, async_op=True)

    def finish() -> None:
        work.wait()
        store(out, target[: inp[group.rank].numel()].to(out.device))

    return finish


def backend_all_gather(out: Rows, inp: Tensor, tag: int, group: Group) -> Finish:
    """The backend's own, into `out` itself where that is contiguous and even."""
    size, own = out[0].numel(), inp[: out[group.rank].numel()]
    if own.numel() < size:
        own = torch.nn.functional.pad(own, (0, size - own.numel()))
    staged = is_staged(own)
    even = isinstance(out, Cuts) and out.buffer.numel() == size * group.size
    direct = even and not staged and out.buffer.is_contiguous()
    own = own.cpu() if staged else own
    target = out.buffer if direct else own.new_empty(size * group.size)
    work = _all_gather(target, own, communicator(group), async_op=True)

    def finish() -> None:
        work.wait()
        for j, row in enumerate(() if direct else out):
            row.copy_(target[j * size : j * size + row.numel()])

    return finish


def backend_all_reduce(tensor: Tensor, average: bool, group: Group) -> Finish:
    """The backend's own, in place."""
    op = dist.ReduceOp.SUM
    if average and backend_of(tensor) == "gloo":
        tensor /= group.size
    elif average:
        op = dist.ReduceOp.AVG
    return dist.all_reduce(tensor, op, communicator(group), async_op=True).wait  # type: ignore[union-attr,no-any-return]
