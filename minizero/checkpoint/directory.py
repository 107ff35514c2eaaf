"""The folder that checkpoints are in: finding, replacing, cleaning up."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from minizero.checkpoint.manifest import (
    INDEX,
    OUR_FOLDER,
    OURS,
    Index,
    parse_index,
)
from .tensor_file import CheckpointError, explained

LATEST = "latest"


def exists(folder: str | os.PathLike[str]) -> bool:
    """Whether anything was ever saved in a folder, and so is to be resumed.

    True for a damaged checkpoint as well: `load` will say what is wrong.
    """
    path = Path(folder)
    return (path / LATEST).exists() or any(path.glob(f"*/{INDEX}"))


def read_index(folder: Path, tag: str | None) -> tuple[bytes, Path]:
    """The bytes and the path of the index that is meant, not yet parsed.

    Without a tag: the one that `latest` names or, where there is no such
    file, the newest that is complete.
    """
    if tag is None:
        tag = _latest(folder)
    if not is_tag(tag):
        raise CheckpointError(
            f"the tag {tag!r} is no name of a folder in {folder}; {_have(folder)}"
        )
    path = folder / tag / INDEX
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
    except NotADirectoryError as error:
        raise explained(path, error) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: it cannot be read ({error}); give a tag: {_have(folder)}"
        ) from error
    if not is_tag(tag) or not (folder / tag / INDEX).exists():
        raise CheckpointError(
            f"{path}: it names {tag!r}, and there is no "
            f"{folder / tag / INDEX}; give a tag: {_have(folder)}"
        )
    return tag


def is_tag(tag: object) -> bool:
    """Whether it can name a folder of its own, beside `latest`."""
    return (
        isinstance(tag, str)
        and tag.isprintable()  # a line of `latest`, and what UTF-8 can write
        and 0 < len(tag.encode()) <= 200
        and not {"/", "\\"} & set(tag)
        and tag.strip() == tag
        # some file systems take upper case for lower case
        and tag.casefold() not in (".", "..", LATEST)
        and not (OURS.fullmatch(tag) or OUR_FOLDER.fullmatch(tag))
    )


def checkpoints(folder: Path) -> list[tuple[str, Index]]:
    """The names and indexes of the complete checkpoints, oldest first."""
    found = []
    for path in sorted(folder.glob(f"*/{INDEX}")):
        with contextlib.suppress(OSError, CheckpointError):
            found.append((path.parent.name, parse_index(path.read_bytes(), path)))
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
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise explained(path, error) from error
