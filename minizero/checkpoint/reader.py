"""The files of a checkpoint: verified, and read from any element on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from .encoding import DTYPES, decode
from .manifest import Index, SavedFlat
from .resharding import pieces
from .tensor_file import CheckpointError, TensorFile, checksum


class SavedRun:
    """A checkpoint to be read: its index, and files as they are needed."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path, self.index = path, index
        self._said, self._files = index.said(), dict[int, TensorFile]()

    def verify(self, first: int = 0, step: int = 1) -> None:
        """Compare every `step`th file with the length and crc32 it had."""
        for number, saved in enumerate(self.index.files):
            if number % step != first:
                continue
            path = self.path / saved.name
            nbytes, crc32 = checksum(path)
            if nbytes != saved.bytes:
                raise CheckpointError(
                    f"{path}: it has {nbytes:,} bytes, and {saved.bytes:,} were saved; "
                    "it was truncated or replaced"
                )
            if crc32 != saved.crc32:
                raise CheckpointError(
                    f"{path}: its checksum is {crc32:08x}, and was {saved.crc32:08x} "
                    "when it was saved; the disk or a program has changed it"
                )
            self.file(number)

    def file(self, number: int) -> TensorFile:
        """The file of a rank that saved; its header fits the index."""
        if number not in self._files:
            file = TensorFile(self.path / self.index.files[number].name)
            self._files[number] = file
            self._compare(file)
        return self._files[number]

    def _compare(self, file: TensorFile) -> None:
        for name, dtype, shape in self.index.tensors():
            entry = file.entries.get(name)
            if not entry or (entry.dtype, entry.shape) != (DTYPES[dtype], (*shape,)):
                raise CheckpointError(
                    f"{file.path}: it has no tensor {name!r} of {dtype}, {shape}, as "
                    "the index says; save again"
                )
        if not file.sealed_for(f"{file.path.name} {self._said}"):
            raise CheckpointError(
                f"{file.path}: its header is not of this rank and this index; one of "
                "the two was changed, or belongs to another save"
            )

    def read(self, flat: SavedFlat, what: str, start: int, out: Tensor) -> None:
        """Elements of a saved buffer from `start` on, whoever has the shard."""
        name, done = flat.named(what), 0
        for shard, a, b in pieces(start, start + out.numel(), flat.size):
            self.file(self.index.saver(shard)).read(name, a, out[done : done + b - a])
            done += b - a

    def open(self, flat: SavedFlat, start: int, count: int) -> None:
        """Have the files that so many elements are in compared with the index."""
        for shard, *_ in pieces(start, start + count, flat.size):
            self.file(self.index.saver(shard))

    def tensor(self, name: str, number: int = 0) -> Tensor:
        """A whole tensor of one rank's file."""
        file = self.file(number)
        if name not in file.entries:
            raise CheckpointError(f"{file.path}: it has no tensor {name!r}; save again")
        return file.tensor(name)

    def tree(self, tree: Any, number: int = 0) -> Any:
        """A value that `encode` has made a tree of; its tensors are in one file.

        The tree may be JSON text, as a tensor of bytes.
        """
        try:
            if isinstance(tree, Tensor):
                tree = json.loads(bytes(tree.tolist()))
            return decode(tree, lambda name: self.tensor(name, number))
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as e:
            raise CheckpointError(
                f"{self.path}: a saved value does not make sense ({e}); save again"
            ) from e

    def own(self, number: int) -> Any:
        """What one rank has saved for itself."""
        return self.tree(self.tensor("own", number), number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files.values():
            file.close()
