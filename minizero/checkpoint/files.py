"""One rank's file: tensors in the safetensors format, written in a stream, read by parts.

A checkpoint holds one such file for each rank. Python values, such as the state of a
scheduler, are in it as tensors of bytes, which `pack` makes and `unpack` reads.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from zlib_ng import zlib_ng as zlib  # the same crc32 as zlib's, several times as fast

from ..memory.bytes import host_empty, view

CHUNK = 1 << 24  # bytes of a tensor that are in host memory at once
BLOCK = (
    1 << 18
)  # bytes that stay in the processor's cache from the checksum to the write

# the dtypes that the safetensors format has, by torch's name and by the format's
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
DTYPES = {name: getattr(torch, name) for name in _NAMES}

_ADVICE = {
    errno.ENOSPC: "the disk is full; free space, or save elsewhere",
    errno.EDQUOT: "the disk quota is used up; free space, or save elsewhere",
    errno.ENOENT: "there is no such file; the checkpoint was moved in part, or the "
    "folder is not the same on every node",
    errno.EACCES: "no permission; choose a folder of your own",
    errno.EROFS: "the file system is read-only; save elsewhere",
    errno.EEXIST: "something has that name already; delete it, or choose another name",
    errno.EISDIR: "this is a folder, and a file is expected there",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
}


class CheckpointError(ValueError):
    """What is wrong with a checkpoint; the message names the file or the parameter."""


def explained(path: Path, error: OSError) -> CheckpointError:
    """An error of the system as a sentence that says what to do."""
    what = _ADVICE.get(error.errno or 0, error.strerror or str(error))
    return CheckpointError(f"{path}: {what}")


def dtype_name(dtype: torch.dtype) -> str:
    """The name that indexes and messages use: "float32"."""
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
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First and last (exclusive) element of each chunk."""
        step = CHUNK // self.dtype.itemsize
        for a in range(0, self.numel, step):
            yield a, min(a + step, self.numel)

    def copied(self) -> LazyTensor:
        """The same, read now: later changes do not show."""
        values = host_empty((self.numel,), self.dtype, "buffers")
        for a, b in self.pieces():
            values[a:b].copy_(self.read(a, b))
        return LazyTensor(self.name, self.dtype, self.shape, lambda a, b: values[a:b])


def write_all(fd: int, data: bytes | memoryview) -> None:
    """`os.write` may write less than it is given."""
    data = memoryview(data)
    while data:
        data = data[os.write(fd, data) :]


def write_tensors(
    path: Path, tensors: Sequence[LazyTensor], metadata: dict[str, str] | None = None
) -> tuple[int, int]:
    """Write a new safetensors file, a chunk at a time; its bytes and its crc32.

    The safetensors library writes tensors that are all in memory; these may be on disk.
    Wide dtypes come first, so that every tensor is aligned. The file is on the disk, not
    only in the system's cache, when this returns. Raises CheckpointError.
    """
    tensors = sorted(tensors, key=lambda t: -t.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for tensor in tensors:
        if tensor.name in header:
            raise CheckpointError(
                f"{path}: two tensors have the name {tensor.name!r}; give a parameter or "
                "module another name"
            )
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": _NAMES[dtype_name(tensor.dtype)],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    nbytes = crc32 = 0

    def put(data: bytes | memoryview) -> None:
        nonlocal nbytes, crc32
        for a in range(0, len(data), BLOCK):
            block = data[a : a + BLOCK]
            write_all(fd, block)
            nbytes, crc32 = nbytes + len(block), zlib.crc32(block, crc32)

    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            put(len(text).to_bytes(8, "little") + text)
            for tensor in tensors:
                for a, b in tensor.pieces():
                    piece = tensor.read(
                        a, b
                    ).contiguous()  # `view` keeps no memory alive
                    put(view(piece))
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise explained(path, error) from error
    return nbytes, crc32


def checksum(path: Path) -> tuple[int, int]:
    """Bytes and crc32 of a file. Raises CheckpointError."""
    nbytes = crc32 = 0
    block = memoryview(bytearray(BLOCK))
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(block):
                nbytes, crc32 = nbytes + count, zlib.crc32(block[:count], crc32)
    except OSError as error:
        raise explained(path, error) from error
    return nbytes, crc32


def pack(value: Any, name: str) -> Tensor:
    """A Python value as a tensor of bytes; `unpack` reads it and runs no code.

    It may consist of None, numbers, strings, bytes, lists, tuples, sets, dicts, Counter,
    OrderedDict and tensors. Raises CheckpointError for anything else, which only a
    pickle that runs code could bring back; `name` stands for the value in the message.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        unpack(packed)
    except (pickle.PickleError, AttributeError, TypeError, RecursionError) as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"a {found[1]}" if found else f"something else ({error})"
        raise CheckpointError(
            f"{name} holds {what}, which a checkpoint does not; save numbers, strings, "
            "lists, dicts and tensors (its state_dict(), its item() or tolist(), if it "
            "has one)"
        ) from error
    return packed


def unpack(packed: Tensor) -> Any:
    """The value that `pack` was given; its tensors are on the CPU."""
    file = io.BytesIO(bytes(view(packed)))
    return torch.load(file, map_location="cpu", weights_only=True)
