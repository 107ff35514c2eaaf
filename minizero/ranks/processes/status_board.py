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
    state: str
    what: str


class Board:
    """A file with a slot of 256 bytes for each rank, mapped by ranks and parent.

    A slot has one writer. A reader may meet it half written, so it should act only on
    what it has read twice.
    """

    _layout = struct.Struct("=dq8s232s")

    def __init__(self, path: Path, ranks: int) -> None:
        self.ranks = ranks
        with open(path, "a+b") as file:
            file.truncate(ranks * self._layout.size)
            self._map = mmap.mmap(file.fileno(), ranks * self._layout.size)

    def write(self, rank: int, state: str, sequence: int, what: str) -> None:
        """Fills the slot of `rank`; text beyond the slot's 232 bytes is cut."""
        fields = time.monotonic(), sequence, state.encode(), what.encode()
        self._layout.pack_into(self._map, rank * self._layout.size, *fields)

    def read(self, rank: int) -> Activity:
        """The slot of `rank`, at time 0 if that rank has not reported yet."""
        offset = rank * self._layout.size
        when, sequence, *texts = self._layout.unpack_from(self._map, offset)
        state, what = (text.rstrip(b"\0").decode(errors="ignore") for text in texts)
        return Activity(when, sequence, state, what)
