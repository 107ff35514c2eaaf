"""The bus between device and host: copies each way, and what they land in."""

from __future__ import annotations

import torch
from torch import Tensor

from . import tracker
from .seams import host_empty


class Mark:
    """A moment in a lane: when all that was launched before is done."""

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


class Lane:
    """Copies one way between device and host, on a CUDA stream of its own.

    Without CUDA a copy is done when `copy` returns. `nbytes` adds them up.
    """

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        self.stream = torch.cuda.Stream() if cuda else None
        self.nbytes = 0

    def follow(self, *others: Lane) -> None:
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

    def mark(self) -> Mark:
        """The moment when the copies launched so far are done."""
        return Mark(self.stream)


class Turns:
    """Two blocks of memory that take turns; tensors are cut from them.

    What was cut from a block is overwritten two turns later. `nbytes` is what
    one turn may cut, `aligned` sizes added up.
    """

    def __init__(self, nbytes: int, on: str, device: torch.device) -> None:
        self.blocks = [_block(nbytes, on, device) for _ in range(2)]
        self._used = 0

    def turn(self) -> None:
        """Cut from the other block now, from its start."""
        self.blocks.reverse()
        self._used = 0

    def take(self, like: Tensor) -> Tensor:
        """A tensor like `like`, uninitialised."""
        start, self._used = self._used, self._used + aligned(like.nbytes)
        piece = self.blocks[0][start : start + like.nbytes]
        return piece.view(like.dtype).view(like.shape)


def aligned(nbytes: int) -> int:
    """The next multiple of 64, a cache line."""
    return -(-nbytes // 64) * 64


def _block(nbytes: int, on: str, device: torch.device) -> Tensor:
    if on == "cpu":
        return host_empty((nbytes,), torch.uint8, "buffers")
    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return tracker.label(block, "buffers", on="device")
