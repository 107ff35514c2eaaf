"""Whole fp32 weights from a sharded checkpoint, and files that others read.

Both need no process group: a checkpoint is files. What is written has the names, the
layout and the index that Hugging Face's `from_pretrained` expects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .directory import Folder, fsync_folder, read_index, replace_file
from .encoding import DTYPES
from .manifest import SavedFlat, SavedSlot, parse_index
from .reader import SavedRun
from .tensor_file import CheckpointError, LazyTensor, TensorWriter, explained

_WEIGHTS = re.compile(
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)


def open_run(folder: Folder, tag: str | None = None) -> SavedRun:
    """A checkpoint whose files have all been verified; close it after use."""
    raw, path = read_index(Path(folder), tag)
    run = SavedRun(path.parent, parse_index(raw, path))
    run.verify()
    return run


def weights(run: SavedRun, dtype: torch.dtype | None) -> list[LazyTensor]:
    """Parameters and buffers, tied ones once; nothing is read yet.

    `dtype`: of all that is floating-point; None leaves each as it was saved.
    """

    def lazy(
        name: str, saved: str, shape: list[int], read: Callable[[int, Tensor], object]
    ) -> LazyTensor:
        kind = DTYPES[saved]
        if dtype is not None and kind.is_floating_point:
            kind = dtype

        def part(a: int, b: int) -> Tensor:
            out = torch.empty(b - a, dtype=kind)
            read(a, out)
            return out

        return LazyTensor(name, kind, tuple(shape), part)

    def parameter(flat: SavedFlat, slot: SavedSlot, a: int, out: Tensor) -> None:
        run.read(flat, "parameters", slot.offset + a, out)

    found = [
        lazy(slot.name, flat.dtype, slot.shape, partial(parameter, flat, slot))
        for flat in run.index.flats
        for slot in flat.slots
    ]
    for name, buffer in run.index.buffers.items():
        read = partial(run.file(0).read, f"buffers/{name}")
        found.append(lazy(name, buffer.dtype, buffer.shape, read))
    return found


def consolidate(folder: Folder, tag: str | None = None) -> dict[str, Tensor]:
    """The whole model, in fp32, as a plain torch model loads it.

    Master weights where there were any; frozen parameters and persistent buffers; tied
    parameters under each of their names, sharing memory. What is no floating-point
    number keeps its dtype. Modules' extra state, if any, is there too.
    """
    with open_run(folder, tag) as run:
        state = {
            lazy.name: lazy.read(0, lazy.numel).view(lazy.shape)
            for lazy in weights(run, torch.float32)
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

    `out/model.safetensors` or, if there are more bytes than `max_shard_size` (a tensor
    that has more has a file of its own), `model-00001-of-0000N.safetensors` and so on,
    and `model.safetensors.index.json`. A tied parameter is written once. No tensor is
    whole in memory.

    `dtype`: of all floating-point numbers (default: as they were saved). Returns the
    files. Refuses a folder that has weights already.
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
        tensors = weights(run, dtype)
        tensors.sort(key=lambda t: -t.dtype.itemsize)  # keeps all aligned
        parts = list(_parts(tensors, max_shard_size))
        names = [f"model-{i + 1:05d}-of-{len(parts):05d}" for i in range(len(parts))]
        paths = [where / f"{name}.safetensors" for name in names]
        if len(parts) == 1:
            paths = [where / "model.safetensors"]
        written: list[Path] = []
        try:
            for path, part in zip(paths, parts, strict=True):
                with closing(TensorWriter(path, part, {"format": "pt"})) as writer:
                    written.append(path)
                    for tensor in part:
                        writer.write(tensor)
                    writer.finish()
            if len(parts) > 1:
                index = where / "model.safetensors.index.json"
                replace_file(index, _index(paths, parts))
                written.append(index)
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
            f"{where}: it has weights already ({', '.join(names[:3])}), and a reader "
            "would mix them up; export to a folder without"
        )


def _parts(tensors: list[LazyTensor], limit: int) -> Iterator[list[LazyTensor]]:
    part: list[LazyTensor] = []
    for tensor in tensors:
        if part and sum(t.nbytes for t in part) + tensor.nbytes > limit:
            yield part
            part = []
        part.append(tensor)
    yield part


def _index(paths: list[Path], parts: list[list[LazyTensor]]) -> bytes:
    """The index that says in which file each tensor is."""
    files = zip(paths, parts, strict=True)
    facts = {
        "metadata": {"total_size": sum(t.nbytes for part in parts for t in part)},
        "weight_map": {t.name: path.name for path, part in files for t in part},
    }
    return json.dumps(facts, indent=2).encode()
