"""The files of a checkpoint: verified, and read from any element on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import Self

from .encoding import decode
from .manifest import Index, SavedFlat
from .resharding import pieces
from .tensor_file import CheckpointError, TensorFile, checksum


class SavedRun:
    """A checkpoint to be read: its index, and files as they are needed."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path, self.index = path, index
        self._files: dict[int, TensorFile] = {}

    def verify(self, first: int = 0, step: int = 1) -> None:
        """Compare every `step`th file with the length and crc32 it had."""
        for saved in self.index.files[first::step]:
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

    def file(self, number: int) -> TensorFile:
        """The file of a rank that saved."""
        if number not in self._files:
            name = self.index.files[number].name
            self._files[number] = TensorFile(self.path / name)
        return self._files[number]

    def tensor(self, name: str, number: int = 0) -> Tensor:
        """A whole tensor of one rank's file."""
        file = self.file(number)
        if name not in file.entries:
            raise CheckpointError(
                f"{file.path}: it has no tensor {name!r}, which the index refers to; "
                "save again"
            )
        return file.tensor(name)

    def read(self, flat: SavedFlat, state: str | None, start: int, out: Tensor) -> None:
        """Elements of a saved buffer from `start` on, whoever has the shard."""
        name, done = flat.tensor(state), 0
        for number, a, b in pieces(start, start + out.numel(), flat.size):
            file = self.file(number)
            entry = file.entries.get(name)
            if entry is None or entry.shape != (flat.size,):
                raise CheckpointError(
                    f"{file.path}: it has no tensor {name!r} of {flat.size:,} "
                    "elements; save again"
                )
            file.read(name, a, out[done : done + b - a])
            done += b - a

    def tree(self, tree: Any, number: int = 0) -> Any:
        """A value that `encode` has made a tree of; its tensors are in one file."""
        try:
            return decode(tree, lambda name: self.tensor(name, number))
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{self.path}: a saved value does not make sense ({error})"
            ) from error

    def own(self, number: int) -> dict[str, Any]:
        """What one rank has saved for itself."""
        trees = json.loads(bytes(self.tensor("own", number).tolist()))
        return {name: self.tree(tree, number) for name, tree in trees.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files.values():
            file.close()
