"""Whole shards from a swap file, read before they are asked for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from .async_io import Transfer
from .copy_streams import CopyStream
from .staging import StagingBuffers
from .swap_file import SwappedShard


@dataclass
class Reading:
    """A record on its way into a staging buffer."""

    shard: SwappedShard
    record: int
    buffer: Tensor
    transfer: Transfer


class ReadAhead:
    """Reads whole shards, and launches what is likely to be asked for next.

    That is what came after the same two shards the last time, so forward and backward
    go their own ways. Only buffers that nobody has are used for it.
    """

    def __init__(self, buffers: StagingBuffers) -> None:
        self.buffers = buffers
        self._under_way: deque[Reading] = deque()
        self._next: dict[tuple[SwappedShard | None, SwappedShard], SwappedShard] = {}
        self._last: tuple[SwappedShard | None, SwappedShard | None] = (None, None)

    def read(self, shard: SwappedShard, into: Tensor, copies: CopyStream) -> None:
        """Launch copies that bring a shard into `into`, [size]."""
        for record, (a, b) in enumerate(shard.ranges):
            reading = self.take(shard, record)
            self._launch_after(shard, record)
            reading.transfer.wait()
            copies.copy(into[a:b], shard.elements(record, reading.buffer))
            self.buffers.give(reading.buffer, copies.events())
        two, one = self._last
        if one is not None:
            self._next[two, one] = shard
        self._last = (one, shard)

    def take(self, shard: SwappedShard, record: int) -> Reading:
        """The read of a record: launched before, or now."""
        if self._under_way:
            first = self._under_way[0]
            if first.shard is shard and first.record == record:
                return self._under_way.popleft()
            self.cancel()
        return self._launch(shard, record)

    def cancel(self, restart: bool = False) -> None:
        """Give the buffers of reads back that nobody has asked for.

        `restart`: what comes next follows no shard.
        """
        while self._under_way:
            reading = self._under_way.popleft()
            reading.transfer.wait()
            self.buffers.give(reading.buffer)
        if restart:
            self._last = (None, None)

    def _launch(self, shard: SwappedShard, record: int) -> Reading:
        buffer = self.buffers.take()
        return Reading(shard, record, buffer, shard.read(record, buffer))

    def _launch_after(self, shard: SwappedShard, record: int) -> None:
        coming = [(shard, later) for later in range(record + 1, shard.records)]
        following = self._next.get((self._last[1], shard))
        if following is not None and following is not shard:
            coming += [(following, first) for first in range(following.records)]
        self.buffers.reclaim()
        for later in islice(coming, len(self._under_way), None):
            if not self.buffers.free:
                break
            self._under_way.append(self._launch(*later))
