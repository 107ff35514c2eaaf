"""The bus between device and host: copies each way, and what they land in."""

from __future__ import annotations

import torch
from torch import Tensor

from minizero.memory import labels
from minizero.memory.bytes import aligned, host_empty


class CopyEvent:
    """The moment when all copies that a stream had by then are done."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.event = stream.record_event() if stream else None

    def wait(self, on: str) -> None:
        """Make the host ("cpu") or the computation ("device") wait for it."""
        if self.event is None:
            return
        if on == "cpu":
            self.event.synchronize()
        else:
            torch.cuda.current_stream().wait_event(self.event)


class CopyStream:
    """Copies one way between device and host, beside the computation.

    Without CUDA a copy is done when `copy` returns. `nbytes` adds them up.
    """

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        self.stream = torch.cuda.Stream() if cuda else None
        self.nbytes = 0

    def follow(self, *others: CopyStream) -> None:
        """Start nothing before what the computation and `others` have now."""
        if self.stream is None:
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        for other in others:
            if other.stream is not None:
                self.stream.wait_stream(other.stream)

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Launch `out.copy_(source)`; host memory must be page-locked."""
        self.nbytes += source.nbytes
        if self.stream is None:
            out.copy_(source)
            return
        with torch.cuda.stream(self.stream):
            out.copy_(source, non_blocking=True)
        for tensor in (out, source):
            if tensor.is_cuda:
                # the allocator must not give it away before the copy is over
                tensor.record_stream(self.stream)

    def event(self) -> CopyEvent:
        """The moment when the copies launched so far are done."""
        return CopyEvent(self.stream)


class DoubleBuffer:
    """Two blocks of memory that take turns; tensors are cut from them.

    What was cut from a block is overwritten two turns later. `nbytes` is what
    one turn may cut, `aligned` sizes added up. `on`: "device" or "cpu".
    """

    def __init__(self, nbytes: int, on: str, device: torch.device) -> None:
        self.nbytes, self._used = nbytes, 0
        self.blocks = [_block(nbytes, on, device) for _ in range(2)]

    def turn(self) -> None:
        """Cut from the other block now, from its start."""
        self.blocks.reverse()
        self._used = 0

    def take(self, like: Tensor) -> Tensor:
        """A tensor like `like`, uninitialised."""
        start, self._used = self._used, self._used + aligned(like.nbytes)
        part = self.blocks[0][start : start + like.nbytes]
        return part.view(like.dtype).view(like.shape)


def _block(nbytes: int, on: str, device: torch.device) -> Tensor:
    if on == "cpu":
        return host_empty((nbytes,), torch.uint8, "buffers")
    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return labels.label(block, "buffers", on="device")


class ArrivingGradients:
    """Mean gradients on their way to shards in host memory.

    A copy is launched at once; the host adds it two calls later, or when
    `finish` is called.
    """

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream
        self.blocks = DoubleBuffer(0, "cpu", torch.device("cpu"))
        self._copied: list[tuple[Tensor, Tensor, CopyEvent]] = []

    def add(self, shard: Tensor, mean: Tensor) -> None:
        """Add `mean`, on the device, to `shard`, in host memory."""
        nbytes = aligned(mean.nbytes)
        if self.blocks.nbytes < nbytes:
            self.finish()
            del self.blocks  # first, so that old and new never coexist
            self.blocks = DoubleBuffer(nbytes, "cpu", mean.device)
        if len(self._copied) == 2:
            self._add_first()
        self.blocks.turn()
        copied = self.blocks.take(mean)
        self.stream.follow()
        self.stream.copy(copied, mean)
        self._copied.append((shard, copied, self.stream.event()))

    def finish(self) -> None:
        """Add what has been launched."""
        while self._copied:
            self._add_first()

    def _add_first(self) -> None:
        shard, copied, event = self._copied.pop(0)
        event.wait("cpu")
        shard.add_(copied)
