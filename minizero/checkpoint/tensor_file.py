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
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ..memory.bytes import view
from .encoding import DTYPES

CHUNK = 1 << 24  # bytes that are in memory at once

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


def explained(path: Path, error: OSError) -> CheckpointError:
    """An error of the system as a sentence that says what to do."""
    taken = "there is something of that name already; delete it, or choose another name"
    advice = {
        errno.ENOSPC: "the disk is full; free space, or save elsewhere",
        errno.EDQUOT: "the disk quota is used up; free space, or save elsewhere",
        errno.EFBIG: "the file may not grow so large; raise the limit (ulimit -f), or "
        "choose another file system",
        errno.ENOENT: "there is no such file; this checkpoint was moved in part, or "
        "the folder is not the same on every node",
        errno.EACCES: "no permission; choose a folder of your own",
        errno.EROFS: "the file system is read-only; save elsewhere",
        errno.EEXIST: taken,
        errno.ENOTEMPTY: taken,
        errno.EISDIR: "this is a folder, and a file is expected there",
        errno.ENOTDIR: "a part of the path is a file, not a folder",
    }
    what = advice.get(error.errno or 0, error.strerror or str(error))
    return CheckpointError(f"{path}: {what}")


@dataclass(frozen=True)
class Entry:
    """Where a tensor is in a file; `start` in bytes from its beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """Reads any part of any tensor of a file, and nothing but that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)
        except OSError as error:
            raise explained(path, error) from error
        try:
            self.entries = self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.close()
            raise CheckpointError(
                f"{path}: this is no safetensors file ({error}); it was damaged, or "
                "another one took its place"
            ) from error

    def _read_header(self) -> dict[str, Entry]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"a header of {length:,} bytes in {size:,}")
        header = json.loads(self._file.read(length))
        header.pop("__metadata__", None)
        begin = 8 + length
        entries = {}
        for name, facts in header.items():
            dtype, shape = _DTYPES[facts["dtype"]], tuple(map(int, facts["shape"]))
            start, end = facts["data_offsets"]
            inside = 0 <= start <= end <= size - begin and min(shape, default=0) >= 0
            if not inside or end - start != prod(shape) * dtype.itemsize:
                raise ValueError(f"bytes {start} to {end} for {dtype}, {shape}")
            entries[name] = Entry(dtype, shape, begin + start)
        return entries

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


def checksum(path: Path) -> tuple[int, int]:
    """Bytes and crc32 of a whole file, read in pieces."""
    nbytes, crc32 = 0, 0
    try:
        with open(path, "rb", buffering=0) as file:
            while data := file.read(1 << 20):
                nbytes, crc32 = nbytes + len(data), zlib.crc32(data, crc32)
    except OSError as error:
        raise explained(path, error) from error
    return nbytes, crc32


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to be written, which need not be in memory.

    `read(a, b)`: its elements a to b in host memory, 1-D. `on_disk`: whether it reads
    them from a file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]
    on_disk: bool = False

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


def write_all(fd: int, data: bytes | memoryview) -> None:
    """`os.write` may take less than it is given."""
    data = memoryview(data)
    while data:
        data = data[os.write(fd, data) :]


class TensorWriter:
    """Writes a new file: the header at once, then each tensor in its turn.

    `nbytes`, `crc32`: of what has been written. Raises CheckpointError; a file that
    has not got its header is none.
    """

    def __init__(
        self,
        path: Path,
        tensors: Iterable[LazyTensor],
        metadata: dict[str, str] | None = None,
    ) -> None:
        self.path = path
        self.nbytes = self.crc32 = 0
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        end = 0
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
        text = json.dumps(header).encode()
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
        step = CHUNK // tensor.dtype.itemsize
        for a in range(0, tensor.numel, step):
            self._put_tensor(tensor.read(a, min(a + step, tensor.numel)))

    def _put_tensor(self, piece: Tensor) -> None:
        piece = piece.contiguous()  # `view` does not keep it alive
        self._put(view(piece))

    def _put(self, data: bytes | memoryview) -> None:
        try:
            write_all(self._fd, data)
        except OSError as error:
            raise explained(self.path, error) from error
        self.nbytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)

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
