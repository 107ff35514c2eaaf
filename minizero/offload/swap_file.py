"""Shards in files that say what they hold."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..memory.bytes import aligned
from .async_io import ALIGN, DiskFault, explained, Transfer
from ..memory.bytes import view
from .scratch import RunFolder

MAGIC = b"minizero shard 1\n"
_BLOCKS = (ALIGN - 512) // len("4294967295, ")


def record_bytes(width: int, dtype: torch.dtype) -> int:
    """Bytes of a record of `width` elements: a header page, whole pages."""
    return ALIGN + aligned(width * dtype.itemsize, ALIGN)


class ShardFile:
    """One shard, [size], in a file: records of `width` elements each.

    A record is a header page and the elements, padded to whole pages. The
    header says what follows: run, name, record, generation (how often it was
    written), length in bytes, dtype, block size, and the crc32 of each block.
    It is written after the elements, so a record that was cut short is never
    taken for a whole one.
    """

    def __init__(
        self,
        folder: RunFolder,
        category: str,
        size: int,
        dtype: torch.dtype,
        width: int,
    ) -> None:
        self.size, self.dtype, self.width = size, dtype, width
        self.category = category
        self.name = f"{category}-{next(folder.numbers):04d}"
        self._run, self._disk = folder.run, folder.disk
        self.path = folder.path / f"{self.name}.shard"
        self.records = -(-size // width)
        self.generations = [0] * self.records
        self.stride = record_bytes(width, dtype)
        blocks = -(-(self.stride - ALIGN) // self._disk.block_size)
        if blocks > _BLOCKS:
            raise ValueError(
                f"a record of {width:,} elements has {blocks} blocks, and a "
                f"header has room for {_BLOCKS} checksums; make block_size "
                "larger or buffer_size smaller"
            )
        self.payload = size * dtype.itemsize
        self.nbytes = sum(record_bytes(b - a, dtype) for a, b in self.ranges())
        _reserve(self.path, self.nbytes)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """First and last element (exclusive) of each record."""
        for a in range(0, self.size, self.width):
            yield a, min(a + self.width, self.size)

    def elements(self, index: int) -> int:
        """How many elements record `index` has."""
        return min(self.width, self.size - index * self.width)

    def data(self, buffer: Tensor, index: int) -> Tensor:
        """The elements of a record in a buffer of `stride` bytes."""
        length = self.elements(index) * self.dtype.itemsize
        return buffer[ALIGN : ALIGN + length].view(self.dtype)

    def read(self, index: int, buffer: Tensor) -> Reading:
        """Launch the read of a record into a buffer; not before a write."""
        if not self.generations[index]:
            raise ValueError(f"{self.path}: record {index} was never written")
        used = buffer[: record_bytes(self.elements(index), self.dtype)]
        at = index * self.stride
        head = self._disk.read(self.path, at, used[:ALIGN])
        body = self._disk.read(self.path, at + ALIGN, used[ALIGN:])
        return Reading(self, index, buffer, head, body)

    def write(self, index: int, buffer: Tensor) -> Transfer:
        """Launch the write of a record, as its next generation."""
        used = buffer[: record_bytes(self.elements(index), self.dtype)]
        self.generations[index] += 1
        at = index * self.stride
        facts = self.facts(index)

        def last(checksums: list[int]) -> tuple[Tensor, int]:
            _write_header(used[:ALIGN], facts | {"crc32": checksums})
            return used[:ALIGN], at

        return self._disk.write(self.path, at + ALIGN, used[ALIGN:], last)

    def facts(self, index: int) -> dict[str, Any]:
        """What the header of a record has to say, but for the checksums."""
        return {
            "run": self._run,
            "name": self.name,
            "record": index,
            "generation": self.generations[index],
            "length": self.elements(index) * self.dtype.itemsize,
            "dtype": str(self.dtype).removeprefix("torch."),
            "block_size": self._disk.block_size,
        }

    def remove(self) -> None:
        """Delete the file, if it is still there."""
        self.path.unlink(missing_ok=True)


class Reading:
    """A record on its way into a buffer."""

    def __init__(
        self,
        file: ShardFile,
        index: int,
        buffer: Tensor,
        head: Transfer,
        body: Transfer,
    ) -> None:
        self.file, self.index, self.buffer = file, index, buffer
        self._head, self._body = head, body
        self.started = head.started

    @property
    def finished(self) -> float:
        return max(self._head.finished, self._body.finished)

    def wait(self) -> Tensor:
        """The record's elements, [width]; DiskFault if they are not its."""
        try:
            self._head.wait()
        finally:
            self._body.wait()
        file, path = self.file, self.file.path
        found = _read_header(path, self.buffer[:ALIGN])
        for key, wanted in file.facts(self.index).items():
            if found.get(key) != wanted:
                raise DiskFault(
                    path,
                    f"record {self.index} has {key} {found.get(key)!r}, and "
                    f"{wanted!r} was written; another process has changed "
                    "the file",
                )
        for block, (is_, was) in enumerate(
            zip(self._body.checksums, found["crc32"], strict=True)
        ):
            if is_ != was:
                raise DiskFault(
                    path,
                    f"block {block} of record {self.index} has checksum "
                    f"{is_:08x}, and {was:08x} was written; the disk or "
                    "another process has changed it",
                )
        return file.data(self.buffer, self.index)


def _write_header(page: Tensor, facts: dict[str, Any]) -> None:
    text = json.dumps(facts).encode()
    checksum = f"{zlib.crc32(text):08x}".encode()
    view(page)[:] = (MAGIC + checksum + text).ljust(ALIGN, b"\0")


def _read_header(path: Path, page: Tensor) -> dict[str, Any]:
    start, end = len(MAGIC), len(MAGIC) + 8
    data = bytes(view(page))
    text = data[end:].rstrip(b"\0")
    if data[:start] != MAGIC:
        raise DiskFault(
            path,
            f"it begins with {data[:start]!r}, not with {MAGIC!r}: this is "
            "no shard of this version, or another process has changed it",
        )
    if data[start:end] != f"{zlib.crc32(text):08x}".encode():
        raise DiskFault(
            path,
            "a header does not match its checksum; the disk or another "
            "process has changed it",
        )
    return json.loads(text)


def _reserve(path: Path, nbytes: int) -> None:
    """Make a file of this size now, so that a full disk is found now."""
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            if hasattr(os, "posix_fallocate") and nbytes:
                os.posix_fallocate(fd, 0, nbytes)
            else:
                os.ftruncate(fd, nbytes)
        finally:
            os.close(fd)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise explained(path, error) from error
