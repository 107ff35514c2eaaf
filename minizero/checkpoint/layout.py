"""The index of a checkpoint: which file has which elements of which parameter.

Every rank saves one shard of each flat buffer. A run that loads may cut its buffers
otherwise: `pieces` and `places` find its elements in the files.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..zero import Flat
from .files import CheckpointError

INDEX = "index.json"


@dataclass
class SavedSlot:
    """A parameter's place in a saved flat buffer; `offset` in elements.

    names: all its names in the model; several if it is tied.
    """

    names: list[str]
    shape: list[int]
    offset: int


@dataclass
class SavedFlat:
    """A saved flat buffer, cut into shards of `size` elements, one in each file.

    key: begins the names of its tensors in the files.
    ranks: how many ranks together kept all of it; 1 if each rank kept all.
    dtypes: of what is in each file: "parameters" (fp32 masters, if there were any), and
        the optimizer's states, such as "optimizer/exp_avg".
    """

    key: str
    size: int
    ranks: int
    dtypes: dict[str, str]
    slots: list[SavedSlot]

    def saver(self, shard: int, world_size: int) -> int:
        """The rank in whose file a shard is."""
        place, number = divmod(shard, world_size // self.ranks)
        return number * self.ranks + place


@dataclass
class Index:
    """What must be known of a checkpoint before its files are opened.

    facts: what a net must have in common with the saved one, in words, such as
        {"parameter 'head.weight'": "float, (50, 32)", "optimizer": "AdamW"}.
    files: name, length and crc32 of each rank's file. number: counts a folder's saves.
    """

    tag: str
    facts: dict[str, str]
    flats: list[SavedFlat]
    files: list[tuple[str, int, int]] = field(default_factory=list)
    number: int = 0

    def dumps(self) -> bytes:
        """The index file: JSON with the crc32 of its own text."""
        return _sealed(json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def loads(cls, raw: bytes, path: Path) -> Index:
        """The inverse. Raises CheckpointError, which names the file, after any change."""
        text = raw.partition(b'"index": ')[2][:-2]
        if raw != _sealed(text):
            raise CheckpointError(
                f"{path}: its checksum does not fit; the file was truncated, damaged or "
                "changed since it was saved, or another version of minizero wrote it"
            )
        facts = json.loads(text)
        for flat in facts["flats"]:
            flat["slots"] = [SavedSlot(**slot) for slot in flat["slots"]]
        facts["flats"] = [SavedFlat(**flat) for flat in facts["flats"]]
        return cls(**facts)


def _sealed(text: bytes) -> bytes:
    return b'{"version": 3, "crc32": %d,\n"index": %b}\n' % (zlib.crc32(text), text)


def pieces(a: int, b: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The shards of `size` elements that hold elements a to b of a buffer.

    For each its number, and its first and last (exclusive) element.
    """
    while a < b:
        shard, first = divmod(a, size)
        last = min(size, first + b - a)
        yield shard, first, last
        a += last - first


Place = tuple[SavedFlat, SavedSlot]


def places(
    flat: Flat, low: int, high: int, found: dict[str, Place]
) -> Iterator[tuple[SavedFlat, int, int, int]]:
    """Where elements `low` to `high` of a flat buffer were saved.

    found: the place of each parameter, by its slot's name. For each parameter in the
    range: its saved buffer, its first element there, and the elements a to b of the
    range that it fills.
    """
    for slot in flat.slots:
        a, b = max(low, slot.offset), min(high, slot.offset + slot.numel)
        if a < b and slot.name in found:
            saved, there = found[slot.name]
            yield saved, there.offset + a - slot.offset, a - low, b - low
