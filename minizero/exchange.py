"""How rows travel between ranks: directly, round a ring, or as the backend likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from minizero import tracker
from minizero.launch import rank, world_size

Rows = list[Tensor]


def rows(buffer: Tensor | Sequence[Tensor]) -> Rows:
    """Row j of a buffer is what belongs to rank j: ceil(n/N) elements, 1-D.

    The last rows of an uneven buffer are shorter, as if it were padded.
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


def staged(like: Tensor) -> bool:
    """Gloo moves host memory only: device tensors take a detour through it."""
    return like.device.type != "cpu" and dist.get_backend() == "gloo"


def exchange(
    sends: dict[int, Tensor], receives: dict[int, Tensor], tag: int
) -> Callable[[], None]:
    """Post all sends and receives (by peer) at once; the result waits for them."""
    landing = {
        peer: t.new_empty(t.shape, device="cpu") if staged(t) else t
        for peer, t in receives.items()
        if t.numel()
    }
    leaving = {
        peer: t.cpu() if staged(t) else t for peer, t in sends.items() if t.numel()
    }
    # as bytes: the transport need not know the dtype
    ops = [
        dist.P2POp(kind, t.view(torch.uint8), peer, tag=tag)
        for kind, side in ((dist.isend, leaving), (dist.irecv, landing))
        for peer, t in side.items()
    ]
    works = dist.batch_isend_irecv(ops) if ops else []

    def wait() -> None:
        for work in works:
            work.wait()
        for peer, t in landing.items():
            if t is not receives[peer]:
                receives[peer].copy_(t)
        leaving.clear()

    return wait


def _ordered_sum(parts: Rows) -> Tensor:
    """Sum in rank order; 16-bit inputs are summed in fp32 and rounded once."""
    wide = torch.float32 if parts[0].dtype.itemsize < 4 else parts[0].dtype
    if not parts[0].dtype.is_floating_point:
        wide = parts[0].dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total


def _store(out: Tensor, total: Tensor) -> None:
    """Write a row that may be shorter than `out`: the padding is zero."""
    out[: total.numel()].copy_(total)
    out[total.numel() :].zero_()


def _direct_reduce_scatter(out: Tensor, inp: Rows, tag: int) -> Callable[[], None]:
    """Send row j to rank j; sum what arrives in rank order."""
    me = rank()
    peers = [j for j in range(world_size()) if j != me]
    arriving = {j: tracker.label(torch.empty_like(inp[me]), "buffers") for j in peers}
    wait = exchange({j: inp[j] for j in peers}, arriving, tag)

    def finish() -> None:
        wait()
        _store(out, _ordered_sum([arriving.get(j, inp[me]) for j in range(len(inp))]))

    return finish


def _direct_all_gather(out: Rows, inp: Tensor, tag: int) -> Callable[[], None]:
    """Send the own row to every rank; the others' rows land in place."""
    me = rank()
    own = inp[: out[me].numel()]
    peers = [j for j in range(world_size()) if j != me]
    wait = exchange(dict.fromkeys(peers, own), {j: out[j] for j in peers}, tag)

    def finish() -> None:
        wait()
        if out[me].data_ptr() != own.data_ptr():
            out[me].copy_(own)

    return finish


def _ring_reduce_scatter(out: Tensor, inp: Rows, tag: int) -> Callable[[], None]:
    """N-1 steps: pass a partial sum to the right, add the own row to what comes."""
    me, n_ranks = rank(), world_size()

    def finish() -> None:
        partial = inp[(me - 1) % n_ranks].clone()
        for step in range(1, n_ranks):
            mine = inp[(me - 1 - step) % n_ranks]
            arriving = torch.empty_like(mine)
            right, left = (me + 1) % n_ranks, (me - 1) % n_ranks
            exchange({right: partial}, {left: arriving}, tag)()
            partial = arriving.add_(mine)
        _store(out, partial)

    return finish


def _ring_all_gather(out: Rows, inp: Tensor, tag: int) -> Callable[[], None]:
    """N-1 steps: pass on to the right the row that came last."""
    me, n_ranks = rank(), world_size()

    def finish() -> None:
        if out[me].data_ptr() != inp.data_ptr():
            out[me].copy_(inp[: out[me].numel()])
        for step in range(n_ranks - 1):
            passed, arriving = (me - step) % n_ranks, (me - step - 1) % n_ranks
            right, left = (me + 1) % n_ranks, (me - 1) % n_ranks
            exchange({right: out[passed]}, {left: out[arriving]}, tag)()

    return finish


# torch 2.13 renamed both and warns at the old names, which 2.11 alone has
_native_reduce_scatter = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)
_native_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def _pad(row: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, size - row.numel()))


def _backend_reduce_scatter(out: Tensor, inp: Rows, tag: int) -> Callable[[], None]:
    """The backend wants one contiguous input with equal rows."""
    size = inp[0].numel()
    padded = torch.cat([_pad(row, size) for row in inp])
    target = torch.empty_like(inp[0])
    if staged(target):
        padded, target = padded.cpu(), target.cpu()
    work = _native_reduce_scatter(target, padded, async_op=True)

    def finish() -> None:
        work.wait()
        _store(out, target[: inp[rank()].numel()].to(out.device))

    return finish


def _backend_all_gather(out: Rows, inp: Tensor, tag: int) -> Callable[[], None]:
    size = out[0].numel()
    own = _pad(inp[: out[rank()].numel()], size)
    if staged(own):
        own = own.cpu()
    target = own.new_empty(size * world_size())
    work = _native_all_gather(target, own, async_op=True)

    def finish() -> None:
        work.wait()
        for j, row in enumerate(out):
            row.copy_(target[j * size : j * size + row.numel()])

    return finish


REDUCE_SCATTER = {
    "direct": _direct_reduce_scatter,
    "ring": _ring_reduce_scatter,
    "backend": _backend_reduce_scatter,
}
ALL_GATHER = {
    "direct": _direct_all_gather,
    "ring": _ring_all_gather,
    "backend": _backend_all_gather,
}
