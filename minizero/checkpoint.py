"""Sharded checkpoints: saved by all ranks, loaded by any number of them.

saving = save(net, "checkpoints", "step-100", extra={"step": 100})
loaded = load(net, "checkpoints")          # loaded.extra["step"] == 100
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from . import comm
from .agree import agreeing, broadcast_bytes
from .content import (
    flats_of,
    group_options,
    module_state,
    random_states,
    row_sources,
    saved_flat,
    settle,
    tied_names,
)
from .ddp import DataParallel
from .folder import checkpoints, is_tag, read_index
from .index import INDEX, Index, SavedFlat, parse_index
from .launch import rank, world_size
from .loading import Fit, Loaded
from .plain import dtype_name, encode
from .reading import SavedRun
from .saving import Saving
from .tensorfile import CheckpointError, Source, explained

Folder = str | os.PathLike[str]

# the last save of each net
_saves: WeakKeyDictionary[DataParallel, Saving] = WeakKeyDictionary()


def save(
    net: DataParallel,
    folder: Folder,
    tag: str,
    *,
    extra: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    keep: int | None = None,
    background: int = 0,
    latest: bool = True,
) -> Saving:
    """Save a training run as `folder/tag`; every rank calls it.

    Each rank writes the row that has its number: master weights (or, where
    there are none, the parameters), optimizer states, its random states.
    Nothing is gathered. Gradients are not saved: call it after `step`.

    `extra`: what else a resumed run needs, such as a scheduler's state:
        rank 0's is kept. `own`: likewise, each rank's (`plain.encode` says
        what they may hold).
    `keep`: delete all but the last so many checkpoints in the folder.
    `background`: up to so many bytes of this rank are copied to host memory
        and written while training goes on; the rest is written before this
        returns. 0 writes everything now. A save that is still under way is
        waited for first.
    `latest`: whether `load` without a tag shall find this one.

    Raises CheckpointError on all ranks if any cannot write; the checkpoints
    that were there before are then as they were. In the background the next
    `save`, or `wait()` of what is returned, raises it.
    """
    with comm.phase("checkpoint"):
        finish(net)
        settle(net)
        with agreeing():
            _check(tag, keep, background)
            index, sources = _describe(net, tag, extra, own)
        where = Path(folder)
        begun: dict[str, Any] = {}
        with agreeing():
            if rank() == 0:
                begun = _begin(where, tag)
        begun["options"] = [tag, keep, background > 0, latest]
        agreed = json.loads(broadcast_bytes(json.dumps(begun).encode()))
        with agreeing():
            if agreed["options"] != begun["options"]:
                raise CheckpointError(
                    f"{where / tag}: rank {rank()} saves with tag, keep, "
                    f"background, latest = {begun['options']}, and rank 0 "
                    f"with {agreed['options']}; pass the same on all ranks"
                )
            _make_folder(where / tag)
        index.number = agreed["number"]
        saving = Saving(where, index, agreed["nonce"], keep, latest)
        _saves[net] = saving
        saving.begin(sources, background)
        if not background:
            saving.wait()
        return saving


def finish(net: DataParallel) -> None:
    """Wait for the save that is under way, if one is; raises its error."""
    before = _saves.pop(net, None)
    if before is not None:
        before.wait()


def _check(tag: str, keep: int | None, background: int) -> None:
    if not is_tag(tag):
        raise CheckpointError(
            f"the tag {tag!r} cannot name a folder beside `latest`; take one "
            "such as 'step-100', without slashes"
        )
    if keep is not None and keep < 1:
        raise CheckpointError(
            f"keep must be at least 1, or None for all, not {keep!r}"
        )
    if background < 0:
        raise CheckpointError(
            f"background is a number of bytes, 0 or more, not {background!r}"
        )


def _begin(folder: Path, tag: str) -> dict[str, Any]:
    """Rank 0's part: which save this is."""
    _make_folder(folder / tag)
    numbers = [index.number for _, index in checkpoints(folder)]
    return {
        "nonce": secrets.token_hex(4),
        "number": max(numbers, default=0) + 1,
    }


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explained(path, error) from error


def _describe(
    net: DataParallel,
    tag: str,
    extra: dict[str, Any] | None,
    own: dict[str, Any] | None,
) -> tuple[Index, list[Source]]:
    """The index, but for its files, and what this rank has to write."""
    flats: list[SavedFlat] = []
    sources: list[Source] = []
    for unit, number, flat in flats_of(net):
        saved = saved_flat(net, unit, number, flat)
        flats.append(saved)
        sources += row_sources(net, flat, saved)
    state = module_state(net)
    buffers = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    sources += [Source.of(f"buffers/{k}", v) for k, v in buffers.items()]
    trees: dict[str, Any] = {}
    for name, value in {
        "extra": {} if extra is None else extra,
        "own": {} if own is None else own,
        "random": random_states(),
        "modules": {k: v for k, v in state.items() if k not in buffers},
        "groups": group_options(net),
        "precision": net.precision.state_dict(),
    }.items():
        trees[name], tensors = encode(value, name)
        if rank() == 0 or name in ("own", "random", "modules"):
            sources += [Source.of(k, v) for k, v in tensors.items()]
    ours = {name: trees[name] for name in ("own", "random", "modules")}
    text = bytearray(json.dumps(ours).encode())
    sources.append(
        Source.of("own", torch.frombuffer(text, dtype=torch.uint8))
    )
    # wide ones first keeps all aligned
    sources.sort(key=lambda s: (not s.on_disk, -s.dtype.itemsize))
    index = Index(
        tag=tag,
        number=0,
        world_size=world_size(),
        flats=flats,
        tied=tied_names(net),
        buffers={
            k: [dtype_name(v.dtype), list(v.shape)]
            for k, v in buffers.items()
        },
        optimizer=type(net.optimizer).__name__,
        groups=trees["groups"],
        precision=trees["precision"],
        extra=trees["extra"],
    )
    return index, sources


def load(
    net: DataParallel,
    folder: Folder,
    tag: str | None = None,
    *,
    strict: bool = True,
    optimizer: bool = True,
) -> Loaded:
    """Load a checkpoint into a net of any plan, on any number of ranks.

    Every rank reads just what becomes its own, piece by piece. Before
    anything is changed all files are verified, and compared with the net.

    `tag`: default: what `latest` names, or the newest if there is no such
        file. `strict`: whether parameters and buffers must have the same
        names. `optimizer`: whether to load optimizer states, options and
        loss scale, and random states (on as many ranks as saved), too.

    Gradients are zero afterwards. Raises CheckpointError on all ranks, in
    the same words, which name the file or the parameter; the net is then as
    it was.
    """
    with comm.phase("checkpoint"):
        finish(net)
        where, found = Path(folder), b"-"
        with agreeing():
            if rank() == 0:
                found, path = read_index(where, tag)
                found = path.parent.name.encode() + b"\n" + found
        name, _, text = broadcast_bytes(found).partition(b"\n")
        path = where / name.decode() / INDEX
        settle(net)
        with agreeing():
            run = SavedRun(path.parent, parse_index(text, path))
        with run:
            with agreeing():
                run.verify(rank(), world_size())
            with agreeing():
                fit = Fit(net, run, strict, optimizer)
            with agreeing():
                fit.apply()
            fit.publish()
            return fit.loaded()
