"""Tensors in files: the safetensors format, written in a stream, read by parts.

The format: 8 bytes that give the length of a JSON header; the header, which gives each
tensor's dtype, shape and first and last byte; the tensors' bytes. The safetensors
library maps a file into memory, where one that shrinks kills the process; here bytes
are read to where they are wanted, and then that is an error like others.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from zlib_ng import zlib_ng as zlib  # the same crc32, many times as fast

from ..memory.bytes import view
from .encoding import DTYPES

CHUNK = 1 << 24  # bytes that are in memory at once
BLOCK = 1 << 18  # bytes that a processor's cache still has when they are used again

_SPECIAL = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bfloat16": "BF16",
    "bool": "BOOL",
}
# F32, BF16, U8, ...
FORMAT_NAMES = {
    dtype: _SPECIAL.get(name) or name[0].upper() + re.sub("[a-z]", "", name)
    for name, dtype in DTYPES.items()
}
_DTYPES = {name: dtype for dtype, name in FORMAT_NAMES.items()}


class CheckpointError(ValueError):
    """What is wrong with a checkpoint; names the file or the parameter."""


_TAKEN = "there is something of that name already; delete it, or choose another name"
_ADVICE = {
    errno.ENOSPC: "the disk is full; free space, or save elsewhere",
    errno.EDQUOT: "the disk quota is used up; free space, or save elsewhere",
    errno.EFBIG: "the file may not grow so large; raise the limit (ulimit -f), or "
    "choose another file system",
    errno.ENOENT: "there is no such file; this checkpoint was moved in part, or the "
    "folder is not the same on every node",
    errno.EACCES: "no permission; choose a folder of your own",
    errno.EROFS: "the file system is read-only; save elsewhere",
    errno.EEXIST: _TAKEN,
    errno.ENOTEMPTY: _TAKEN,
    errno.EISDIR: "this is a folder, and a file is expected there",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
}


def explained(path: Path, error: OSError) -> CheckpointError:
    """An error of the system as a sentence that says what to do."""
    what = _ADVICE.get(error.errno or 0, error.strerror or str(error))
    return CheckpointError(f"{path}: {what}")


def open_file(path: Path) -> FileIO:
    """A file to be read. Whatever has no end, a device or a pipe, is refused."""
    # without O_NONBLOCK a pipe would be waited for
    file = FileIO(path, opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(
            f"{path}: this is a device or a pipe, and a file is expected there"
        )
    return file


def read_file(path: Path) -> bytes:
    """All bytes of a small file."""
    with open_file(path) as file:
        return file.readall()


def checksum(path: Path) -> tuple[int, int]:
    """Bytes and crc32 of a whole file, read in pieces."""
    nbytes, crc32 = 0, 0
    room = memoryview(bytearray(BLOCK))
    try:
        with open_file(path) as file:
            while count := file.readinto(room):
                nbytes, crc32 = nbytes + count, zlib.crc32(room[:count], crc32)
    except OSError as error:
        raise explained(path, error) from error
    return nbytes, crc32


def seal(header: dict[str, Any], owner: str) -> str:
    """The checksum of a header, and of whose it is."""
    return f"{zlib.crc32(json.dumps([owner, header]).encode()):08x}"


@dataclass(frozen=True)
class Entry:
    """Where a tensor is in a file; `start` in bytes from its beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """Reads any part of any tensor of a file, and nothing but that.

    `entries`: what it has, by name. Raises CheckpointError for a header that does not
    describe each byte of the file once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_file(path)
        except OSError as error:
            raise explained(path, error) from error
        try:
            self.entries = self._read_header()
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as e:
            self.close()
            raise CheckpointError(
                f"{path}: this is no safetensors file ({e}); it was damaged, or "
                "another one took its place"
            ) from e

    def _read_header(self) -> dict[str, Entry]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"a header of {length:,} bytes in {size:,}")
        self.header = json.loads(self._file.read(length))
        self.metadata: dict[str, str] = self.header.pop("__metadata__", {})
        begin, ended, entries = 8 + length, 0, {}
        by_start = sorted(self.header.items(), key=lambda e: e[1]["data_offsets"])
        for name, facts in by_start:
            dtype, shape = _DTYPES[facts["dtype"]], tuple(facts["shape"])
            start, end = facts["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, start, end))
            if not whole or start != ended or end - start != prod(shape) * dtype.itemsize:
                raise ValueError(f"bytes {start} to {end} for {dtype}, {shape}")
            entries[name], ended = Entry(dtype, shape, begin + start), end
        if begin + ended != size:
            raise ValueError(f"{ended:,} bytes of tensors in {size - begin:,}")
        return entries

    def sealed_for(self, owner: str) -> bool:
        """Whether it was written as `TensorWriter(..., owner=owner)`."""
        return self.metadata.get("seal") == seal(self.header, owner)

    def read(self, name: str, a: int, out: Tensor) -> Tensor:
        """Elements from `a` on into `out`: 1-D, contiguous, in host memory.

        In another dtype they pass through a chunk.
        """
        entry = self.entries[name]
        at = entry.start + a * entry.dtype.itemsize
        if out.dtype == entry.dtype:
            self._fill(out, at)
            return out
        step = CHUNK // entry.dtype.itemsize
        room = torch.empty(min(step, out.numel()), dtype=entry.dtype)
        for b in range(0, out.numel(), step):
            part = room[: min(step, out.numel() - b)]
            self._fill(part, at + b * entry.dtype.itemsize)
            out[b : b + step].copy_(part)
        return out

    def _fill(self, out: Tensor, at: int) -> None:
        data = view(out) if out.numel() else memoryview(b"")
        self._file.seek(at)
        while data:
            count = self._file.readinto(data)
            if not count:
                end = self._file.tell()
                raise CheckpointError(
                    f"{self.path}: the file ends at byte {end:,}, and "
                    f"{end + len(data):,} were expected; it is truncated"
                )
            data = data[count:]

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, in host memory."""
        entry = self.entries[name]
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(name, 0, out.view(-1))
        return out

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to be written, which need not be in memory.

    `read(a, b)`: its elements a to b in host memory, 1-D. `on_disk`: whether it reads
    them from a file. `steady`: the tensor itself, 1-D, if nothing but an update changes
    it: then a copy may be made beside forward and backward.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]
    on_disk: bool = False
    steady: Tensor | None = None

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> LazyTensor:
        """A tensor that is in memory."""
        # a lazily conjugated or negated tensor has other bytes than values
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        shape = tuple(tensor.shape)
        return cls(name, tensor.dtype, shape, lambda a, b: flat[a:b].cpu())

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def pieces(self) -> list[tuple[int, int]]:
        """First and last (exclusive) element of each chunk."""
        step = CHUNK // self.dtype.itemsize
        starts = range(0, self.numel, step)
        return [(a, min(a + step, self.numel)) for a in starts]


