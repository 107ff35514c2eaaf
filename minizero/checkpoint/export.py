"""Full fp32 weights from a sharded checkpoint, and files that others read.

Neither needs ranks: a checkpoint is files. What is written has the names, the layout and
the index that Hugging Face's `from_pretrained` expects.
"""

from __future__ import annotations

import json
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import CheckpointError, LazyTensor, write_tensors
from .folder import Folder, find, replace_file
from .layout import SavedFlat
from .load import SavedRun


def open_run(folder: Folder, tag: str | None = None) -> SavedRun:
    """A checkpoint whose files have all been verified."""
    _, path = find(Path(folder), tag)
    run = SavedRun(path.parent, path.read_bytes())
    run.verify()
    return run


def read_extra(folder: Folder, tag: str | None = None) -> dict[str, Any]:
    """The `extra` that was given to `save`."""
    extra: dict[str, Any] = open_run(folder, tag).values("extra")
    return extra


def _weights(run: SavedRun, dtype: torch.dtype | None) -> list[LazyTensor]:
    """Parameters, under all their names, and buffers; nothing is read yet.

    dtype: of all that is floating-point; None leaves each as it was saved.
    """

    def chosen(kind: torch.dtype) -> torch.dtype:
        return dtype if dtype is not None and kind.is_floating_point else kind

    def part(flat: SavedFlat, start: int, kind: torch.dtype, a: int, b: int) -> Tensor:
        out = torch.empty(b - a, dtype=kind)
        for i, values in run.read(flat, "parameters", start + a, start + b):
            out[i : i + len(values)].copy_(values)
        return out

    found = []
    for flat in run.index.flats:
        kind = chosen(getattr(torch, flat.dtypes["parameters"]))
        for slot in flat.slots:
            read = partial(part, flat, slot.offset, kind)
            shape = tuple(slot.shape)
            found += [LazyTensor(name, kind, shape, read) for name in slot.names]
    for name in run.file(0).keys():
        if name.startswith("buffers/"):
            buffer = run.tensor(name)
            buffer = buffer.to(chosen(buffer.dtype))
            found.append(LazyTensor.of(name.removeprefix("buffers/"), buffer))
    return found


def consolidate(folder: Folder, tag: str | None = None) -> dict[str, Tensor]:
    """The whole model in fp32, as a plain torch model loads it.

    Masters where there were any; frozen parameters and persistent buffers; tied
    parameters under each of their names, sharing memory. What is not floating-point
    keeps its dtype. Modules' extra state, if any, is there too.
    """
    run = open_run(folder, tag)
    state: dict[str, Any] = {}
    for lazy in _weights(run, torch.float32):
        state[lazy.name] = lazy.read(0, prod(lazy.shape)).view(lazy.shape)
    for slot in (slot for flat in run.index.flats for slot in flat.slots):
        state |= dict.fromkeys(slot.names, state[slot.names[0]])
    return state | run.values("modules")


def export(
    folder: Folder,
    out: Folder,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5_000_000_000,
) -> list[Path]:
    """Write the model as safetensors files, for Hugging Face and others.

    `out/model.safetensors` or, if there are more bytes than `max_shard_size` (a tensor
    that has more has a file of its own), `model-00001-of-0000N.safetensors` and so on,
    and `model.safetensors.index.json`. A tied parameter is written under each of its
    names, so that the files load into a plain torch model too. No tensor is whole in
    memory.

    dtype: of all floating-point numbers (default: as they were saved). Returns the
    files. Refuses a folder that has weights already.
    """
    if not (isinstance(max_shard_size, int) and max_shard_size >= 1):
        raise CheckpointError(
            f"max_shard_size is a number of bytes, at least 1, not {max_shard_size!r}"
        )
    where = Path(out)
    where.mkdir(parents=True, exist_ok=True)
    there = sorted(
        p.name for p in where.iterdir() if p.suffix in (".safetensors", ".bin")
    )
    if there:
        raise CheckpointError(
            f"{where}: it has weights already ({', '.join(there[:3])}), and a reader "
            "would mix them up; export to a folder without"
        )
    tensors = _weights(open_run(folder, tag), dtype)
    parts: list[list[LazyTensor]] = [[]]
    for tensor in tensors:
        size = sum(t.nbytes for t in parts[-1]) + tensor.nbytes
        if parts[-1] and size > max_shard_size:
            parts.append([])
        parts[-1].append(tensor)
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}" for i in range(len(parts))]
    if len(parts) == 1:
        names = ["model"]
    files = {where / f"{n}.safetensors": p for n, p in zip(names, parts, strict=True)}
    for path, part in files.items():
        write_tensors(path, part, {"format": "pt"})
    if len(parts) == 1:
        return [*files]
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors)},
        "weight_map": {t.name: path.name for path, ts in files.items() for t in ts},
    }
    last = where / "model.safetensors.index.json"
    replace_file(last, json.dumps(index, indent=2).encode())
    return [*files, last]
