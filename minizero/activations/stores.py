"""Where a unit's saved tensors wait for backward: device, ranks or host."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from .. import comm
from ..memory.labels import host_empty
from ..ranks import rank, world_size
from .saved_tensors import record_saved


class Store:
    """Keeps what a unit saves for backward: here, on the device.

    `begin` is called when a unit's forward begins; its result is passed to
    every `pack` of that forward. `unpack` returns the same bits.
    """

    def begin(self, unit: str) -> Any:
        return None

    def pack(self, x: Tensor, call: Any) -> Any:
        record_saved(x, "recompute")
        return x.detach(), x._version

    def unpack(self, held: Any) -> Tensor:
        return unchanged(*held)


def store_hooks(store: Store, unit: str) -> saved_tensors_hooks:
    """Hand the store all floating-point tensors that autograd saves but parameters."""
    call = store.begin(unit)

    def pack(x: Tensor) -> Any:
        base = x._base if x._is_view() else x
        is_stored = x.is_floating_point() and not isinstance(base, nn.Parameter)
        if is_stored and x.numel():
            return partial(store.unpack, store.pack(x, call))
        record_saved(x)
        return partial(unchanged, x, x._version)

    return saved_tensors_hooks(pack, lambda restore: restore())


def unchanged(x: Tensor, version: int) -> Tensor:
    """The tensor; RuntimeError if it was written to since this version."""
    if x._version != version:  # autograd does not check behind hooks
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} that backward needs was changed in "
            "place after the forward; change it, as a step does, after the backward"
        )
    return x


class Sharded(Store):
    """Each rank keeps one shard; an all-gather restores the rest (P_a).

    Rajbhandari et al. 2020, sec. 6.1. It saves (N-1)/N of what is *identical
    on all ranks*: the inputs of a tensor-parallel block. Ranks of data
    parallelism hold different activations: in a unit's first forward, the ranks
    compare the sum of each tensor, and all raise ValueError if sums differ.

    `inner`: where the shard waits (default: on the device).
    """

    def __init__(self, inner: Store | None = None) -> None:
        self.inner = inner or Store()
        self._verified: set[str] = set()

    def begin(self, unit: str) -> tuple[str, bool, Any]:
        is_first = unit not in self._verified
        self._verified.add(unit)
        return unit, is_first, self.inner.begin(unit)

    def pack(self, x: Tensor, call: tuple[str, bool, Any]) -> Any:
        unit, is_first, inner = call
        x = x.detach()
        dense = x if x.is_contiguous() else x.clone()
        numel = dense.numel()
        flat = dense.as_strided((numel,), (1,), dense.storage_offset())
        size = -(-numel // world_size())
        own = flat[rank() * size : (rank() + 1) * size]
        shard = flat.new_zeros(size)  # padded, if it is the last
        shard[: own.numel()] = own
        if is_first:
            # as integers, so that NaN equals NaN
            total = flat.sum(dtype=torch.float64).view(1).view(torch.int64)
            if (join(total, world_size()) != total).any():
                self._verified.discard(unit)
                raise ValueError(
                    f"rank {rank()}: the ranks hold different tensors in unit "
                    f"{unit!r}; shard activations where all ranks compute on "
                    "the same batch (tensor parallelism), and else use "
                    "Offloaded()"
                )
        held = self.inner.pack(shard, inner)
        return held, numel, dense.shape, dense.stride()

    def unpack(self, held: Any) -> Tensor:
        shard, numel, shape, stride = held
        full = join(self.inner.unpack(shard), numel)
        return full.as_strided(shape, stride)


def join(shard: Tensor, numel: int) -> Tensor:
    """The shards of all ranks, without the padding: [numel]."""
    full = shard.new_empty(shard.numel() * world_size())
    with comm.phase(unit="activations"):
        comm.all_gather(full, shard)
    return full[:numel]


copy_stream = cache(torch.cuda.Stream)  # one for each device, made once


class HostCopy:
    """A copy of one storage in host memory, until backward fetches it.

    On a GPU it is copied beside the computation, on a stream of its own.
    """

    def __init__(self, x: Tensor) -> None:
        n = x.untyped_storage().nbytes() // x.itemsize
        full = x.as_strided((n,), (1,), 0)
        self.device = x.device
        self.back: Tensor | None = None
        self.host = host_empty((n,), x.dtype, "activations", temporary=True)
        self._event = self._copy(self.host, full)
        self._leaving = full if self._event else None  # until it is copied

    def _copy(self, out: Tensor, source: Tensor) -> torch.cuda.Event | None:
        if self.device.type == "cpu":
            out.copy_(source)
            return None
        stream = copy_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            out.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self) -> None:
        """Let the computation wait for the copy; then free the source."""
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)
        self._event = self._leaving = None

    __del__ = wait  # a graph may be dropped while a copy is under way

    def fetch(self) -> None:
        """Start copying it back, once."""
        if self.back is None:
            self.wait()
            # by shape: `empty_like` would label it as host memory, as `host` is
            shape, dtype = self.host.shape, self.host.dtype
            self.back = torch.empty(shape, dtype=dtype, device=self.device)
            self._event = self._copy(self.back, self.host)


class Copies(weakref.WeakSet[HostCopy]):
    """The host copies of one forward; `previous`: weakly, those of the one before."""

    previous: Callable[[], Copies | None]


class Offloaded(Store):
    """Keeps saved tensors in host memory; backward fetches a unit ahead (P_a+cpu).

    Rajbhandari et al. 2020, sec. 6.1; Ren et al. 2021. What a unit saves is
    on the device until the next unit has begun. Each storage is copied once,
    however many views of it are saved; a view of under an eighth, by itself.
    """

    def __init__(self) -> None:
        self._last: Callable[[], Copies | None] = lambda: None
        # of a storage: its version when it was copied, and weakly the copy
        self._copied: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def begin(self, unit: str) -> Copies:
        for copy in self._last() or ():
            copy.wait()
        copies = Copies()
        copies.previous, self._last = self._last, weakref.ref(copies)
        return copies

    def pack(self, x: Tensor, copies: Copies) -> Any:
        x = x.detach()
        # a small window of a large storage: copy its own bytes only
        if x.untyped_storage().nbytes() > 8 * x.nbytes:
            x = x.clone()
        storage = x.untyped_storage()
        version, found = self._copied.get(storage, (None, lambda: None))
        copy = found()
        if copy is None or version != x._version:
            copy = HostCopy(x)
            self._copied[storage] = x._version, weakref.ref(copy)
        copies.add(copy)
        return copies, copy, x.shape, x.stride(), x.storage_offset()

    def unpack(self, held: Any) -> Tensor:
        copies, copy, shape, stride, offset = held
        # backward runs in reverse: the forward before is the one it needs next
        for unit in (copies, copies.previous() or ()):
            for each in unit:
                each.fetch()
        copy.wait()
        return copy.back.as_strided(shape, stride, offset)
