"""A folder of checkpoints: how one gets there in a single step, is found, and goes.

For a tag `t` the folder may have
    t               a checkpoint;
    t.tmp-0123abcd  one that is being written or deleted, which never counts;
    t.old-0123abcd  one that made room for another of its name, and counts while there
                    is no `t`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from .files import CheckpointError, write_all
from .layout import INDEX, Index

LATEST = "latest"
Folder = str | os.PathLike[str]

# what saves leave in a folder; nothing else is ever deleted
_ASIDE = re.compile(r"(?P<tag>.+)\.(?P<kind>tmp|old)-[0-9a-f]{8}")


def aside(path: Path, kind: str) -> Path:
    """Another name for a folder or file, which no save had before."""
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(4)}")


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file in one step: a reader finds the old one or the new one."""
    temporary = aside(path, "tmp")
    fd = os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    sync_folder(path.parent)


def prepare(folder: Path, tag: str) -> tuple[Path, Path, int]:
    """Make a folder to write a checkpoint in: the checkpoint's path, it, and a number."""
    bad = Path(tag).name != tag or tag.strip() != tag or tag in ("", "..", LATEST)
    if bad or not tag.isprintable() or _ASIDE.fullmatch(tag):
        raise CheckpointError(
            f"the tag {tag!r} cannot name a folder beside `latest`; take one such as "
            "'step-100', without slashes"
        )
    sweep(folder)
    written = aside(folder / tag, "tmp")
    written.mkdir(parents=True)
    numbers = [index.number for _, index in checkpoints(folder)]
    return folder / tag, written, max(numbers, default=0) + 1


def commit(
    written: Path, path: Path, index: Index, keep: int | None, latest: bool
) -> None:
    """Turn a folder with the files of all ranks into the checkpoint `path`.

    One rename decides. A checkpoint that has the name already makes room first; until
    the new one is there it is found under its other name. Then `latest` is replaced, so
    that a `load` without a tag takes the new one. Old ones go last: all but `keep`, and
    what `latest` names, and what was given another name.
    """
    replace_file(written / INDEX, index.dumps())
    if (path / INDEX).exists():
        os.rename(path, aside(path, "old"))
    os.rename(written, path)
    sync_folder(path.parent)
    if latest:
        replace_file(path.parent / LATEST, f"{path.name}\n".encode())
    own = [tag for tag, index in checkpoints(path.parent) if tag == index.tag]
    for tag in own[:-keep] if keep else ():
        if tag != latest_tag(path.parent):
            os.rename(path.parent / tag, aside(path.parent / tag, "tmp"))
    sweep(path.parent)


def indexes(folder: Path) -> dict[str, Path]:
    """The tags in a folder, and the path of each one's index."""
    tags: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*/{INDEX}")):
        found = _ASIDE.fullmatch(path.parent.name)
        if found is None:
            tags[path.parent.name] = path
        elif found["kind"] == "old":
            tags.setdefault(found["tag"], path)
    return tags


def exists(folder: Folder) -> bool:
    """Whether anything was ever saved in a folder, so that a run can go on from it.

    True for a damaged checkpoint as well: `load` says what is wrong.
    """
    return (Path(folder) / LATEST).exists() or bool(indexes(Path(folder)))


def latest_tag(folder: Path) -> str | None:
    """What `latest` names, if there is such a file."""
    latest = folder / LATEST
    return latest.read_text(errors="replace").strip() if latest.exists() else None


def checkpoints(folder: Path) -> list[tuple[str, Index]]:
    """The tags and indexes of the complete checkpoints, oldest first."""
    complete = []
    for tag, path in indexes(folder).items():
        with contextlib.suppress(OSError, CheckpointError):
            complete.append((tag, Index.loads(path.read_bytes(), path)))
    return sorted(complete, key=lambda pair: pair[1].number)


def find(folder: Path, tag: str | None = None) -> tuple[str, str, bytes]:
    """Which checkpoint is meant: its tag, its folder's name, its index file.

    Without a tag: the one that `latest` names or, where there is no such file, the
    newest that is complete. Raises CheckpointError.
    """
    paths, tags = indexes(folder), [tag for tag, _ in checkpoints(folder)]
    where = folder
    if tag is None and (tag := latest_tag(folder)) is not None:
        where = folder / LATEST
    if tag is None and any(folder.glob("*/mp_rank_*_model_states.pt")):
        raise CheckpointError(
            f"{folder}: this is a checkpoint of DeepSpeed's; convert it with the "
            "zero_to_fp32.py in it, and load the weights into the model"
        )
    tag = tags[-1] if tag is None and tags else tag
    if tag not in paths:
        what = repr(tag) if tag is not None else "in this folder"
        have = f"; complete are {', '.join(map(repr, tags))}" if tags else ""
        raise CheckpointError(f"{where}: there is no checkpoint {what}{have}")
    return tag, paths[tag].parent.name, paths[tag].read_bytes()


def sweep(folder: Path) -> None:
    """Delete what killed saves have left, and what `commit` has renamed.

    What made room for a checkpoint that has not come gets its name back.
    """
    for path in sorted(folder.glob("*")):
        found = _ASIDE.fullmatch(path.name)
        if found and found["kind"] == "old" and not (folder / found["tag"]).exists():
            os.rename(path, folder / found["tag"])
        elif found and path.is_dir():
            shutil.rmtree(path)
        elif found:
            path.unlink()
