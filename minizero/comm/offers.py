"""Large messages: offered by the sender, and read by the receiver where they are.

The two agree by small messages: where it is, and that it has been read. So a sender
waits for its receiver to wait; ranks wait for collectives in the order of their calls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks import cross_memory
from .scope import member

LARGE = 1 << 20
"""Bytes above which a message is read from its sender's memory, where it can be."""


def is_read(message: Tensor) -> bool:
    """Whether its receiver reads it."""
    real = type(message) is Tensor  # and not of a dry run
    host = real and message.device.type == "cpu"
    return host and message.nbytes > LARGE and cross_memory.readable()


def _post(messages: list[tuple[Any, Tensor]], peer: int, tag: int) -> list[dist.Work]:
    """Small messages from and to one place of the scope."""
    ops = [dist.P2POp(kind, t, member(peer), tag=tag) for kind, t in messages]
    return dist.batch_isend_irecv(ops)


class Offered:
    """A message that its receiver reads; it must stay as it is until `wait`."""

    def __init__(self, message: Tensor, peer: int, tag: int) -> None:
        self.message = message
        start = torch.tensor([message.data_ptr()], device="cpu")
        answer = torch.empty(1, device="cpu")
        self._works = _post([(dist.isend, start), (dist.irecv, answer)], peer, tag)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Lent:
    """The other side: a row, shaped `like`, that is read in pieces."""

    def __init__(self, like: Tensor, peer: int, tag: int) -> None:
        self.like, self.peer, self.tag = like, member(peer), tag
        self._start = torch.empty(1, dtype=torch.int64, device="cpu")
        self._piece = like[:0]
        [self._offer] = _post([(dist.irecv, self._start)], peer, tag)

    def numel(self) -> int:
        return self.like.numel()

    def __getitem__(self, cut: slice) -> Tensor:
        """A piece, until the next is asked for."""
        size = self.like[cut].numel()
        if self._piece.numel() < size:
            self._piece = torch.empty_like(self.like[cut])
        piece = self._piece[:size]
        self.read(piece, cut.start * piece.itemsize)
        return piece

    def read(self, into: Tensor, at: int = 0) -> None:
        """Copies what is `at` bytes from its start."""
        cross_memory.read(self.peer, int(self._start) + at, into)

    def begin(self) -> None:
        """Until it may be read."""
        self._offer.wait()

    def end(self) -> None:
        """Gives it back."""
        dist.send(torch.ones(1, device="cpu"), self.peer, tag=self.tag)

    def wait(self) -> None:
        """For one that nobody reads."""
        self.begin()
        self.end()


class Taken(Lent):
    """A row that `wait` copies as a whole into `like`."""

    def wait(self) -> None:
        self.begin()
        self.read(self.like)
        self.end()
