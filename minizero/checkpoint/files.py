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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32  # the same as zlib's, several times as fast

from ..memory.labels import view

CHUNK = 1 << 24  # bytes of a tensor that are in host memory at once
BLOCK = 1 << 18  # bytes that stay in the cache from the checksum to the write

_NAMES = (
    "float64 F64 float32 F32 float16 F16 bfloat16 BF16 float8_e4m3fn F8_E4M3 "
    "float8_e5m2 F8_E5M2 complex64 C64 int64 I64 int32 I32 int16 I16 int8 I8 "
    "uint64 U64 uint32 U32 uint16 U16 uint8 U8 bool BOOL"
).split()
# what the safetensors format calls each dtype that it has
FORMAT_NAMES = dict(zip(_NAMES[::2], _NAMES[1::2], strict=True))


class CheckpointError(ValueError):
    """What is wrong with a checkpoint; the message names the file or the parameter."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name that indexes and messages use, such as "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to be written that need not be in memory.

    read(a, b): its elements a to b in host memory, [b - a].
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> LazyTensor:
        """A tensor that is in memory."""
        # a lazily conjugated or negated tensor has other bytes than values
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        shape = tuple(tensor.shape)
        return cls(name, tensor.dtype, shape, lambda a, b: flat[a:b].cpu())

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First and last (exclusive) element of each chunk."""
        step, numel = CHUNK // self.dtype.itemsize, prod(self.shape)
        return ((a, min(a + step, numel)) for a in range(0, numel, step))

    def copied(self) -> LazyTensor:
        """The same, read now: later changes do not reach it."""
        values = torch.empty(prod(self.shape), dtype=self.dtype)
        for a, b in self.pieces():
            values[a:b].copy_(self.read(a, b))
        return replace(self, read=lambda a, b: values[a:b])


def write_all(fd: int, data: bytes | memoryview) -> None:
    """`os.write` may write less than it is given."""
    data = memoryview(data)
    while data:
        data = data[os.write(fd, data) :]


def write_tensors(
    path: Path, tensors: Sequence[LazyTensor], metadata: dict[str, str] | None = None
) -> tuple[int, int]:
    """Write a new safetensors file, chunk by chunk; returns its length and its crc32.

    The safetensors library would need all tensors in memory; these may be on a disk. The
    file is on the disk, not only in the system's cache, when this returns.
    """
    tensors = sorted(tensors, key=lambda t: -t.dtype.itemsize)  # keeps all aligned
    header: dict[str, Any] = {"__metadata__": metadata or {}}
    end = 0
    for tensor in tensors:
        if tensor.name in header:
            raise CheckpointError(
                f"{path}: two tensors have the name {tensor.name!r}; give a parameter or "
                "module another name"
            )
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": FORMAT_NAMES[dtype_name(tensor.dtype)],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def data() -> Iterator[memoryview]:
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for a, b in tensor.pieces():
                piece = tensor.read(a, b).contiguous()  # `view` keeps no memory alive
                yield view(piece)

    length = checksum = 0
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            for chunk in data():
                for a in range(0, len(chunk), BLOCK):
                    block = chunk[a : a + BLOCK]
                    write_all(fd, block)
                    length, checksum = length + len(block), crc32(block, checksum)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    return length, checksum


def measure(path: Path) -> tuple[int, int]:
    """The length and the crc32 of a file."""
    length = checksum = 0
    block = memoryview(bytearray(BLOCK))
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
