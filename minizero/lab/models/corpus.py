"""Text to train on: Python's own standard library, a file or a folder, as bytes."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SKIPPED = {"__pycache__", "site-packages", "dist-packages"}
SKIPPED |= {"test", "tests", "idle_test"}
"""Folders that are left out."""


class Corpus:
    """The bytes of a text, the last tenth held out.

    path: a file, or a folder, whose Python source is read without its tests; None for
        the folder of Python's standard library.

    train, valid: uint8 tensors, 90 % and 10 % of the bytes.
    As a string it says what was read. Raises OSError for a file that cannot be read,
    and ValueError for one without text.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        source, name = Path(path or sysconfig.get_path("stdlib")), str(path)
        if path is None:
            name = f"the standard library of Python {platform.python_version()}"
        files = _python(source) if source.is_dir() else [source]
        texts = [text for file in files if (text := file.read_bytes())]
        if not texts:
            raise ValueError(f"{name} has no text in it; give another file or folder.")
        data = bytearray().join(texts)
        cut = len(data) * 9 // 10
        every = torch.frombuffer(data, dtype=torch.uint8)
        self.train, self.valid = every[:cut], every[cut:]
        count = f"{len(texts):,} file{'s' * (len(texts) != 1)}"
        self._description = f"{name}: {len(data) / 1e6:,.1f} MB in {count}"

    def __str__(self) -> str:
        return self._description

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


def _python(folder: Path) -> Iterator[Path]:
    """The Python files below a folder, in the same order on every machine."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED)
        yield from (Path(parent, n) for n in sorted(names) if n.endswith(".py"))
