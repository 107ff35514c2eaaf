"""Tensors into a new file, chunk by chunk; they need not be in memory."""

from __future__ import annotations

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

from minizero.checkpoint.tensor_file import (
    CHUNK,
    CheckpointError,
    explained,
    format_name,
)

from ..memory.bytes import view
from .encoding import dtype_name


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
        # a lazily conjugated or negated tensor has other bytes than values
        plain = tensor.detach().resolve_conj().resolve_neg()
        flat = plain.reshape(-1)
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

    `nbytes`, `crc32`: of what has been written. Raises CheckpointError; a
    file that has not got its header is none.
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
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        end = 0
        for source in sources:
            if source.name in header or source.name == "__metadata__":
                raise CheckpointError(
                    f"{path}: two tensors of the name {source.name!r} cannot "
                    "be in one file; give a parameter or module another name"
                )
            start, end = end, end + source.nbytes
            header[source.name] = {
                "dtype": format_name(dtype_name(source.dtype)),
                "shape": source.shape,
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
