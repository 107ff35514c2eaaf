"""Storages in host memory until backward: one copy of each, fetched unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..memory.bytes import host_empty


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of a GPU's copies, beside its computation; None for a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class HostCopy:
    """One storage in host memory, `host`, and on its device again once fetched."""

    def __init__(self, x: Tensor) -> None:
        n = x.untyped_storage().nbytes() // x.itemsize
        whole = x.as_strided((n,), (1,), 0)
        self.device = x.device
        self.back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self.host = host_empty(whole.shape, x.dtype, "activations")
        stream = copy_stream(x.device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(x.device))
            # its memory is not given to others before the copy is done
            whole.record_stream(stream)
        with torch.cuda.stream(stream):
            self.host.copy_(whole, non_blocking=True)

    def fetch(self) -> None:
        """Start copying it back, once."""
        if self.back is not None:
            return
        stream = copy_stream(self.device)
        with torch.cuda.stream(stream):
            # by shape: what is made of host tensors alone counts as host
            shape, dtype = self.host.shape, self.host.dtype
            self.back = torch.empty(shape, dtype=dtype, device=self.device)
            self.back.copy_(self.host, non_blocking=True)
            if stream is not None:
                self._arrived = stream.record_event()

    def use(self) -> Tensor:
        """The storage on the device, when it has arrived: 1-D."""
        assert self.back is not None
        if self._arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._arrived)
            self.back.record_stream(current)
        return self.back


class UnitCopies:
    """What one forward of a unit has sent to the host.

    `before`: a weak reference to that of the forward before, since backward lets go
    of one as soon as its unit is done.
    """

    def __init__(self, before: Callable[[], UnitCopies | None]) -> None:
        self.before = before
        self._of_storage: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.copies: WeakSet[HostCopy] = WeakSet()

    def copy_of(self, x: Tensor) -> HostCopy:
        """The copy of a tensor's storage as it is now, made if need be."""
        storage = x.untyped_storage()
        version, found = self._of_storage.get(storage, (None, lambda: None))
        copy: HostCopy | None = found()
        if copy is None or version != x._version:
            copy = HostCopy(x)
            self._of_storage[storage] = x._version, ref(copy)
            self.copies.add(copy)
        return copy

    def fetch(self) -> None:
        """Start copying everything back."""
        for copy in self.copies:
            copy.fetch()
