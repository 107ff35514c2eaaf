"""What all ranks must agree on: the calls that they make, an object, an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks.launch import device, world_size
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


_own_group: tuple[Any, Any] = None, None  # a process group, and the one made for it


def gather_objects(value: Any) -> list[Any]:
    """Every rank gets the values of all ranks, in rank order; they are pickled.

    Over a gloo group that nothing else uses: a thread may call this while the main
    thread calls other collectives. It is not in the ledger.
    """
    global _own_group
    if world_size() == 1:
        return [value]
    if _own_group[0] is not dist.group.WORLD:
        _own_group = dist.group.WORLD, dist.new_group(backend="gloo")
    values = [None] * world_size()
    dist.all_gather_object(values, value, _own_group[1])
    return values


def broadcast_bytes(data: bytes, src: int = 0) -> bytes:
    """Every rank gets `src`'s bytes; the others' are not used."""
    found: bytes = gather_objects(data)[src]
    return found


@contextmanager
def agreeing(raised: type[Exception]) -> Iterator[None]:
    """An error inside the block, on any rank, is raised on all, as `raised`.

    The message is that of the first such rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    for message in gather_objects(error and (str(error) or repr(error))):
        if message and isinstance(error, raised) and str(error) == message:
            raise error
        if message:
            raise raised(message) from error
