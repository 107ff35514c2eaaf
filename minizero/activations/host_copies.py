"""Storages in host memory until backward: one copy of each, fetched unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..memory.labels import host_empty


@cache
def copy_stream(device: torch.device, way: str) -> torch.cuda.Stream | None:
    """The stream of a GPU's copies one way, "out" or "back"; None for a CPU."""
    return None if device.type == "cpu" else torch.cuda.Stream(device)


class HostCopy:
    """One storage in host memory, `host`, and on its device again once fetched.

    `leaving`: the storage, until it may be freed; None without a GPU.
    """

    def __init__(self, x: Tensor) -> None:
        n = x.untyped_storage().nbytes() // x.itemsize
        whole = x.as_strided((n,), (1,), 0)
        self.device = x.device
        self.back: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self.host = host_empty(whole.shape, x.dtype, "activations", passing=True)
        self.leaving, self._event = self._copy(self.host, whole, "out")

    def _copy(
        self, out: Tensor, source: Tensor, way: str
    ) -> tuple[Tensor | None, torch.cuda.Event | None]:
        stream = copy_stream(self.device, way)
        if stream is None:
            out.copy_(source)
            return None, None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if self._event is not None:
            stream.wait_event(self._event)  # it is out before it comes back
        with torch.cuda.stream(stream):
            out.copy_(source, non_blocking=True)
        return source, stream.record_event()

    def __del__(self) -> None:
        self._wait()  # a graph may be dropped while a copy is under way

    def _wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)

    def let_go(self) -> None:
        """Let the computation use the storage's memory, when the copy is done."""
        if self.leaving is not None:
            self._wait()
        self.leaving = None

    def fetch(self) -> None:
        """Start copying it back, once."""
        if self.back is not None:
            return
        self.let_go()
        # by shape: what is made of host tensors alone counts as host
        shape, dtype = self.host.shape, self.host.dtype
        self.back = torch.empty(shape, dtype=dtype, device=self.device)
        _, self._event = self._copy(self.back, self.host, "back")

    def use(self) -> Tensor:
        """The storage on the device, when it has arrived: 1-D."""
        assert self.back is not None
        self._wait()
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

    def let_go(self) -> None:
        """Free on the device what has been sent."""
        for copy in self.copies:
            copy.let_go()

    def fetch(self) -> None:
        """Start copying everything back."""
        for copy in self.copies:
            copy.fetch()
