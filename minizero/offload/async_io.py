"""Asynchronous reads and writes of files, direct where that is possible."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from ..memory.bytes import aligned, host_empty, view

# what O_DIRECT asks of addresses, offsets and lengths: a multiple of the
# device's sector, which is 512 or 4096 bytes
ALIGN = 4096
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class DiskFault(RuntimeError):
    """A file that cannot be written, read or trusted; `path` names it."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path

    def __reduce__(self) -> tuple[type, tuple[Path, str]]:
        # a rank's error travels to the parent
        return type(self), (self.path, str(self)[len(f"{self.path}: ") :])


def aligned_buffer(nbytes: int) -> Tensor:
    """Host memory, uint8, whole pages of `ALIGN`, that starts at a page.

    `ALIGN` bytes more are allocated, to cut it from; page-locked where
    there is a GPU.
    """
    pages = aligned(nbytes, ALIGN)
    whole = host_empty((pages + ALIGN,), torch.uint8, "buffers")
    start = -whole.data_ptr() % ALIGN
    return whole[start : start + pages]


def direct_io(folder: Path) -> bool:
    """Whether files in `folder` can be read past the page cache: tried."""
    if not _DIRECT:
        return False
    fd, name = tempfile.mkstemp(dir=folder)
    os.close(fd)
    page = aligned_buffer(ALIGN).zero_()
    try:
        fd = os.open(name, os.O_RDWR | _DIRECT)
        try:
            written = os.pwrite(fd, view(page), 0)
            return written == os.preadv(fd, [view(page)], 0) == ALIGN
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.unlink(name)


class Transfer:
    """A read or a write under way; its buffer is the engine's until `wait`.

    `checksums`: crc32 of each block, valid when it is over. `started`,
    `finished`: seconds on the clock of `time.perf_counter`.
    """

    def __init__(self, path: Path, buffer: Tensor, blocks: int) -> None:
        self.path = path
        self.started = self.finished = time.perf_counter()
        self.checksums = [0] * blocks
        self._buffer = buffer  # alive while threads work on its address
        self._futures: list[Future[None]] = []
        self._left, self._lock, self._failed = blocks, threading.Lock(), False

    def wait(self) -> None:
        """Block until all requests are done; raises DiskFault."""
        wait(self._futures)
        for future in self._futures:
            error = future.exception()
            if error is not None:
                raise explained(self.path, error) from error

    def _is_last(self) -> bool:
        """Called once by each request when it ends."""
        with self._lock:
            self._left -= 1
            return self._left == 0


def explained(path: Path, error: BaseException) -> BaseException:
    """The same error as a DiskFault that says what to do."""
    if not isinstance(error, OSError):
        return error
    advice = {
        errno.ENOSPC: "the disk is full; free space, or choose a folder on "
        "another disk",
        errno.EDQUOT: "the disk quota is used up; free space, or choose a "
        "folder elsewhere",
        errno.EFBIG: "the file may not grow so large; raise the limit "
        "(ulimit -f), or choose another file system",
        errno.ENOENT: "the file is missing: another process has removed it; "
        "start again, and keep others out of the folder",
    }
    problem = advice.get(error.errno or 0, f"{error.strerror or error}")
    return DiskFault(path, problem)


# from the blocks' checksums, what to write after the blocks, and where
Last = Callable[[list[int]], tuple[Tensor, int]]


class AsyncFiles:
    """Reads and writes in `queue_depth` threads, `block_size` bytes each.

    A thread waits in `preadv` or `pwrite` without Python's lock, so so many
    requests are in flight; it also takes the block's crc32. The names are
    those of DeepSpeed's `aio` section.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 8,
        direct: bool = True,
    ) -> None:
        if block_size < ALIGN or block_size % ALIGN:
            raise ValueError(
                f"block_size must be a multiple of {ALIGN} bytes, not {block_size!r}"
            )
        if queue_depth < 1:
            raise ValueError(f"queue_depth must be at least 1, not {queue_depth!r}")
        self.block_size, self.direct = block_size, direct
        self._threads = ThreadPoolExecutor(queue_depth, "files")

    def read(self, path: Path, offset: int, buffer: Tensor) -> Transfer:
        """Launch a read of `buffer.nbytes` bytes into an aligned buffer.

        Raises DiskFault at once if the file is missing, and from `wait` if
        it ends too soon.
        """

        def request(fd: int, part: memoryview, at: int) -> int:
            done = 0
            while done < len(part):
                count = os.preadv(fd, [part[done:]], at + done)
                if count == 0:
                    size = os.fstat(fd).st_size
                    raise DiskFault(
                        path,
                        f"the file is truncated: it has {size:,} bytes, and "
                        f"{at + len(part):,} were written",
                    )
                done += count
            return zlib.crc32(part)

        return self._launch(path, os.O_RDONLY, offset, buffer, request)

    def write(
        self,
        path: Path,
        offset: int,
        buffer: Tensor,
        last: Last | None = None,
    ) -> Transfer:
        """Launch a write of an aligned buffer to a file that exists.

        `last`: called with all blocks' crc32 when they are written; gives
        a buffer and an offset, which are written after the rest.
        """

        def request(fd: int, part: memoryview, at: int) -> int:
            checksum = zlib.crc32(part)
            _write_all(fd, part, at)
            return checksum

        return self._launch(path, os.O_WRONLY, offset, buffer, request, last)

    def _launch(
        self,
        path: Path,
        mode: int,
        offset: int,
        buffer: Tensor,
        request: Callable[[int, memoryview, int], int],
        last: Last | None = None,
    ) -> Transfer:
        try:
            fd = os.open(path, mode | (_DIRECT if self.direct else 0))
        except OSError as error:
            raise explained(path, error) from error
        starts = range(0, buffer.nbytes, self.block_size)
        transfer, data = Transfer(path, buffer, len(starts)), view(buffer)

        def work(index: int, start: int) -> None:
            part = data[start : start + self.block_size]
            try:
                checksum = request(fd, part, offset + start)
                transfer.checksums[index] = checksum
            except BaseException:
                transfer._failed = True
                raise
            finally:
                if transfer._is_last():
                    self._finish(transfer, fd, last)

        transfer._futures = [
            self._threads.submit(work, index, start)
            for index, start in enumerate(starts)
        ]
        return transfer

    def _finish(self, transfer: Transfer, fd: int, last: Last | None) -> None:
        try:
            if last is not None and not transfer._failed:
                page, at = last(transfer.checksums)
                _write_all(fd, view(page), at)
        finally:
            os.close(fd)
            transfer.finished = time.perf_counter()

    def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        self._threads.shutdown()


def _write_all(fd: int, part: memoryview, at: int) -> None:
    done = 0
    while done < len(part):
        done += os.pwrite(fd, part[done:], at + done)
