"""Whole fp32 weights from a sharded checkpoint, and files that others read.

Both need no process group: a checkpoint is files. What is written has the
names, the layout and the index that Hugging Face's `from_pretrained` expects.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minizero.checkpoint.directory import (
    fsync_folder,
    read_index,
    replace_file,
)
from .manifest import SavedFlat, SavedSlot, parse_index
from .encoding import DTYPES
from .reader import SavedRun
from .tensor_file import CheckpointError, explained
from .tensor_writer import Source, TensorWriter

Folder = str | os.PathLike[str]

_WEIGHTS = re.compile(
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)


def open_run(folder: Folder, tag: str | None = None) -> SavedRun:
    """A checkpoint whose files have all been verified; close it after use."""
    raw, path = read_index(Path(folder), tag)
    run = SavedRun(path.parent, parse_index(raw, path))
    run.verify()
    return run


def weights(run: SavedRun, dtype: torch.dtype | None) -> dict[str, Source]:
    """Parameters and buffers by name, tied ones once; nothing is read yet.

    `dtype`: of all that is floating-point; None leaves each as it was saved.
    """
    found: dict[str, Source] = {}

    def add(
        name: str,
        saved: str,
        shape: list[int],
        read: Callable[[torch.dtype, int, int], Tensor],
    ) -> None:
        kind = DTYPES[saved]
        if dtype is not None and kind.is_floating_point:
            kind = dtype
        found[name] = Source(name, kind, tuple(shape), partial(read, kind))

    for flat in run.index.flats:
        for slot in flat.slots:
            read = partial(_parameter, run, flat, slot)
            add(slot.name, flat.dtype, slot.shape, read)
    for name, (saved, shape) in run.index.buffers.items():
        add(name, saved, shape, partial(_buffer, run, name))
    return found


def _parameter(
    run: SavedRun,
    flat: SavedFlat,
    slot: SavedSlot,
    dtype: torch.dtype,
    a: int,
    b: int,
) -> Tensor:
    out = torch.empty(b - a, dtype=dtype)
    run.read(flat, None, slot.offset + a, out)
    return out


def _buffer(run: SavedRun, name: str, dtype: torch.dtype, a: int, b: int) -> Tensor:
    out = torch.empty(b - a, dtype=dtype)
    return run.file(0).read(f"buffers/{name}", a, out)


def consolidate(folder: Folder, tag: str | None = None) -> dict[str, Tensor]:
    """The whole model, in fp32, as a plain torch model loads it.

    Master weights where there were any; frozen parameters and persistent
    buffers; tied parameters under each of their names, sharing memory. What
    is no floating-point number keeps its dtype. Modules' extra state, if any,
    is there too.
    """
    with open_run(folder, tag) as run:
        state = {
            name: source.read(0, source.numel).view(source.shape)
            for name, source in weights(run, torch.float32).items()
        }
        tied = {name: state[first] for name, first in run.index.tied.items()}
        return state | tied | run.own(0)["modules"]


def export(
    folder: Folder,
    out: Folder,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5_000_000_000,
) -> list[Path]:
    """Write the model as safetensors files, for Hugging Face and others.

    `out/model.safetensors` or, if there are more bytes than `max_shard_size`
    (a tensor that has more has a file of its own), `model-00001-of-0000N
    .safetensors` and so on, and `model.safetensors.index.json`. A tied
    parameter is written once. No tensor is whole in memory.

    `dtype`: of all floating-point numbers (default: as they were saved).
    Returns the files. Refuses a folder that has weights already.
    """
    if not (isinstance(max_shard_size, int) and max_shard_size >= 1):
        raise CheckpointError(
            f"max_shard_size is a number of bytes, at least 1, not {max_shard_size!r}"
        )
    if dtype is not None and not dtype.is_floating_point:
        raise CheckpointError(
            f"weights are exported in a floating-point dtype, not {dtype}"
        )
    where = Path(out)
    _check_empty(where)
    with open_run(folder, tag) as run:
        sources = list(weights(run, dtype).values())
        sources.sort(key=lambda s: -s.dtype.itemsize)  # keeps all aligned
        parts = list(_parts(sources, max_shard_size))
        written: list[Path] = []
        try:
            for number, part in enumerate(parts, 1):
                path = where / _name(number, len(parts))
                _write(path, part)
                written.append(path)
            if len(parts) > 1:
                path = where / "model.safetensors.index.json"
                replace_file(path, _map(parts), "export")
                written.append(path)
            fsync_folder(where)
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise
    return written


def _check_empty(where: Path) -> None:
    try:
        where.mkdir(parents=True, exist_ok=True)
        found = sorted(p.name for p in where.iterdir())
    except OSError as error:
        raise explained(where, error) from error
    names = [name for name in found if _WEIGHTS.fullmatch(name)]
    if names:
        raise CheckpointError(
            f"{where}: it has weights already ({', '.join(names[:3])}), and "
            "a reader would mix them up; export to a folder without"
        )


def _parts(sources: list[Source], limit: int) -> Iterator[list[Source]]:
    part: list[Source] = []
    for source in sources:
        if part and sum(s.nbytes for s in part) + source.nbytes > limit:
            yield part
            part = []
        part.append(source)
    yield part


def _name(number: int, of: int) -> str:
    if of == 1:
        return "model.safetensors"
    return f"model-{number:05d}-of-{of:05d}.safetensors"


def _write(path: Path, sources: list[Source]) -> None:
    writer = TensorWriter(path, sources, {"format": "pt"})
    try:
        for source in sources:
            writer.write(source)
        writer.finish()
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        writer.close()


def _map(parts: list[list[Source]]) -> bytes:
    """The index that says in which file each tensor is."""
    facts: dict[str, Any] = {
        "metadata": {"total_size": sum(s.nbytes for p in parts for s in p)},
        "weight_map": {
            source.name: _name(number, len(parts))
            for number, part in enumerate(parts, 1)
            for source in part
        },
    }
    return json.dumps(facts, indent=2).encode()
