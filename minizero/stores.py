"""Where a unit's saved tensors wait for backward: device, ranks or host."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from minizero import comm, tracker
from minizero.launch import rank, world_size
from minizero.saved import note


class Store:
    """Keeps what a unit saves for backward: here, where it is.

    `begin` is called when a unit's forward begins; what it returns comes back
    with every `pack` of that forward. `unpack` gives back what was packed,
    bit for bit.
    """

    # whether it needs what every rank has alike: a unit's input, at most
    replicated = False

    def begin(self, unit: str) -> Any:
        return None

    def pack(self, x: Tensor, call: Any) -> Any:
        note(x, "checkpoint")
        return x.detach()

    def unpack(self, held: Any) -> Tensor:
        assert isinstance(held, Tensor)
        return held


@dataclass
class _Row:
    held: Any  # what the inner store made of the row
    numel: int
    shape: torch.Size
    stride: tuple[int, ...]


class Sharded(Store):
    """Each rank keeps one row; an all-gather restores the rest (P_a).

    Rajbhandari et al. 2020, sec. 6.1. It saves (N-1)/N of what is *alike on
    all ranks*: what enters a block of a tensor-parallel model. Ranks of data
    parallelism hold different activations, and a row of another rank is of no
    use to them. So the first time that a unit packs, the rows are put
    together again and compared, and all ranks raise ValueError if any finds
    another tensor than its own. `verify=False` leaves that out.

    `inner`: where the row waits (default: on the device).
    """

    replicated = True

    def __init__(
        self, inner: Store | None = None, verify: bool = True
    ) -> None:
        self.inner = inner or Store()
        self.verify = verify
        self._verified: set[str] = set()

    def begin(self, unit: str) -> tuple[str, Any]:
        return unit, self.inner.begin(unit)

    def pack(self, x: Tensor, call: tuple[str, Any]) -> _Row:
        unit, inner = call
        x = x.detach()
        dense = x if x.is_contiguous() else x.clone()
        flat = dense.as_strided(
            (dense.numel(),), (1,), dense.storage_offset()
        )
        size = -(-flat.numel() // world_size())
        row = flat.new_zeros(size)  # padded, if it is the last
        own = flat[rank() * size : (rank() + 1) * size]
        row[: own.numel()] = own
        if self.verify and unit not in self._verified:
            self._check(unit, flat, row)
            self._verified.add(unit)
        held = self.inner.pack(row, inner)
        return _Row(held, flat.numel(), dense.shape, dense.stride())

    def unpack(self, held: _Row) -> Tensor:
        whole = _join(self.inner.unpack(held.held), held.numel)
        return whole.as_strided(held.shape, held.stride)

    def _check(self, unit: str, flat: Tensor, row: Tensor) -> None:
        bits = (t.view(torch.uint8) for t in (_join(row, flat.numel()), flat))
        other = flat.new_zeros(1, dtype=torch.float32)
        other += not torch.equal(*bits)
        with comm.phase(unit="activations"):
            comm.all_reduce(other)
        if other.item():
            raise ValueError(
                f"rank {rank()}: the ranks hold different inputs of unit "
                f"{unit!r}, so they cannot keep a row of it each; shard "
                "activations where all ranks compute on the same batch (a "
                "tensor-parallel model), and use full checkpointing or "
                "Offloaded() under data parallelism"
            )


def _join(row: Tensor, numel: int) -> Tensor:
    """The rows of all ranks, without the padding: [numel]."""
    whole = row.new_empty(row.numel() * world_size())
    with comm.phase(unit="activations"):
        comm.all_gather(whole, row)
    return whole[:numel]


class Offloaded(Store):
    """Waits in host memory; backward fetches it a unit ahead (P_a+cpu).

    Rajbhandari et al. 2020, sec. 6.1; Ren et al. 2021. On CUDA the host copy
    is pinned and both copies run on a stream of their own, beside the
    computation. Each storage is copied once, however many views are saved.
    """

    def __init__(self) -> None:
        self._last: Callable[[], _Call | None] = _nothing
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, unit: str) -> _Call:
        call = _Call(self._last, self._streams)
        self._last = weakref.ref(call)
        return call

    def pack(self, x: Tensor, call: _Call) -> _View:
        x = x.detach()
        # a small window of something large: its own bytes only
        if x.untyped_storage().nbytes() > 8 * x.nbytes:
            x = x.clone()
        copy, offset = call.copy_of(x), int(x.storage_offset())
        return _View(copy, x.shape, x.stride(), offset)

    def unpack(self, held: _View) -> Tensor:
        copy = held.copy
        copy.call.fetch()
        previous = copy.call.previous()
        if previous is not None:
            previous.fetch()
        return copy.use().as_strided(held.shape, held.stride, held.offset)


def _nothing() -> None:
    return None


class _Call:
    """What one forward of a unit has sent to the host."""

    def __init__(
        self,
        previous: Callable[[], _Call | None],
        streams: dict[torch.device, torch.cuda.Stream],
    ) -> None:
        # weak: backward lets go of a call as soon as its unit is done
        self.previous = previous
        self._streams = streams
        self._by_storage: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._copies: weakref.WeakSet[_Copy] = weakref.WeakSet()

    def copy_of(self, x: Tensor) -> _Copy:
        """The copy of a tensor's storage as it is now, made if need be."""
        storage = x.untyped_storage()
        version, found = self._by_storage.get(storage, (None, _nothing))
        copy: _Copy | None = found()
        if copy is None or version != x._version:
            copy = _Copy(x, self)
            self._by_storage[storage] = x._version, weakref.ref(copy)
            self._copies.add(copy)
        return copy

    def fetch(self) -> None:
        """Start copying everything back."""
        for copy in self._copies:
            copy.fetch()

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Copy:
    """One storage on the host, and on the device again once fetched."""

    def __init__(self, x: Tensor, call: _Call) -> None:
        n = x.untyped_storage().nbytes() // x.itemsize
        flat = x.as_strided((n,), (1,), 0)
        self.call, self.device = call, x.device
        with tracker.host_memory():
            self.host = torch.empty(n, dtype=x.dtype, pin_memory=x.is_cuda)
        tracker.label(self.host, "activations", on="cpu")
        self.back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if not x.is_cuda:
            self.host.copy_(flat)
            return
        side = call.stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            self.host.copy_(flat, non_blocking=True)
        # its memory is not given to others before the copy is done
        flat.record_stream(side)

    def fetch(self) -> None:
        if self.back is not None:
            return
        shape, dtype = self.host.shape, self.host.dtype
        if self.device.type != "cuda":
            # by shape: what is made of host tensors alone counts as host
            self.back = torch.empty(shape, dtype=dtype, device=self.device)
            self.back.copy_(self.host)
            return
        side = self.call.stream(self.device)
        with torch.cuda.stream(side):
            self.back = torch.empty(shape, dtype=dtype, device=self.device)
            self.back.copy_(self.host, non_blocking=True)
            self._arrived = side.record_event()

    def use(self) -> Tensor:
        """The storage on the device, when it has arrived: 1-D."""
        assert self.back is not None
        if self._arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._arrived)
            self.back.record_stream(current)
        return self.back


@dataclass
class _View:
    copy: _Copy
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
