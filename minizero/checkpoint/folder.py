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
from pathlib import Path

from .files import CheckpointError, write_all
from .layout import INDEX, Index

LATEST = "latest"
Folder = str | os.PathLike[str]

# what saves leave in a folder; nothing else is ever deleted
_ASIDE = re.compile(r"(?P<tag>.+)\.(?P<kind>tmp|old)-[0-9a-f]{8}")
_OURS = re.compile(r"rank-\d+-of-\d+\.safetensors|index\.json(\.tmp)?")


def aside(path: Path, kind: str) -> Path:
    """Another name for a folder or file, which no save had before."""
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(4)}")


# ---- a save becomes a checkpoint


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


def prepare(folder: Path, tag: str) -> tuple[Path, int]:
    """Make a folder for the files of a new checkpoint; it, and the save's number."""
    bad = Path(tag).name != tag or tag.strip() != tag or tag in ("", "..", LATEST)
    if bad or not tag.isprintable() or _ASIDE.fullmatch(tag):
        raise CheckpointError(
            f"the tag {tag!r} cannot name a folder beside `latest`; take one such as "
            "'step-100', without slashes"
        )
    sweep(folder)
    written = aside(folder / tag, "tmp")
    written.mkdir(parents=True)
    return written, max((i.number for _, i in checkpoints(folder)), default=0) + 1


def commit(
    written: Path, path: Path, index: Index, keep: int | None, latest: bool
) -> None:
    """Turn a folder with the files of all ranks into the checkpoint `path`.

    One rename decides. A checkpoint that has the name already makes room first; until
    the new one is there it is found under its other name. Then `latest` is replaced, so
    that a `load` without a tag takes the new one. Old ones go last.
    """
    if not all((written / name).exists() for name, _, _ in index.files):
        raise CheckpointError(
            f"{written}: a file was deleted during the save; give every job a folder of "
            "its own. The checkpoint before this one is intact"
        )
    replace_file(written / INDEX, index.dumps())
    if (path / INDEX).exists():
        os.rename(path, aside(path, "old"))
    os.rename(written, path)
    sync_folder(path.parent)
    if latest:
        replace_file(path.parent / LATEST, f"{path.name}\n".encode())
    if keep is not None:
        retire(path.parent, keep)
    sweep(path.parent)


# ---- it is found


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


def checkpoints(folder: Path) -> list[tuple[str, Index]]:
    """The tags and indexes of the complete checkpoints, oldest first."""
    complete = []
    for tag, path in indexes(folder).items():
        with contextlib.suppress(OSError, CheckpointError):
            complete.append((tag, Index.loads(path.read_bytes(), path)))
    return sorted(complete, key=lambda pair: pair[1].number)


def find(folder: Path, tag: str | None = None) -> tuple[str, Path]:
    """The tag of the checkpoint that is meant, and the path of its index.

    Without a tag: the one that `latest` names or, where there is no such file, the
    newest that is complete. Raises CheckpointError.
    """
    latest, paths = folder / LATEST, indexes(folder)
    tags = [tag for tag, _ in checkpoints(folder)]
    where = f"{folder}"
    if tag is None and latest.exists():
        tag, where = latest.read_text(errors="replace").strip(), f"named in {latest}"
    elif tag is None and any(folder.glob("*/mp_rank_*_model_states.pt")):
        raise CheckpointError(
            f"{folder}: this is a checkpoint of DeepSpeed's; convert it with the "
            "zero_to_fp32.py in it, and load the weights into the model"
        )
    elif tag is None and tags:
        tag = tags[-1]
    if tag not in paths:
        what = (
            "no checkpoint in this folder" if tag is None else f"no checkpoint {tag!r}"
        )
        have = f"; complete are {', '.join(map(repr, tags))}" if tags else ""
        raise CheckpointError(f"{where}: there is {what}{have}")
    return tag, paths[tag]


# ---- it goes


def retire(folder: Path, keep: int) -> None:
    """Rename all but the newest `keep` checkpoints, so that `sweep` deletes them.

    What `latest` names stays, and so does what was given another name.
    """
    latest = (folder / LATEST).read_text().strip() if (folder / LATEST).exists() else ""
    own = [tag for tag, index in checkpoints(folder) if tag == index.tag]
    for tag in own[:-keep]:
        if tag != latest:
            os.rename(folder / tag, aside(folder / tag, "tmp"))


def sweep(folder: Path) -> None:
    """Delete what killed saves and `retire` have left.

    What made room for a checkpoint that has not come gets its name back.
    """
    for path in sorted(folder.glob("*")):
        found = _ASIDE.fullmatch(path.name)
        if found and found["kind"] == "old" and not (folder / found["tag"]).exists():
            os.rename(path, folder / found["tag"])
        elif found and path.is_dir():
            for file in path.iterdir():
                if _OURS.match(file.name):
                    file.unlink()
            with contextlib.suppress(OSError):  # somebody else's files are in it
                path.rmdir()
        elif found:
            path.unlink()
