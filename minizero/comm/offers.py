"""Large messages: offered by the sender, and read by the receiver where they are.

A sender waits for its receiver to wait; ranks wait for collectives in the order of
their calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ranks import cross_memory
from ..ranks.cross_memory import Offer
from .scope import member

LARGE = 1 << 20
"""Bytes above which a message is read from its sender's memory, where it can be."""


def is_read(message: Tensor) -> bool:
    """Whether its receiver reads it."""
    real = type(message) is Tensor  # and not of a dry run
    host = real and message.device.type == "cpu"
    return host and message.nbytes > LARGE and cross_memory.readable()


class Offered:
    """A message that its receiver reads; it must stay as it is until `wait`."""

    def __init__(self, message: Tensor, peer: int, tag: int) -> None:
        self.message, self.peer = message, member(peer)
        self._desk = cross_memory.desk()
        self._offer = self._desk.offer(self.peer, tag, message.data_ptr())

    def wait(self) -> None:
        self._desk.until_taken(self.peer, self._offer)


class Lent:
    """The other side: a row, shaped `like`, that is read in pieces."""

    _offer: Offer

    def __init__(self, like: Tensor, peer: int, tag: int) -> None:
        self.like, self.peer, self.tag = like, member(peer), tag
        self._desk = cross_memory.desk()
        self._piece = like[:0]

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
        self._desk.read(self.peer, self._offer.start + at, into)

    def begin(self) -> None:
        """Until it may be read."""
        self._offer = self._desk.find(self.peer, self.tag)

    def end(self) -> None:
        """Gives it back."""
        self._desk.take(self.peer, self._offer)

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
