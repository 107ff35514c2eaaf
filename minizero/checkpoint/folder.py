"""A folder of checkpoints: how one gets there in a single step, is found, and goes.

For a tag `t` the folder may have
    t               a checkpoint;
    t.tmp-0123abcd  one that is being written or deleted, which never counts;
    t.old-0123abcd  one that made room for another of its name, and counts while there
                    is no `t`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from pathlib import Path

from .files import CheckpointError, explained, write_all
from .layout import INDEX, Index

LATEST = "latest"
Folder = str | os.PathLike[str]

# what saves leave in a folder; nothing else is ever deleted
_ASIDE = re.compile(r"(?P<tag>.+)\.(?P<kind>tmp|old)-[0-9a-f]{8}")
_OURS = re.compile(r"rank-\d+-of-\d+\.safetensors|index\.json(\.tmp)?")


def is_tag(tag: object) -> bool:
    """Whether a tag can name a folder of its own, beside `latest`."""
    return (
        isinstance(tag, str)
        and tag.isprintable()
        and 0 < len(tag.encode()) <= 200
        and not {"/", "\\"} & set(tag)
        and tag.strip() == tag
        # some file systems take upper case for lower case
        and tag.casefold() not in (".", "..", LATEST)
        and not _ASIDE.fullmatch(tag)
    )


# ---- one step


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, suffix: str = ".tmp") -> None:
    """Write a file in one step: a reader finds the old one or the new one."""
    temporary = path.with_name(path.name + suffix)
    try:
        fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise explained(path, error) from error


def prepare(folder: Path, tag: str) -> tuple[Path, int]:
    """Make the folder in which the files of a new checkpoint are written.

    Returns it, and the number of the save.
    """
    path = folder / tag
    try:
        sweep(folder)
        taken = path.exists() and not (path / INDEX).exists()
        if taken and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError(errno.EEXIST, "")
        written = folder / f"{tag}.tmp-{secrets.token_hex(4)}"
        written.mkdir(parents=True)
    except OSError as error:
        raise explained(path, error) from error
    return written, max((i.number for _, i in checkpoints(folder)), default=0) + 1


def decide(written: Path, path: Path, index: Index) -> None:
    """Turn a folder with the files of all ranks into the checkpoint `path`.

    One rename decides. A checkpoint that has the name already makes room first; until
    the new one is there it is found under its other name.
    """
    for file in index.files:
        if not (written / file.name).exists():
            raise CheckpointError(
                f"{written / file.name}: it was deleted while it was being saved; give "
                "every job a folder of its own. The checkpoint before this one is intact"
            )
    replace_file(written / INDEX, index.dumps())
    if (path / INDEX).exists():
        os.rename(path, f"{path}.old-{secrets.token_hex(4)}")
    os.rename(written, path)
    sync_folder(path.parent)


def point(folder: Path, tag: str) -> None:
    """Let a `load` without a tag take this checkpoint."""
    replace_file(folder / LATEST, f"{tag}\n".encode(), f".tmp-{secrets.token_hex(4)}")


# ---- finding


def found(folder: Path) -> dict[str, Path]:
    """The tags in a folder, and where each one's index is."""
    tags: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*/{INDEX}")):
        aside = _ASIDE.fullmatch(path.parent.name)
        if aside is None:
            tags[path.parent.name] = path
        elif aside["kind"] == "old":
            tags.setdefault(aside["tag"], path)
    return tags


def exists(folder: Folder) -> bool:
    """Whether anything was ever saved in a folder, so that a run can go on from it.

    True for a damaged checkpoint as well: `load` says what is wrong.
    """
    return (Path(folder) / LATEST).exists() or bool(found(Path(folder)))


def checkpoints(folder: Path) -> list[tuple[str, Index]]:
    """The tags and indexes of the complete checkpoints, oldest first."""
    complete = []
    for tag, path in found(folder).items():
        with contextlib.suppress(OSError, CheckpointError):
            complete.append((tag, Index.loads(path.read_bytes(), path)))
    return sorted(complete, key=lambda pair: pair[1].number)


def find(folder: Path, tag: str | None = None) -> tuple[str, str, bytes]:
    """The checkpoint that is meant: its tag, its folder's name, its index file's bytes.

    Without a tag: the one that `latest` names or, where there is no such file, the
    newest that is complete. Raises CheckpointError.
    """
    tags, latest = [tag for tag, _ in checkpoints(folder)], folder / LATEST
    have = f"{folder} has {', '.join(map(repr, tags)) or 'none that is complete'}"
    words = f"{folder}:"
    path = latest
    try:
        if tag is None and latest.exists():
            tag, words = latest.read_text().strip(), f"{latest}: it names"
        elif tag is None and tags:
            tag = tags[-1]
        elif tag is None:
            if any(folder.glob("*/mp_rank_*_model_states.pt")):
                raise CheckpointError(
                    f"{folder}: this is a checkpoint of DeepSpeed's; convert it with the "
                    "zero_to_fp32.py in it, and load the weights into the model"
                )
            raise CheckpointError(
                f"{folder}: there is no checkpoint in this folder; give the folder that "
                "was given to save"
            )
        if tag not in found(folder):
            raise CheckpointError(
                f"{words} {tag!r}, and there is no such checkpoint; {have}"
            )
        path = found(folder)[tag]
        return tag, path.parent.name, path.read_bytes()
    except OSError as error:
        raise explained(path, error) from error
    except UnicodeError as error:
        raise CheckpointError(f"{latest}: it is no text; {have}") from error


# ---- what goes


def retire(folder: Path, keep: int) -> None:
    """Make all but the newest `keep` checkpoints none; `sweep` deletes them.

    What `latest` names stays, and so does what was given another name.
    """
    own = [tag for tag, index in checkpoints(folder) if tag == index.tag]
    with contextlib.suppress(OSError):
        latest = (folder / LATEST).read_bytes().decode(errors="replace").strip()
        own = [tag for tag in own[:-keep] if tag != latest] + own[-keep:]
    for tag in own[:-keep]:
        os.rename(folder / tag, folder / f"{tag}.tmp-{secrets.token_hex(4)}")


def sweep(folder: Path) -> None:
    """Delete what killed saves and `retire` have left.

    What made room for a checkpoint that has not come gets its name back.
    """
    for path in sorted(folder.glob("*")):
        aside = _ASIDE.fullmatch(path.name)
        if aside is None:
            continue
        if aside["kind"] == "old" and not (folder / aside["tag"]).exists():
            os.rename(path, folder / aside["tag"])
        elif not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            for inside in sorted(path.iterdir()):
                if _OURS.fullmatch(inside.name):
                    inside.unlink(missing_ok=True)
            if not any(path.iterdir()):
                path.rmdir()
