"""What all ranks must agree on: the calls that they make, objects, errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ..ranks import report, world_size
from .backend import timeout
from .collectives import place, sequences
from .groups import everyone
from .transport import current_algorithm

_own_group: tuple[Any, Any] = None, None  # a process group, and the one made for it


def gather_objects(value: Any) -> list[Any]:
    """Every rank gets the values of all ranks, in rank order; they are pickled.

    Over a gloo group that nothing else uses: a thread may call this while the main
    thread calls other collectives. It is not in the ledger. A rank whose main thread
    calls it alone, as in a save that others do not make, is reported.
    """
    global _own_group
    if world_size() == 1:
        return [value]
    call = None
    if threading.current_thread() is threading.main_thread():
        call = place("gather_objects (a save, a load)", everyone().ranks)
        report("waits", *call)
    if _own_group[0] is not dist.group.WORLD:
        _own_group = dist.group.WORLD, dist.new_group(timeout=timeout(), backend="gloo")
    values = [None] * world_size()
    dist.all_gather_object(values, value, _own_group[1])
    if call is not None:
        report("done", *call)
    return values


def check_sequence() -> None:
    """Raise RuntimeError, on every rank, unless all have made the same calls.

    The messages of the direct exchange carry a checksum of all calls: ranks that differ
    wait for each other, and that is reported. The backend's own collectives have none,
    and calls that happen to fit would mix their data in silence.
    """
    if current_algorithm() != "backend" or dist.get_backend() == "fake":
        return
    mine = dict(sequences)
    for theirs in gather_objects(mine):
        if any(theirs[ranks] != mine[ranks] for ranks in theirs.keys() & mine):
            raise RuntimeError(
                "the ranks have not made the same collectives in this step, so what "
                "they have got is mixed; a forward must use the same units in the same "
                "order on every rank at stage 3. comm.ledger() shows each rank's calls"
            )


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
