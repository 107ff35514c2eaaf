"""Text to train on: Python's own standard library, a file, or a folder, as bytes."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

LIMIT = 256_000_000
"""Most bytes that are read; what lies beyond is left out."""

SKIPPED = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
}
"""Folders of the standard library that are left out."""


class Corpus:
    """The bytes of a text, the last tenth held out.

    path: a file, a folder, whose text files are read in the order of their names, or
        None for the source of Python's standard library, without its tests. In a
        folder, hidden files and those with a zero byte in their first 8 KiB are
        skipped. At most :data:`LIMIT` bytes are read.

    train, valid: uint8 tensors, 90 % and 10 % of the bytes.
    description: what was read, in words.

    Raises OSError for a path that cannot be read, and ValueError for one without text.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        if path is None:
            folder = Path(sysconfig.get_path("stdlib"))
            every: Iterator[Path] = (
                file for file in _walk(folder, SKIPPED) if file.suffix == ".py"
            )
            name = f"the standard library of Python {platform.python_version()}"
        else:
            folder, name = Path(path), str(path)
            every = _walk(folder) if folder.is_dir() else iter([folder])
        data, files = bytearray(), 0
        for file in every:
            room = LIMIT - len(data)
            text = file.read_bytes()[:room] if room else b""
            if text and not (folder.is_dir() and b"\0" in text[:8192]):
                data += text
                files += 1
        if not data:
            raise ValueError(f"{name} has no text in it; give another file or folder.")
        cut = len(data) * 9 // 10
        whole = torch.frombuffer(data, dtype=torch.uint8)
        self.train, self.valid = whole[:cut], whole[cut:]
        amount = f"{len(data) / 1e6:,.1f} MB in {files:,} file{'s' * (files != 1)}"
        limited = ", cut at the limit" if len(data) == LIMIT else ""
        self.description = f"{name}: {amount}{limited}"

    def __str__(self) -> str:
        return self.description

    def batch(
        self,
        step: int,
        rank: int,
        world_size: int,
        batch: int,
        sequence: int,
        seed: int = 0,
        part: str = "train",
    ) -> tuple[Tensor, Tensor]:
        """This rank's rows of the global batch of one step.

        The `batch` sequences start at random places that depend on seed and step
        alone, so every world size trains on the same ones: row i goes to rank
        ``i // (batch / world_size)``.

        batch: sequences in the global batch, over all ranks.
        part: "train" or "valid".
        Returns x and y, each (batch / world_size, sequence) int64; y is x one byte
        later. Raises ValueError when the batch does not divide over the ranks or the
        text is too short for one sequence.
        """
        data = self.train if part == "train" else self.valid
        rows = rows_per_rank(batch, world_size)
        if len(data) <= sequence:
            raise ValueError(
                f"The {part} part of the text has {len(data):,} bytes, and a sequence "
                f"of {sequence:,} needs {sequence + 1:,}; give a longer text or a "
                "shorter sequence."
            )
        # hashed, because a sum of seed and step would repeat batches
        key = hashlib.blake2b(repr((seed, step, part)).encode(), digest_size=4)
        generator = torch.Generator().manual_seed(int.from_bytes(key.digest(), "big"))
        starts = torch.randint(len(data) - sequence, (batch,), generator=generator)
        mine = starts[rank * rows : (rank + 1) * rows]
        window = data[mine[:, None] + torch.arange(sequence + 1)].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def rows_per_rank(batch: int, world_size: int) -> int:
    """Rows of a global batch that each rank takes; ValueError if they are uneven."""
    if batch < world_size:
        raise ValueError(
            f"The batch has {batch} sequences for {world_size} ranks; give each rank "
            f"at least one, with a batch of {world_size} or a multiple of it."
        )
    if batch % world_size:
        raise ValueError(
            f"A batch of {batch} sequences does not divide over {world_size} ranks; "
            f"make it {batch - batch % world_size} or "
            f"{batch - batch % world_size + world_size}."
        )
    return batch // world_size


def _walk(folder: Path, skipped: Iterable[str] = ()) -> Iterator[Path]:
    """Regular files below a folder, by name, in the same order on every machine."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(
            f for f in folders if f not in skipped and not f.startswith(".")
        )
        for name in sorted(names):
            file = Path(parent, name)
            if not name.startswith(".") and file.is_file():
                yield file
