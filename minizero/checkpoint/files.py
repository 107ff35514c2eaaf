"""One rank's file: tensors in the safetensors format, written in a stream.

A checkpoint has one such file for each rank. Python values, such as a scheduler's state,
are in it as tensors of bytes, which `pack` makes and `unpack` reads.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32  # the same as zlib's, several times as fast

from ..memory.labels import view

CHUNK = 1 << 21  # bytes of a tensor that are in memory, and in the cache, at once

# what the safetensors format calls each dtype that it has
FORMAT_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip


class CheckpointError(ValueError):
    """What is wrong with a checkpoint; the message names the file or the parameter."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name that indexes and messages use, such as "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to be written that need not be in memory.

    read(a, b): elements a to b of a buffer, [b - a], in host memory. The tensor is the
        part of this buffer that begins at element `start`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]
    start: int = 0

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> LazyTensor:
        """A tensor that is in memory."""
        flat, shape = tensor.detach().reshape(-1), tuple(tensor.shape)
        return cls(name, tensor.dtype, shape, lambda a, b: flat[a:b].cpu())

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def chunks(self) -> Iterator[Tensor]:
        """The values, 1-D, in parts that memory has room for."""
        a, end = self.start, self.start + prod(self.shape)
        while a < end:
            b = min(a + CHUNK // self.dtype.itemsize, end)
            yield self.read(a, b).contiguous()
            a = b

    def to(self, dtype: torch.dtype | None) -> LazyTensor:
        """The same in another dtype, if it is floating-point."""
        if dtype is None or not self.dtype.is_floating_point:
            return self
        return replace(self, dtype=dtype, read=lambda a, b: self.read(a, b).to(dtype))

    def tensor(self) -> Tensor:
        """All of it, in host memory; a copy."""
        empty = torch.empty(0, dtype=self.dtype)
        return torch.cat([empty, *self.chunks()]).view(self.shape)


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """Write a new file; returns its length and its crc32.

    It is on the disk then, not only in the system's cache.
    """
    length = checksum = 0
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            for part in parts:
                length, checksum = length + len(part), crc32(part, checksum)
                left = memoryview(part)
                while left:  # `os.write` may write less than it is given
                    left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    return length, checksum


def write_tensors(path: Path, tensors: Sequence[LazyTensor]) -> tuple[int, int]:
    """Write a new safetensors file, chunk by chunk; returns its length and its crc32.

    The safetensors library would need all tensors in memory; these may be on a disk.
    """
    tensors = sorted(tensors, key=lambda t: -t.dtype.itemsize)  # keeps all aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        if (dtype := dtype_name(tensor.dtype)) not in FORMAT_NAMES:
            raise CheckpointError(f"{tensor.name}: safetensors files have no {dtype}")
        header[tensor.name] = {
            "dtype": FORMAT_NAMES[dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    chunks = (view(chunk) for tensor in tensors for chunk in tensor.chunks())
    return write_file(path, chain([head], chunks))


def length_and_crc32(path: Path) -> tuple[int, int]:
    """The length and the crc32 of a file."""
    length = checksum = 0
    block = memoryview(bytearray(1 << 18))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            length, checksum = length + count, crc32(block[:count], checksum)
    return length, checksum


def pack(value: Any, name: str) -> Tensor:
    """A Python value as a tensor of bytes, which `unpack` reads without running code.

    It may consist of None, numbers, strings, bytes, lists, tuples, sets, dicts, Counter,
    OrderedDict and tensors. Anything else would need a pickle that runs code, and is
    refused; `name` stands for the value in the message.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        packed = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
        unpack(packed)
    except (pickle.PickleError, AttributeError, TypeError, RecursionError) as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{name} holds {f'a {found[1]}' if found else error}, which a checkpoint "
            "cannot; save numbers, strings, lists, dicts and tensors (its state_dict(), "
            "item() or tolist())"
        ) from error
    return packed


def unpack(packed: Tensor) -> Any:
    """The value that `pack` was given; its tensors are in host memory."""
    file = io.BytesIO(view(packed))
    return torch.load(file, map_location="cpu", weights_only=True)
