"""Tensors in a file, in the safetensors format, and any part of them back.

The format: 8 bytes that give the length of a JSON header; the header, which
gives each tensor's dtype, shape and first and last byte; the tensors' bytes.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
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

_NAMES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bfloat16": "BF16",
    "complex64": "C64",
    "bool": "BOOL",
}


def format_name(dtype: str) -> str:
    """F32, BF16, U8, ..."""
    if dtype in _NAMES:
        return _NAMES[dtype]
    return dtype[0].upper() + dtype.lstrip("abcdefghijklmnopqrstuvwxyz")


_DTYPES = {format_name(name): DTYPES[name] for name in DTYPES}


class CheckpointError(ValueError):
    """What is wrong with a checkpoint; names the file or the parameter."""


def explained(path: Path, error: OSError) -> CheckpointError:
    """An error of the system as a sentence that says what to do."""
    advice = {
        errno.ENOSPC: "the disk is full; free space, or save elsewhere",
        errno.EDQUOT: "the disk quota is used up; free space, or save elsewhere",
        errno.EFBIG: "the file may not grow so large; raise the limit "
        "(ulimit -f), or choose another file system",
        errno.ENOENT: "there is no such file; this checkpoint was moved in "
        "part, or the folder is not the same on every node",
        errno.EACCES: "no permission; choose a folder of your own",
        errno.EROFS: "the file system is read-only; save elsewhere",
        errno.EEXIST: "there is something of that name already; delete it, "
        "or choose another name",
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
        dtype = _DTYPES[facts["dtype"]]
        shape = tuple(map(int, facts["shape"]))
        start, end = facts["data_offsets"]
        fits = 0 <= start <= end <= size - begin
        fits = fits and min(shape, default=0) >= 0
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
