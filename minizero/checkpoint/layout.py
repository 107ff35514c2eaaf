"""What a folder of checkpoints holds: which one is meant, and where its elements are.

Each tag has a folder in it, with a file of each rank and an index that lists them. A
save writes the index last: a folder without one is no checkpoint, and a file that no
index lists is left from a save that was killed.

Every rank saves one shard of each flat buffer. A run that loads may cut its buffers
otherwise: `pieces` finds its elements in the files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .files import CheckpointError

INDEX, LATEST = "index.json", "latest"
# what `save` calls its files: those of ranks, and an index on its way
OUR_FILES = re.compile(r"rank-\d+-of-\d+.*\.safetensors|index\.json\.tmp")
Folder = str | os.PathLike[str]


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
    savers: of each shard, the rank in whose file it is.
    dtypes: of what is in each file: "parameters" (fp32 masters, if there were any), and
        the optimizer's states, such as "optimizer/exp_avg".
    """

    key: str
    size: int
    savers: list[int]
    dtypes: dict[str, str]
    slots: list[SavedSlot]


@dataclass
class Index:
    """What must be known of a checkpoint before its files are opened.

    facts: what a net must have in common with the saved one, in words, such as
        {"parameter 'head.bias'": "float of shape (50,)", "optimizer": "AdamW"}.
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


def latest_tag(folder: Path) -> str | None:
    """What `latest` names, if there is such a file."""
    latest = folder / LATEST
    return latest.read_text(errors="replace").strip() if latest.exists() else None


def checkpoints(folder: Path) -> list[tuple[str, Index]]:
    """The tags and indexes of the complete checkpoints, oldest first."""
    complete = []
    for path in sorted(folder.glob(f"*/{INDEX}")):
        with contextlib.suppress(OSError, CheckpointError):
            complete.append((path.parent.name, Index.loads(path.read_bytes(), path)))
    return sorted(complete, key=lambda pair: pair[1].number)


def find(folder: Path, tag: str | None = None) -> tuple[str, bytes]:
    """Which checkpoint is meant: its tag, and what its index file holds.

    Without a tag: the one that `latest` names or, where there is no such file, the
    newest that is complete. CheckpointError if there is none.
    """
    tags = [complete for complete, _ in checkpoints(folder)]
    where = folder
    if tag is None and (tag := latest_tag(folder)) is not None:
        where = folder / LATEST
    if tag is None and any(folder.glob("*/mp_rank_*_model_states.pt")):
        raise CheckpointError(
            f"{folder}: this is a checkpoint of DeepSpeed's; convert it with the "
            "zero_to_fp32.py in it, and load the weights into the model"
        )
    tag = tags[-1] if tag is None and tags else tag
    if tag is None or not (folder / tag / INDEX).exists():
        what = repr(tag) if tag is not None else "in this folder"
        have = f"; complete are {', '.join(map(repr, tags))}" if tags else ""
        raise CheckpointError(f"{where}: there is no checkpoint {what}{have}")
    return tag, (folder / tag / INDEX).read_bytes()


def check_tag(tag: str) -> None:
    """Raise CheckpointError if no folder beside `latest` can have this name."""
    bad = Path(tag).name != tag or tag in ("", "..", LATEST, f"{LATEST}.tmp")
    if bad or tag.strip() != tag or not tag.isprintable():
        why = "cannot name a folder beside `latest`; take one such as 'step-100'"
        raise CheckpointError(f"the tag {tag!r} {why}, without slashes")


def sweep(folder: Path) -> None:
    """Delete files of saves that no index lists, and folders left empty."""
    (folder / f"{LATEST}.tmp").unlink(missing_ok=True)
    indexes = dict(checkpoints(folder))
    for path in [path for path in folder.glob("*") if path.is_dir()]:
        index = indexes.get(path.name)
        if index is None and (path / INDEX).exists():
            continue  # a damaged index may list any of the files
        listed = {name for name, *_ in index.files} if index else set()
        for file in sorted(path.glob("*")):
            if OUR_FILES.fullmatch(file.name) and file.name not in listed:
                file.unlink()
        if not any(path.iterdir()):
            path.rmdir()


def pieces(a: int, b: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Cut [a, b) at multiples of `size`: yields (shard, first, end in that shard)."""
    while a < b:
        shard, first = divmod(a, size)
        last = min(size, first + b - a)
        yield shard, first, last
        a += last - first
