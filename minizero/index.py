"""The index of a checkpoint: what is in its files, and how to be sure."""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from .plain import DTYPES
from .tensorfile import CheckpointError, explained

FORMAT = "minizero checkpoint"
VERSION = 1
INDEX = "index.json"

# what saves leave in a folder; nothing else is ever deleted
OURS = re.compile(
    r"rank-\d+-of-\d+-(?P<a>[0-9a-f]{8})\.(safetensors|json(\.tmp)?)"
    r"|(index\.json|latest)\.(?P<b>[0-9a-f]{8})\.tmp"
)


@dataclass
class SavedSlot:
    """A parameter's place in a saved flat buffer; offset in elements."""

    name: str
    shape: list[int]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass
class SavedFlat:
    """A saved flat buffer: row r of it, `size` elements, is in file r.

    `states`: dtype of each optimizer state with a value for each element.
    `scalars`: the other states, encoded by `plain`, the same for all rows.
    """

    unit: str
    number: int
    dtype: str
    trainable: bool
    group: int | None
    size: int
    slots: list[SavedSlot]
    states: dict[str, str]
    scalars: dict[str, Any]

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    def tensor(self, state: str | None = None) -> str:
        """The name of a row in its file: of the values, or of a state."""
        what = "parameters" if state is None else f"optimizer/{state}"
        return f"{self.unit}/{self.number}/{what}"


@dataclass
class SavedFile:
    """A rank's file, as it was when its writer was done."""

    name: str
    bytes: int
    crc32: int


@dataclass
class Index:
    """What there is to know of a checkpoint before its files are opened.

    `number`: counts the saves in a folder. `tied`: other names of a
    parameter, each with the one in `flats`. `buffers`: dtype and shape of
    each. `groups`, `precision`, `extra`: encoded by `plain`; the tensors are
    in rank 0's file.
    """

    tag: str
    number: int
    world_size: int
    flats: list[SavedFlat]
    tied: dict[str, str]
    buffers: dict[str, list[Any]]
    optimizer: str
    groups: list[Any]
    precision: Any
    extra: Any
    files: list[SavedFile] = field(default_factory=list)

    def check(self) -> None:
        """Raise ValueError unless the parts fit together."""
        if len(self.files) != self.world_size:
            raise ValueError(
                f"{len(self.files)} files of {self.world_size} ranks"
            )
        for file in self.files:
            if not OURS.fullmatch(file.name):
                raise ValueError(f"a file called {file.name!r}")
        for flat in self.flats:
            known = {flat.dtype, *flat.states.values()} <= DTYPES.keys()
            ends = [slot.offset + slot.numel for slot in flat.slots]
            starts = [0, *ends[:-1]]
            in_order = starts == [slot.offset for slot in flat.slots]
            fits = flat.size * self.world_size >= flat.numel
            if not (known and in_order and fits):
                raise ValueError(f"no such buffer: {flat.tensor()}")


_SEAL = ',\n "seal": "{}"\n}}\n'


def sealed(payload: dict[str, Any]) -> bytes:
    """JSON text that ends in its own crc32; `unsealed` finds any change."""
    text = json.dumps(payload, indent=1, allow_nan=False).removesuffix("\n}")
    return (text + _SEAL.format(f"{zlib.crc32(text.encode()):08x}")).encode()


def unsealed(path: Path) -> dict[str, Any]:
    """The inverse; raises CheckpointError, which names the file."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise explained(path, error) from error
    return open_seal(raw, path)


def open_seal(raw: bytes, path: Path) -> dict[str, Any]:
    """As `unsealed`, of what was read from `path` already."""
    length = len(_SEAL.format(" " * 8))
    text, seal = raw[:-length], raw[-length:]
    if seal != _SEAL.format(f"{zlib.crc32(text):08x}").encode():
        raise CheckpointError(
            f"{path}: its checksum does not fit; the file was truncated, "
            "damaged or changed since minizero wrote it, or another program "
            "wrote it"
        )
    payload: dict[str, Any] = json.loads(raw)
    del payload["seal"]
    return payload


def parse_index(raw: bytes, path: Path) -> Index:
    """The index in the bytes of a file, checked."""
    data = open_seal(raw, path)
    if data.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: its format is {data.get('format')!r}, not {FORMAT!r}; "
            "another program wrote it"
        )
    version = data.get("version")
    if version != VERSION:
        raise CheckpointError(
            f"{path}: it is of version {version!r}, and this minizero reads "
            f"version {VERSION}; load it with the minizero that saved it"
        )
    try:
        data = {
            k: v for k, v in data.items() if k not in ("format", "version")
        }
        data["files"] = [SavedFile(**file) for file in data["files"]]
        data["flats"] = [
            SavedFlat(
                **{**flat, "slots": [SavedSlot(**s) for s in flat["slots"]]}
            )
            for flat in data["flats"]
        ]
        index = Index(**data)
        index.check()
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path}: the index does not make sense ({error}); save again"
        ) from error
    return index


def index_text(index: Index) -> bytes:
    """What `parse_index` reads."""
    head = {"format": FORMAT, "version": VERSION}
    return sealed(head | dataclasses.asdict(index))
