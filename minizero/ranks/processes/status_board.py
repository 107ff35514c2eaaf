"""The status board: what each rank is doing, readable even when the rank is blocked."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import NamedTuple


class Activity(NamedTuple):
    """What a rank last reported, and when, in seconds of the monotonic clock."""

    time: float
    sequence: int
    history: int  # a checksum of what it has called so far
    state: str
    what: str


class Board:
    """A file with `KEPT` slots of 256 bytes for each rank, mapped by ranks and parent.

    A slot has one writer. A reader may meet it half written, so it should act only on
    what it has read twice.
    """

    KEPT = 16
    _layout = struct.Struct("=dqI8s228s")

    def __init__(self, path: Path, ranks: int) -> None:
        self.ranks = ranks
        size = ranks * self.KEPT * self._layout.size
        with open(path, "a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)

    def write(
        self, rank: int, state: str, sequence: int, what: str, history: int = 0
    ) -> None:
        """Fills a slot of `rank`; text beyond the slot's 228 bytes is cut."""
        slot = rank * self.KEPT + sequence % self.KEPT
        fields = time.monotonic(), sequence, history, state.encode(), what.encode()
        self._layout.pack_into(self._map, slot * self._layout.size, *fields)

    def kept(self, rank: int) -> list[Activity]:
        """The last reports of `rank`, one a collective; at time 0 where there is none."""
        found = []
        for slot in range(rank * self.KEPT, (rank + 1) * self.KEPT):
            *numbers, state, what = self._layout.unpack_from(
                self._map, slot * self._layout.size
            )
            texts = (b.rstrip(b"\0").decode(errors="ignore") for b in (state, what))
            found.append(Activity(*numbers, *texts))
        return found

    def read(self, rank: int) -> Activity:
        """The last report of `rank`, at time 0 if it has not reported yet."""
        return max(self.kept(rank), key=lambda activity: activity.time)
