"""Groups of ranks, and how the rows of a buffer travel between them.

As messages, of which `algorithms` makes collectives, or by collectives of the backend.
A function that launches something returns one that blocks until the result is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..memory.placement import check
from ..ranks import device, rank, world_size

ALGORITHMS = "direct", "backend"
_chosen: list[str] = []  # the innermost `algorithm` last

Finish = Callable[[], Any]

# torch 2.13 renamed both and warns at the old names, which 2.11 alone has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Group:
    """Some of the ranks, in order; `name` is what the ledger calls them.

    Only these ranks make a collective of the group, and they all make the same ones in
    the same order. Other groups need not make as many. The rows of a buffer are as many
    as the ranks of its group.
    """

    name: str
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The number of this process within the group, from 0."""
        return self.ranks.index(rank())

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)


def everyone() -> Group:
    """The group of all ranks, in which collectives take place by default."""
    return Group("all", tuple(range(world_size())))


class Groups:
    """All ranks, or those of `among`, as a grid: each row is a group of neighbors.

    Groups of 2 among 4 ranks are the rows (0, 1) and (2, 3). `number`, `place`: this
    rank's row and column. `within`: the ranks of its row, such as a server's GPUs;
    `across`: those of its column. Each row keeps one of the R = `copies` of a buffer;
    of its pieces, as many as all ranks, column j keeps R, from j·R to (j+1)·R - 1.

    Raises ValueError unless `size` divides the number of ranks.
    """

    def __init__(self, size: int, among: Group | None = None) -> None:
        every = among or everyone()
        ranks, n = every.ranks, every.size
        if not 1 <= size <= n or n % size:
            fits = [str(g) for g in range(2, n + 1) if n % g == 0]
            raise ValueError(
                f"groups of {size} ranks cannot be made of {n}; a group's size divides "
                f"the number of ranks: {', '.join(fits) or 'leave groups out'}"
            )
        self.size, self.copies = size, n // size
        self.number, self.place = divmod(every.rank, size)
        first = self.number * size
        self.within, self.across = every, Group("across", ranks[self.place :: size])
        if self.copies > 1:
            self.within = Group("within", ranks[first : first + size])