def write_all(fd: int, data: bytes | memoryview) -> None:
    """`os.write` may take less than it is given."""
    data = memoryview(data)
    while data:
        data = data[os.write(fd, data) :]


class TensorWriter:
    """Writes a new file: the header at once, then each tensor in its turn.

    `metadata`: strings for other readers; without them, the seal of the `owner`.
    `nbytes`, `crc32`: of what has been written. Raises CheckpointError; a file that has
    not got its header is none.
    """

    def __init__(
        self,
        path: Path,
        tensors: Iterable[LazyTensor],
        metadata: dict[str, str] | None = None,
        owner: str = "",
    ) -> None:
        self.path = path
        self.nbytes = self.crc32 = end = 0
        header: dict[str, Any] = {}
        for tensor in tensors:
            if tensor.name in header or tensor.name == "__metadata__":
                raise CheckpointError(
                    f"{path}: two tensors of the name {tensor.name!r} cannot be in "
                    "one file; give a parameter or module another name"
                )
            start, end = end, end + tensor.nbytes
            header[tensor.name] = {
                "dtype": FORMAT_NAMES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": [start, end],
            }
        about = metadata or {"seal": seal(header, owner)}
        text = json.dumps({"__metadata__": about, **header}).encode()
        text += b" " * (-len(text) % 8)
        try:
            self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except OSError as error:
            raise explained(path, error) from error
        try:
            self._put(len(text).to_bytes(8, "little") + text)
        except BaseException:
            self.close()
            path.unlink(missing_ok=True)
            raise

    def write(self, tensor: LazyTensor) -> None:
        """The next tensor, a chunk at a time."""
        for a, b in tensor.pieces():
            piece = tensor.read(a, b).contiguous()  # `view` does not keep it alive
            self._put(view(piece))
            del piece  # before the next one is there

    def _put(self, data: bytes | memoryview) -> None:
        for a in range(0, len(data), BLOCK):
            block = data[a : a + BLOCK]
            try:
                write_all(self._fd, block)
            except OSError as error:
                raise explained(self.path, error) from error
            self.nbytes += len(block)
            self.crc32 = zlib.crc32(block, self.crc32)

    def finish(self) -> None:
        """Have the file on the disk, not only in the system's memory."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise explained(self.path, error) from error
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the file, finished or not."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
