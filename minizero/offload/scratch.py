"""A folder for the files of one process, gone when that ends."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from .async_io import AsyncFiles, DiskFault, direct_io
from ..ranks.launch import rank

# not what `launch` calls its own things in the same folder
_PREFIX = "minizero-nvme-"


class RunFolder:
    """A folder of this process's own inside `folder`, gone when it ends.

    A lock says that it is in use. Where the process was killed the folder
    stays, and the next `RunFolder` beside it deletes it.
    """

    def __init__(self, folder: Path, disk: AsyncFiles) -> None:
        self.run, self.disk = uuid.uuid4().hex, disk
        name = f"{socket.gethostname()}-{os.getpid()}-rank{rank()}"
        self.path = folder / f"{_PREFIX}{name}-{self.run[:8]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                sweep(folder)
                self.path.mkdir()
                lock = _try_lock(self.path)
                assert lock is not None
        except OSError as error:
            raise DiskFault(
                folder,
                f"cannot be written to ({error.strerror}); choose another folder",
            ) from error
        disk.direct = disk.direct and direct_io(self.path)
        self.numbers = count()
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Delete the folder and all that is in it."""
        self._end()


def sweep(folder: Path) -> list[Path]:
    """Delete what processes that are no more have left in `folder`."""
    swept = []
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        lock = _try_lock(path)
        if lock is not None:
            _remove(path, lock)
            swept.append(path)
    return swept


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process makes or sweeps run folders in here meanwhile."""
    from fcntl import LOCK_EX, flock

    fd = os.open(folder, os.O_RDONLY)
    try:
        flock(fd, LOCK_EX)
        yield
    finally:
        os.close(fd)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds a folder's lock; None if another has it."""
    from fcntl import LOCK_EX, LOCK_NB, flock

    try:
        fd = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        flock(fd, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _remove(path: Path, lock: int, owner: int | None = None) -> None:
    # a process that was forked off ends without its parent's folder
    if owner in (None, os.getpid()):
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
