"""The index of a checkpoint, and the folder that checkpoints are in."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from .plain import DTYPES
from .tensorfile import CheckpointError, explained

FORMAT = "minizero checkpoint"
VERSION = 1
INDEX, LATEST = "index.json", "latest"

# what saves leave in a folder; nothing else is ever deleted
_OURS = re.compile(
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
            if not _OURS.fullmatch(file.name):
                raise ValueError(f"a file called {file.name!r}")
        for flat in self.flats:
            known = {flat.dtype, *flat.states.values()} <= DTYPES.keys()
            ends = [slot.offset + slot.numel for slot in flat.slots]
            starts = [0, *ends[:-1]]
            in_order = starts == [slot.offset for slot in flat.slots]
            fits = flat.size * self.world_size >= flat.numel
            if not (known and in_order and fits):
                raise ValueError(f"no such buffer: {flat.tensor()}")


def sealed(payload: dict[str, Any]) -> bytes:
    """JSON text with its own crc32; `unsealed` finds any changed bit."""
    crc32 = zlib.crc32(_text(payload))
    return _text(payload | {"seal": f"{crc32:08x}"})


def _text(payload: dict[str, Any]) -> bytes:
    return (json.dumps(payload, indent=1, allow_nan=False) + "\n").encode()


def unsealed(path: Path) -> dict[str, Any]:
    """The inverse; raises CheckpointError, which names the file."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise explained(path, error) from error
    return open_seal(raw, path)


def open_seal(raw: bytes, path: Path) -> dict[str, Any]:
    """As `unsealed`, of what was read from `path` already."""
    try:
        payload = json.loads(raw)
        seal = payload.pop("seal", None)
        whole = sealed(payload) == raw
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path}: this is no JSON that minizero wrote ({error}); the "
            "file was damaged, or another one took its place"
        ) from error
    if not whole:
        why = "has no seal" if seal is None else f"does not fit its seal {seal}"
        raise CheckpointError(
            f"{path}: the text {why}; the file was changed or damaged since "
            "minizero wrote it, or another program wrote it"
        )
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


def read_index(folder: Path, tag: str | None) -> tuple[bytes, Path]:
    """The bytes and the path of the index that is meant, not yet parsed.

    Without a tag: the one that `latest` names or, where there is no such
    file, the newest that is complete.
    """
    path = folder / (tag or _latest(folder)) / INDEX
    try:
        return path.read_bytes(), path
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: there is no such checkpoint; {_have(folder)}"
        ) from None
    except OSError as error:
        raise explained(path, error) from error


def _have(folder: Path) -> str:
    tags = [name for name, _ in checkpoints(folder)]
    if not tags:
        return f"{folder} has none that is complete"
    return f"{folder} has {', '.join(map(repr, tags))}, oldest first"


def _latest(folder: Path) -> str:
    path = folder / LATEST
    try:
        tag = path.read_text().strip()
    except FileNotFoundError:
        found = checkpoints(folder)
        if not found:
            raise CheckpointError(
                f"{folder}: there is no checkpoint in this folder; give the "
                "folder that was given to save"
            ) from None
        return found[-1][0]
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: it cannot be read ({error}); give a tag: {_have(folder)}"
        ) from error
    if not is_tag(tag) or not (folder / tag / INDEX).exists():
        raise CheckpointError(
            f"{path}: it names {tag!r}, which is not there; give a tag: "
            f"{_have(folder)}"
        )
    return tag


def is_tag(tag: object) -> bool:
    """Whether it can name a folder of its own, beside `latest`."""
    return (
        isinstance(tag, str)
        and re.fullmatch(r"[^/\\\0\n]{1,200}", tag) is not None
        and tag.strip() == tag
        and tag not in (".", "..", LATEST)
        and not _OURS.fullmatch(tag)
    )


def checkpoints(folder: Path) -> list[tuple[str, Index]]:
    """The names and indexes of the complete checkpoints, oldest first."""
    found = []
    for path in sorted(folder.glob(f"*/{INDEX}")):
        with contextlib.suppress(OSError, CheckpointError):
            found.append(
                (path.parent.name, parse_index(path.read_bytes(), path))
            )
    return sorted(found, key=lambda pair: pair[1].number)


def fsync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, nonce: str) -> None:
    """Write a file in one step: others see the old one or the new one."""
    suffix = ".tmp" if nonce in path.name else f".{nonce}.tmp"
    temporary = path.with_name(path.name + suffix)
    try:
        fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
        try:
            done = 0
            while done < len(data):
                done += os.write(fd, data[done:])
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        raise explained(path, error) from error


def retire(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, each index first.

    What `latest` names stays, and so does what was given another name.
    """
    path = folder / LATEST
    latest = path.read_text().strip() if path.exists() else None
    own = [name for name, index in checkpoints(folder) if name == index.tag]
    for name in own[:-keep]:
        if name != latest:
            # without its index it is none, and `sweep` takes the rest
            os.unlink(folder / name / INDEX)


def sweep(folder: Path, busy: Iterable[str]) -> None:
    """Delete what no index names: what killed saves and `retire` have left.

    Only files that are named as ours are, of no save in `busy`, and not
    beside an index that cannot be read: they may still be saved by hand.
    """
    complete = dict(checkpoints(folder))
    for path in [*folder.glob("*"), *folder.glob("*/*")]:
        ours = _OURS.fullmatch(path.name)
        if not ours or not path.is_file():
            continue
        home = path.parent
        index = complete.get(home.name) if home != folder else None
        named = index and path.name in [file.name for file in index.files]
        unclear = index is None and (home / INDEX).exists()
        if (
            not named
            and not unclear
            and {ours["a"], ours["b"]}.isdisjoint(busy)
        ):
            path.unlink(missing_ok=True)
            if home != folder and not any(home.iterdir()):
                home.rmdir()
