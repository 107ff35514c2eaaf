"""Tensors in a file, in the safetensors format, written and read in pieces.

The format: 8 bytes that give the length of a JSON header; the header, which
gives each tensor's dtype, shape and first and last byte; the tensors' bytes.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from .files import view
from .plain import DTYPES, dtype_name

CHUNK = 1 << 24  # bytes that are in memory at once

_FORMAT_NAMES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bfloat16": "BF16",
    "complex64": "C64",
    "bool": "BOOL",
}


def _format_name(dtype: str) -> str:
    """F32, BF16, U8, ..."""
    if dtype in _FORMAT_NAMES:
        return _FORMAT_NAMES[dtype]
    return dtype[0].upper() + dtype.lstrip("abcdefghijklmnopqrstuvwxyz")


_BY_FORMAT_NAME = {_format_name(name): DTYPES[name] for name in DTYPES}


class CheckpointError(ValueError):
    """What is wrong with a checkpoint; names the file or the parameter."""


def explained(path: Path, error: OSError) -> CheckpointError:
    """An error of the system as a sentence that says what to do."""
    advice = {
        errno.ENOSPC: "the disk is full; free space, or save elsewhere",
        errno.EDQUOT: "the disk quota is used up; free space, or save "
        "elsewhere",
        errno.EFBIG: "the file may not grow so large; raise the limit "
        "(ulimit -f), or choose another file system",
        errno.ENOENT: "there is no such file; this checkpoint was moved in "
        "part, or the folder is not the same on every node",
        errno.EACCES: "no permission; choose a folder of your own",
        errno.EROFS: "the file system is read-only; save elsewhere",
        errno.EISDIR: "this is a folder, and a file is expected there",
        errno.ENOTDIR: "a part of the path is a file, not a folder",
    }
    what = advice.get(error.errno or 0, error.strerror or str(error))
    return CheckpointError(f"{path}: {what}")


@dataclass(frozen=True)
class Source:
    """A tensor to be written, which need not be in memory.

    `read(a, b)`: its elements a to b in host memory, 1-D. `on_disk`: whether
    it reads them from a file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]
    on_disk: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Source:
        """A tensor that is in memory."""
        flat = tensor.detach().reshape(-1)
        return cls(
            name,
            tensor.dtype,
            tuple(tensor.shape),
            lambda a, b: flat[a:b].cpu(),
        )

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorWriter:
    """Writes a new file: the header at once, then each source in its turn.

    `nbytes`, `crc32`: of what has been written. Raises CheckpointError.
    """

    def __init__(
        self,
        path: Path,
        sources: Iterable[Source],
        metadata: dict[str, str] | None = None,
    ) -> None:
        self.path = path
        self.nbytes = self.crc32 = 0
        self._fd = -1
        header: dict[str, Any] = (
            {"__metadata__": metadata} if metadata else {}
        )
        end = 0
        for source in sources:
            start, end = end, end + source.nbytes
            header[source.name] = {
                "dtype": _format_name(dtype_name(source.dtype)),
                "shape": source.shape,
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        try:
            self._fd = os.open(
                path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666
            )
        except OSError as error:
            raise explained(path, error) from error
        self._put(len(text).to_bytes(8, "little") + text)

    def write(self, source: Source) -> None:
        """The next source, a chunk at a time."""
        step = CHUNK // source.dtype.itemsize
        for a in range(0, source.numel, step):
            self._put_tensor(source.read(a, min(a + step, source.numel)))

    def _put_tensor(self, piece: Tensor) -> None:
        piece = piece.contiguous()  # `view` does not keep it alive
        self._put(view(piece))

    def _put(self, data: bytes | memoryview) -> None:
        data = memoryview(data)
        try:
            done = 0
            while done < len(data):
                done += os.write(self._fd, data[done:])
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


@dataclass(frozen=True)
class Entry:
    """Where a tensor is in a file; `start` in bytes from its beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """Reads any part of any tensor of a file, and nothing but that.

    The bytes go from the file to where they are wanted: nothing is mapped,
    so a file that shrinks is an error and not a crash.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise explained(path, error) from error
        try:
            self.entries = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> dict[str, Entry]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        try:
            if size < 8 or length > size - 8:
                raise ValueError(f"a header of {length:,} bytes in {size:,}")
            header = json.loads(os.pread(self._fd, length, 8))
            header.pop("__metadata__", None)
            return {
                name: self._entry(facts, 8 + length, size)
                for name, facts in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path}: this is no safetensors file ({error}); it was "
                "damaged, or another one took its place"
            ) from error

    def _entry(self, facts: dict[str, Any], begin: int, size: int) -> Entry:
        dtype = _BY_FORMAT_NAME[facts["dtype"]]
        shape = tuple(map(int, facts["shape"]))
        start, end = facts["data_offsets"]
        fits = 0 <= start <= end <= size - begin
        if not fits or end - start != prod(shape) * dtype.itemsize:
            raise ValueError(f"bytes {start} to {end} for {dtype}, {shape}")
        return Entry(dtype, shape, begin + start)

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
        if not out.numel():
            return
        data, done = view(out), 0
        while done < len(data):
            count = os.preadv(self._fd, [data[done:]], at + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: the file ends at byte {at + done:,}, and "
                    f"{at + len(data):,} were expected; it is truncated"
                )
            done += count

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, in host memory."""
        entry = self.entries[name]
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(name, 0, out.view(-1))
        return out

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

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
