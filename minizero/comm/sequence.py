"""Whether all ranks make the same collectives, in one order, of the same units.

Where messages carry tags, the sequence is the tag: ranks that differ wait for each
other, and the board says in what. A backend's own collectives have none, so bytes that
happen to fit would mix in silence; `check_sequence` compares the ranks instead.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks.launch import device, world_size
from .backend import current_algorithm
from .point_to_point import reachable

digest = 0
_asked: list[tuple[dist.Work, list[Tensor]]] = []


def note(call: str) -> int:
    """Enter a call in the sequence; the number of all calls so far is its tag."""
    global digest
    digest = zlib.crc32(call.encode(), digest)
    return digest & 0x7FFFFFFF


def check_sequence() -> None:
    """Raise RuntimeError, on every rank, unless all have made the same calls.

    For calls without tags; else it does nothing. On a GPU the answer is read when it is
    called again, so that no step waits for it. The comparison is not in the ledger: it
    carries nothing of the training.
    """
    if world_size() == 1 or current_algorithm() != "backend":
        return
    # host memory, if it can travel: no step waits for the device
    own = reachable(torch.full((1,), digest, dtype=torch.int64, device="cpu"))
    every = [torch.empty_like(own) for _ in range(world_size())]
    _asked.append((dist.all_gather(every, own, async_op=True), every))
    while len(_asked) > (device().type != "cpu"):
        work, answers = _asked.pop(0)
        work.wait()
        if len({int(answer) for answer in answers}) > 1:
            _asked.clear()
            raise RuntimeError(
                "the ranks have not made the same collectives in this step, so what "
                "they have got is mixed; a forward must use the same units in the same "
                "order on every rank at stage 3. comm.ledger() shows each rank's calls"
            )
