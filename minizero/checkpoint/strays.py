"""Folders that saves make and leave: deleted if they are known as ours."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection
from pathlib import Path

from .directory import LATEST, checkpoints
from .manifest import INDEX, OUR_FOLDER, OURS, Index
from .tensor_file import explained


def make_folder(path: Path, nonce: str) -> None:
    """Make a checkpoint's folder, if it is not there, with a file of ours.

    It appears together with that file, which `replace_file` will use: an
    empty one, after a kill, could be anybody's.
    """
    if path.is_dir():
        return
    aside = path.parent / f"{nonce}.tmp"
    ours = aside / f"{INDEX}.{nonce}.tmp"
    try:
        aside.mkdir(parents=True)
        ours.touch(exist_ok=False)
        os.rename(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            ours.unlink(missing_ok=True)
            aside.rmdir()
        raise explained(path, error) from error


def retire(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, each index first.

    What `latest` names stays, and so does what has another name or link.
    """
    found = checkpoints(folder)
    stays = {folder / n for n, index in found if n != index.tag}
    try:
        latest = (folder / LATEST).read_text(errors="replace").strip()
        stays.add(folder / latest)
    except OSError:
        pass  # there is none that names a checkpoint
    linked = {path.resolve() for path in stays}
    own = [folder / n for n, index in found if n == index.tag]
    for path in own[:-keep]:
        if path.resolve() not in linked:
            # without its index it is none, and `sweep` takes the rest
            os.unlink(path / INDEX)


def sweep(folder: Path, busy: Collection[str]) -> None:
    """Delete what no index names: what killed saves and `retire` have left.

    Only files that are named as ours are, of no save in `busy`, and not
    beside an index that cannot be read: they may still be saved by hand.
    """
    complete = dict(checkpoints(folder))
    for home in [folder, *folder.glob("*")]:
        if not home.is_dir():
            continue
        inside = home != folder
        strays = _strays(home, complete.get(home.name) if inside else None)
        strays = [path for path in strays if _nonce(path) not in busy]
        ours = strays or OUR_FOLDER.fullmatch(home.name)
        whole = ours and inside and not home.is_symlink()
        if whole and len(list(home.iterdir())) == len(strays):
            _remove(home, strays)
        else:
            for path in strays:
                path.unlink(missing_ok=True)


def _strays(home: Path, index: Index | None) -> list[Path]:
    """Files in a folder that saves have made and its index does not name."""
    if index is None and (home / INDEX).exists():
        return []
    named = {file.name for file in index.files} if index else set()
    return [
        path
        for path in home.glob("*")
        if path.name not in named and OURS.fullmatch(path.name) and path.is_file()
    ]


def _nonce(path: Path) -> str | None:
    """Which save has made a file."""
    found = OURS.fullmatch(path.name)
    return found and (found["a"] or found["b"])


def _remove(home: Path, strays: list[Path]) -> None:
    """Delete a folder that has nothing but strays.

    It is called ours first: a kill may leave it empty.
    """
    aside = home.with_name(f"{secrets.token_hex(4)}.tmp")
    os.rename(home, aside)
    for path in strays:
        (aside / path.name).unlink(missing_ok=True)
    aside.rmdir()