class Rows(Sequence[Tensor]):
    """The rows of a buffer: row j belongs to rank j of the group, by default of all.

    A row is 1-D and has `row_size` = ceil(n/N) elements. The last rows of an uneven
    buffer are shorter, as if it were padded. `buffer`: contiguous, n elements, or some
    columns of a table of shape [N, k]. A row is cut each time that it is asked for.

    `flat`: all rows as one tensor, if the buffer is contiguous; else None.
    `even`: the same, if all rows are equally long; else None. `own`: this rank's row.
    """

    def __init__(self, buffer: Tensor, group: Group | None = None) -> None:
        self.group, self.buffer = group or everyone(), buffer.detach()
        n, self.numel = self.group.size, buffer.numel()
        self.row_size = -(-self.numel // n)
        self.flat = self.buffer.view(-1) if buffer.is_contiguous() else None
        self.even = self.flat if self.numel == n * self.row_size else None
        columns = buffer.dim() == 2 and len(buffer) == n and buffer.stride(1) == 1
        if self.flat is None and not columns:
            raise ValueError(
                f"a collective needs a contiguous tensor, not one of shape "
                f"{tuple(buffer.shape)} and strides {buffer.stride()}; call .contiguous()"
            )
        self.own: Tensor = self[self.group.rank]

    def __len__(self) -> int:
        return self.group.size

    def __getitem__(self, j: Any) -> Any:
        if not 0 <= j < len(self):
            raise IndexError(j)
        if self.flat is None:
            return self.buffer[j]
        return self.flat[j * self.row_size : (j + 1) * self.row_size]


def backend_of(tensor: Tensor) -> str:
    """What moves this tensor: "gloo", "nccl"; "" for a process that is alone."""
    if (world := dist.group.WORLD) is None:
        return ""
    pairs = dist.get_backend_config(world).split(",")  # as in "cpu:gloo,cuda:nccl"
    return dict(pair.split(":") for pair in pairs).get(tensor.device.type, "")


def is_staged(tensor: Tensor) -> bool:
    """Whether it travels through host memory: gloo moves nothing else."""
    return tensor.device.type != "cpu" and backend_of(tensor) == "gloo"


@contextmanager
def algorithm(name: str) -> Iterator[None]:
    """Choose how the collectives inside are done: "direct" or "backend".

    Without it gloo takes "direct" and NCCL takes "backend". Only "direct" promises that
    all elements are summed in one order.
    """
    check("algorithm", name, ALGORITHMS)
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


# Gloo never delivers what follows a receive whose tensor is gone: messages for which
# an exception ended the wait stay here.
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
    """Send a tensor to each of some ranks of the group, receive one from others.

    All messages are posted at once. A receive takes a message of its sender and tag.
    """
    ranks = (group or everyone()).ranks
    leaving = {ranks[p]: t for p, t in sends.items() if t.numel()}
    arriving = wanted = {ranks[p]: t for p, t in receives.items() if t.numel()}
    if not (leaving or arriving):
        return lambda: None
    if is_staged(next(iter([*leaving.values(), *arriving.values()]))):
        # a row that goes to all peers is copied once
        host = {row: row.cpu() for row in {*leaving.values()}}
        leaving = {peer: host[row] for peer, row in leaving.items()}
        arriving = {p: torch.empty_like(t, device="cpu") for p, t in wanted.items()}
    works = _post(leaving, arriving, tag)
    _under_way[id(works)] = works, leaving, arriving

    def finish() -> None:
        while works:
            works.pop(0).wait()
        _under_way.pop(id(works), None)
        for peer, t in arriving.items():
            wanted[peer].copy_(t)  # nothing, where they are the same

    return finish


@cache
def _communicator(
    world: dist.ProcessGroup, ranks: tuple[int, ...], own_stream: bool
) -> dist.ProcessGroup:
    """Torch's group for these ranks; they alone make it, in its first collective."""
    if not own_stream and len(ranks) == world.size():
        return world
    return dist.new_group(list(ranks), timeout(), use_local_synchronization=True)


def timeout() -> timedelta | None:
    """The script's timeout, for further groups: torch would give them its default."""
    world = dist.distributed_c10d._get_default_group()
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def communicator(group: Group) -> dist.ProcessGroup:
    """Torch's group for the next of the backend's own collectives.

    NCCL runs a communicator's collectives in turn, each when its stream gets there.
    So those launched on a side stream, such as gathers of shards copied from the host,
    have a communicator of their own: reductions do not wait behind those copies.
    """
    assert dist.group.WORLD is not None
    own_stream = torch.cuda.is_initialized() and (
        torch.cuda.current_stream() != torch.cuda.default_stream()
    )
    return _communicator(dist.group.WORLD, group.ranks, own_stream)


def backend_reduce_scatter(out: Tensor, inp: Rows, tag: int, average: bool) -> Finish:
    """The backend's own. It takes one contiguous input with equal rows."""
    equal, to, n = inp.even, communicator(inp.group), len(inp)
    if equal is None:
        equal = pad(inp.buffer.reshape(-1), (0, inp.row_size * n - inp.numel))
    if backend_of(out) != "gloo":
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return _reduce_scatter(out, equal, op, to, async_op=True).wait
    equal = equal / n if average else equal
    target = torch.empty_like(out)  # gloo has no place for an input in its output
    work = _reduce_scatter(target, equal, group=to, async_op=True)

    def finish() -> None:
        work.wait()
        out.copy_(target)

    return finish


def backend_all_gather(out: Rows, inp: Tensor, tag: int) -> Finish:
    """The backend's own, into `out` itself where that is contiguous and even."""
    arrived = inp.new_empty(out.row_size * len(out)) if out.even is None else out.even
    work = _all_gather(arrived, inp, communicator(out.group), async_op=True)

    def finish() -> None:
        work.wait()
        if out.even is None:
            out.buffer.copy_(arrived[: out.numel].view_as(out.buffer))

    return finish


def all_reduce_whole(tensor: Tensor, average: bool, group: Group) -> Finish:
    """The backend's own, in place."""
    op = dist.ReduceOp.SUM
    if average and backend_of(tensor) == "gloo":
        tensor /= group.size
    elif average:
        op = dist.ReduceOp.AVG
    return dist.all_reduce(tensor, op, communicator(group), async_op=True).wait
