"""Full fp32 weights from a sharded checkpoint, and files that others read.

Neither needs ranks: a checkpoint is files. What is written has the names, the layout and
the index that Hugging Face's `from_pretrained` expects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .commit import replace_file
from .files import CheckpointError, LazyTensor, write_tensors
from .layout import Folder, find
from .load import SavedRun


def open_run(folder: Folder, tag: str | None = None) -> SavedRun:
    """A checkpoint whose files have all been verified."""
    name, raw = find(Path(folder), tag)
    run = SavedRun(Path(folder, name), raw)
    run.verify()
    return run


def read_extra(folder: Folder, tag: str | None = None) -> dict[str, Any]:
    """The `extra` that was given to `save`."""
    return open_run(folder, tag).values("extra")


def _weights(
    run: SavedRun, dtype: torch.dtype | None
) -> Iterator[tuple[list[str], LazyTensor]]:
    """Each parameter and buffer, which is not read yet, and all its names."""
    for flat in run.index.flats:
        for slot in flat.slots:
            where = flat, "parameters", slot.offset, slot.shape
            yield slot.names, run.lazy(slot.names[0], *where).to(dtype)
    file = run.file(0)
    for key in (key for key in file.keys() if key.startswith("buffers/")):
        name = key.removeprefix("buffers/")
        yield [name], LazyTensor.of(name, file.get_tensor(key)).to(dtype)


def consolidate(folder: Folder, tag: str | None = None) -> dict[str, Tensor]:
    """The whole model in fp32, as a plain torch model loads it.

    Masters where there were any; frozen parameters and persistent buffers; tied
    parameters under each of their names, sharing memory. What is not floating-point
    keeps its dtype. Modules' extra state, if any, is there too.
    """
    run = open_run(folder, tag)
    state: dict[str, Tensor] = {}
    for names, lazy in _weights(run, torch.float32):
        state |= dict.fromkeys(names, lazy.tensor())
    return state | run.values("modules")


def export(
    folder: Folder,
    out: Folder,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5_000_000_000,
) -> list[Path]:
    """Write the model as safetensors files, for Hugging Face and others; the files.

    There is one, `model.safetensors`, or there are several of at most `max_shard_size`
    bytes (or of one larger tensor), and their index. A tied parameter has each of its
    names, so that the files load into a plain torch model too. No tensor is in memory
    in full.

    dtype: of all floating-point numbers (default: as they were saved).
    """
    if not (isinstance(max_shard_size, int) and max_shard_size >= 1):
        raise CheckpointError(
            f"max_shard_size is a number of bytes, at least 1, not {max_shard_size!r}"
        )
    where = Path(out)
    where.mkdir(parents=True, exist_ok=True)
    if any(where.glob("*.safetensors")) or any(where.glob("*.bin")):
        raise CheckpointError(f"{where}: it has weights already; take another folder")
    weights = _weights(open_run(folder, tag), dtype)
    tensors = [replace(lazy, name=name) for names, lazy in weights for name in names]
    parts: list[list[LazyTensor]] = [[]]
    for tensor in tensors:
        size = sum(t.nbytes for t in parts[-1]) + tensor.nbytes
        if parts[-1] and size > max_shard_size:
            parts.append([])
        parts[-1].append(tensor)
    weight_map, written = dict[str, str](), list[Path]()
    for i, part in enumerate(parts, 1):
        number = f"-{i:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        written.append(where / f"model{number}.safetensors")
        write_tensors(written[-1], part)
        weight_map |= {tensor.name: written[-1].name for tensor in part}
    if len(parts) > 1:
        total = {"total_size": sum(tensor.nbytes for tensor in tensors)}
        index = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2)
        written.append(where / "model.safetensors.index.json")
        replace_file(written[-1], index.encode())
    return written
