"""The folder that checkpoints are in: finding, naming, replacing, cleaning up.

Of a tag `t` there may be `t`, the checkpoint; `t.tmp-0123abcd`, one that is being
written or deleted, which never counts; and `t.old-0123abcd`, which has made room for
another of its name, and counts as long as there is no `t`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import zlib
from collections.abc import Collection
from pathlib import Path

from .manifest import INDEX, Index, parse_index
from .tensor_file import CheckpointError, explained, read_file, write_all

LATEST = "latest"
Folder = str | os.PathLike[str]

# what saves leave in a folder; nothing else is ever deleted
ASIDE = re.compile(r"(?P<tag>.+)\.(?P<kind>tmp|old)-(?P<nonce>[0-9a-f]{8})")
OURS = re.compile(r"(rank-\d+-of-\d+\.(safetensors|json)|index\.json)(\.tmp)?")


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
        and not ASIDE.fullmatch(tag)
    )


def found(folder: Path) -> dict[str, Path]:
    """Tags, and the folders that have their indexes, whole or damaged."""
    tags: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*/{INDEX}")):
        aside = ASIDE.fullmatch(path.parent.name)
        if aside is None:
            tags[path.parent.name] = path.parent
        elif aside["kind"] == "old":
            tags.setdefault(aside["tag"], path.parent)
    return tags


def exists(folder: Folder) -> bool:
    """Whether anything was ever saved in a folder, and so is to be resumed.

    True for a damaged checkpoint as well: `load` will say what is wrong.
    """
    return (Path(folder) / LATEST).exists() or bool(found(Path(folder)))


def checkpoints(folder: Path) -> list[tuple[str, Index]]:
    """The tags and indexes of the complete checkpoints, oldest first."""
    whole = []
    for tag, path in found(folder).items():
        with contextlib.suppress(OSError, CheckpointError):
            index = parse_index(read_file(path / INDEX), path / INDEX)
            whole.append((tag, index))
    return sorted(whole, key=lambda pair: pair[1].number)


def read_index(folder: Path, tag: str | None) -> tuple[bytes, Path]:
    """The bytes and the path of the index that is meant, not yet parsed.

    Without a tag: the one that `latest` names or, where there is no such file, the
    newest that is complete.
    """
    if tag is None:
        tag = _latest(folder)
    if not is_tag(tag):
        raise CheckpointError(
            f"the tag {tag!r} is no name of a folder in {folder}; {_have(folder)}"
        )
    path = found(folder).get(tag, folder / tag) / INDEX
    try:
        return read_file(path), path
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: there is no such checkpoint; {_have(folder)}"
        ) from None
    except OSError as error:
        raise explained(path, error) from error


def _have(folder: Path) -> str:
    tags = [tag for tag, _ in checkpoints(folder)]
    if not tags:
        return f"{folder} has none that is complete"
    return f"{folder} has {', '.join(map(repr, tags))}, oldest first"


def pointer(tag: str) -> bytes:
    """What `latest` holds: a line with the tag.

    At its end stands the tag's crc32, in blanks and tabs: whoever strips the line, as
    scripts do, has the tag.
    """
    bits = f"{zlib.crc32(tag.encode()):032b}"
    return f"{tag}{bits.replace('0', ' ').replace('1', chr(9))}\n".encode()


def _latest(folder: Path) -> str:
    path = folder / LATEST
    try:
        line = read_file(path).decode()
    except FileNotFoundError:
        whole = checkpoints(folder)
        if not whole:
            raise CheckpointError(
                f"{folder}: there is no checkpoint in this folder; give the folder "
                "that was given to save"
            ) from None
        return whole[-1][0]
    except NotADirectoryError as error:
        raise explained(path, error) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: it cannot be read ({error}); give a tag: {_have(folder)}"
        ) from error
    tag = line.strip()
    if not is_tag(tag) or tag not in found(folder):
        why = f", and there is no {folder / tag / INDEX}"
    # somebody may have written the line by hand
    elif line.encode() not in (pointer(tag), f"{tag}\n".encode()):
        why = " and then not the checksum of that: it was cut or changed"
    else:
        return tag
    raise CheckpointError(f"{path}: it names {tag!r}{why}; give a tag: {_have(folder)}")


def fsync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, suffix: str = ".tmp") -> None:
    """Write a file in one step: others see the old one or the new one."""
    temporary = path.with_name(path.name + suffix)
    try:
        fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise explained(path, error) from error


def check_free(path: Path) -> None:
    """Raise CheckpointError unless a checkpoint may get this name.

    It may be nobody's, or an empty folder's, or another checkpoint's.
    """
    if not os.path.lexists(path) or (path / INDEX).exists():
        return
    if not path.is_dir():
        raise explained(path, NotADirectoryError(errno.ENOTDIR, ""))
    if any(path.iterdir()):
        raise explained(path, FileExistsError(errno.EEXIST, ""))


def retire(folder: Path, keep: int) -> None:
    """Let all but the newest `keep` checkpoints be none; `sweep` deletes them.

    What `latest` names stays, and so does what has another name or link.
    """
    whole = checkpoints(folder)
    stays = {folder / tag for tag, index in whole if tag != index.tag}
    with contextlib.suppress(OSError, CheckpointError):  # it names no checkpoint
        latest = read_file(folder / LATEST).decode(errors="replace").strip()
        stays.add(folder / latest)
    linked = {path.resolve() for path in stays}
    own = [folder / tag for tag, index in whole if tag == index.tag]
    for path in own[:-keep]:
        if path.resolve() not in linked:
            os.rename(path, f"{path}.tmp-{secrets.token_hex(4)}")


def sweep(folder: Path, busy: Collection[str]) -> None:
    """Delete what killed saves and `retire` have left, of no save in `busy`.

    What made room for a checkpoint that has not come gets its name back.
    """
    for path in sorted(folder.glob("*")):
        aside = ASIDE.fullmatch(path.name)
        if aside is None or aside["nonce"] in busy:
            continue
        home = folder / aside["tag"]
        if aside["kind"] == "old" and not os.path.lexists(home):
            os.rename(path, home)
        else:
            _delete(path)


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for inside in sorted(path.iterdir()):
        if OURS.fullmatch(inside.name) and not inside.is_dir():
            inside.unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()
