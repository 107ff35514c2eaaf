"""What all ranks must agree on: the calls that they make, an object, an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..memory.labels import view
from ..ranks.launch import device, rank, world_size
from . import collectives
from .choice import current_algorithm
from .groups import Group
from .transport import Finish, exchange, reachable

_asked: list[tuple[Finish, list[Tensor]]] = []


def check_sequence() -> None:
    """Raise RuntimeError, on every rank, unless all have made the same calls.

    Where messages carry tags, ranks that differ wait for each other, and that is
    reported. The backend's own collectives have no tags: calls that happen to fit would
    mix their data in silence. So this compares the checksums of all calls; for
    algorithms with tags it does nothing. On a GPU the answer is read when it is called
    again, so that no step waits for it. It is not in the ledger.
    """
    if world_size() == 1 or current_algorithm() != "backend":
        return
    for ranks, (_, digest) in list(collectives.sequences.items()):
        group = Group("sequence", ranks)
        own = torch.full((1,), digest, dtype=torch.int64, device="cpu")
        own = reachable(own)  # host memory, if it can travel
        others = {j: torch.empty_like(own) for j in range(group.size) if j != group.rank}
        finish = exchange(dict.fromkeys(others, own), others, 0, group)
        _asked.append((finish, [own, *others.values()]))
    waiting = len(collectives.sequences) if device().type != "cpu" else 0
    while len(_asked) > waiting:
        finish, answers = _asked.pop(0)
        finish()
        if len({int(answer) for answer in answers}) > 1:
            _asked.clear()
            raise RuntimeError(
                "the ranks have not made the same collectives in this step, so what "
                "they have got is mixed; a forward must use the same units in the same "
                "order on every rank at stage 3. comm.ledger() shows each rank's calls"
            )


def broadcast_bytes(data: bytes, src: int = 0) -> bytes:
    """Every rank gets `src`'s bytes, at least one; the others' are not used."""
    length = torch.tensor([len(data)], device=device())
    collectives.broadcast(length, src)
    room = torch.empty(int(length), dtype=torch.uint8, device=device())
    if rank() == src:
        room.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    collectives.broadcast(room, src)
    return bytes(view(room.cpu()))


def agree(error: Exception | None, raised: type[Exception]) -> None:
    """Raise `raised` on all ranks, with the same message, if any has an error.

    The message is that of the first such rank. A collective: every rank calls it.
    """
    text = "" if error is None else str(error) or repr(error)
    lengths = torch.zeros(world_size(), dtype=torch.int64, device=device())
    lengths[rank()] = len(text.encode())
    collectives.all_reduce(lengths)
    if not lengths.any():
        return
    first = int(lengths.nonzero()[0])
    message = broadcast_bytes(text.encode(), first).decode()
    if isinstance(error, raised) and str(error) == message:
        raise error
    raise raised(message) from error


@contextmanager
def agreeing(raised: type[Exception]) -> Iterator[None]:
    """An error inside the block, on any rank, is raised on all, as `raised`."""
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    agree(error, raised)
