"""What ranks must know alike: one rank's bytes, and anybody's error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..memory.bytes import view
from ..ranks.launch import device, rank, world_size
from . import collectives as comm


def broadcast_bytes(data: bytes, src: int = 0) -> bytes:
    """Every rank gets `src`'s bytes, which are not none.

    The others' argument is not looked at.
    """
    length = torch.tensor([len(data)], device=device())
    comm.broadcast(length, src)
    room = torch.empty(int(length), dtype=torch.uint8, device=device())
    if rank() == src:
        room.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    comm.broadcast(room, src)
    return bytes(view(room.cpu()))


def agree(error: Exception | None, raised: type[Exception]) -> None:
    """Raise `raised` on all ranks, in the same words, if any has an error.

    The words are the first such rank's. A collective: every rank calls it.
    """
    text = "" if error is None else str(error) or repr(error)
    lengths = torch.zeros(world_size(), dtype=torch.int64, device=device())
    lengths[rank()] = len(text.encode())
    comm.all_reduce(lengths)
    if not lengths.any():
        return
    first = int(lengths.nonzero()[0])
    said = broadcast_bytes(text.encode(), first).decode()
    if isinstance(error, raised) and str(error) == said:
        raise error
    raise raised(said) from error


@contextmanager
def agreeing(raised: type[Exception]) -> Iterator[None]:
    """An error inside the block, on any rank, is raised on all, as `raised`."""
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    agree(error, raised)
