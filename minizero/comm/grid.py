"""Ranks on a grid: sharded state along one side, another cut of the model along the other.

A `Grid` of 2 x 2 has the groups {0, 1}, {2, 3} of neighbours that have a model between
them, and {0, 2}, {1, 3} of ranks that have the same part of it. Inside `world(group)` a
group is all there is: whatever asks for the ranks gets these, ZeRO's shards included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ..ranks.launch import rank, world_size
from ..ranks.processes import apart
from . import sequence
from .collectives import Work

# how many collectives a group has made, and their checksum: others made others
_so_far: dict[dist.ProcessGroup, tuple[int, int]] = {}


@contextmanager
def world(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside, the ranks are those of `group`, numbered from 0; None: as outside.

    What is launched inside is waited for inside. Groups need not make the same calls,
    so what hangs inside is found by the timeout alone.

    It sets `dist.group.WORLD`, as `init_process_group` does, and puts it back. Torch's
    documented way is a group for each call: shards, norms, tags and checkpoints would
    each have to be given one. (`comm.among` is not enough: it moves collectives, and
    who owns which shard stays as it was.)
    """
    if group is None:
        yield
        return
    before, outside = dist.group.WORLD, (Work.made, sequence.digest)
    dist.group.WORLD = group
    Work.made, sequence.digest = _so_far.get(group, (0, 0))
    try:
        with apart(outside[0]):
            yield
    finally:
        _so_far[group] = Work.made, sequence.digest
        Work.made, sequence.digest = outside
        dist.group.WORLD = before


class Grid:
    """All ranks, `width` neighbours to a model. Every rank makes it at the same time.

    `model`: the own group of neighbours. `data`: the ranks at the same place of theirs.
    `place`, `row`: this rank's number in its `model` group and in its `data` group.

    Raises ValueError unless `width` divides the number of ranks.
    """

    def __init__(self, width: int) -> None:
        n = world_size()
        if width < 1 or n % width:
            raise ValueError(
                f"models of {width} neighbours cannot be made of {n} ranks; the width "
                "of a grid divides the number of ranks"
            )
        rows = [list(range(a, a + width)) for a in range(0, n, width)]
        columns = [list(range(a, n, width)) for a in range(width)]
        self.row, self.place = divmod(rank(), width)
        self.model, _ = dist.new_subgroups_by_enumeration(rows)
        self.data, _ = dist.new_subgroups_by_enumeration(columns)
