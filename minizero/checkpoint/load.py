"""Load a checkpoint into a net of any plan, on any number of ranks.

loaded = load(net, "checkpoints")          # loaded.extra["step"] == 100
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .. import comm
from ..memory.labels import label_states
from ..ranks.launch import rank, world_size
from ..zero import DataParallel, Flat
from .files import (
    CHUNK,
    DTYPES,
    CheckpointError,
    checksum,
    dtype_name,
    unpack,
)
from .folder import Folder, find
from .layout import INDEX, Index, Place, SavedFlat, pieces, places
from .save import agreed, buffers_of, exchange, finish, generators, names_of


@dataclass
class Loaded:
    """What `load` returns; `own` is None on another number of ranks than saved."""

    path: Path
    tag: str
    extra: dict[str, Any]
    own: dict[str, Any] | None


def load(
    net: DataParallel,
    folder: Folder,
    tag: str | None = None,
    *,
    strict: bool = True,
    optimizer: bool = True,
    check: Callable[[Loaded], None] | None = None,
) -> Loaded:
    """Load a checkpoint into a net; every rank calls it.

    Each rank reads what becomes its own, piece by piece. Before the net is changed, all
    files are verified, and the checkpoint is compared with the net.

    tag: default: what `latest` names, or the newest if there is no such file.
    strict: whether parameters and buffers must have the same names.
    optimizer: whether to load optimizer states and options, the loss scale and (on as
        many ranks as saved) random states, too.
    check: called with what will be returned before the net is changed; an error that it
        raises refuses the checkpoint on all ranks.

    Gradients from before are dropped. Raises CheckpointError on all ranks, in the same
    words, which name the file or the parameter; the net is then unchanged, unless a disk
    fails after its files were verified.
    """
    finish()
    with comm.phase("checkpoint"):
        net.synchronize()
        net.storage.wait_for_copies()
        with agreed():
            mine = find(Path(folder), tag) if rank() == 0 else None
        tag, name, raw = exchange(mine)[0]
        with agreed():
            run = SavedRun(tag, Path(folder, name), raw)
            run.verify(rank(), world_size())
        with agreed():
            found = match(net, run, strict, optimizer)
            same_ranks = len(run.index.files) == world_size()
            own = run.values("own", rank()) if same_ranks else None
            loaded = Loaded(run.path, tag, run.values("extra"), own)
            if check is not None:
                check(loaded)
        with agreed():
            fill(net, run, found)
            fill_modules(net, run, rank() if same_ranks else 0)
            if optimizer:
                fill_optimizer(net, run, found)
        net.shards_written()
        if optimizer and same_ranks:
            states = run.values("random", rank())
            for name, (_, set_state) in generators().items():
                if name in states:
                    set_state(states[name])
        return loaded


class SavedRun:
    """A checkpoint's files, opened as they are needed.

    Verify them first: they are mapped into memory, where a file that is too short ends
    the process.
    """

    def __init__(self, tag: str, path: Path, raw: bytes) -> None:
        self.tag, self.path = tag, path
        self.index = Index.loads(raw, path / INDEX)
        self._files: dict[int, Any] = {}

    def verify(self, first: int = 0, step: int = 1) -> None:
        """Compare every `step`th file with the length and checksum that it had."""
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

    def file(self, number: int) -> Any:
        """The file of a rank, open."""
        if number not in self._files:
            path = self.path / self.index.files[number].name
            self._files[number] = safe_open(path, "pt")
        return self._files[number]

    def read(
        self, flat: SavedFlat, what: str, a: int, b: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Elements a to b of a saved buffer, as (offset from a, values): a piece at a
        time, each valid while the run is open."""
        done = 0
        ranks = len(self.index.files)
        for shard, i, j in pieces(a, b, flat.size):
            saved = self.file(flat.saver(shard, ranks)).get_slice(f"{flat.key}/{what}")
            step = CHUNK // DTYPES[flat.dtypes[what]].itemsize
            for k in range(i, j, step):
                values = saved[k : min(k + step, j)]
                yield done, values
                done += len(values)

    def buffer(self, name: str, number: int = 0) -> Tensor:
        """A module's buffer, from the file of a rank."""
        return self.file(number).get_tensor(f"buffers/{name}")

    def values(self, name: str, number: int = 0) -> Any:
        """What `save` has packed under a name; `extra` and others are rank 0's alone."""
        try:
            return unpack(self.file(number).get_tensor(f"values/{name}"))
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from error


# ---- compare


def match(
    net: DataParallel, run: SavedRun, strict: bool, optimizer: bool
) -> dict[str, Place]:
    """Which saved buffer has each parameter of a net, by the slot's name.

    Raises CheckpointError, with all that does not fit.
    """
    index, problems = run.index, list[str]()

    def compare(what: str, here: Tensor, shape: Iterable[int], dtype: str) -> None:
        if tuple(here.shape) != tuple(shape):
            problems.append(
                f"{what} has shape {tuple(here.shape)} here and {tuple(shape)} in the "
                "checkpoint"
            )
        # dtypes may differ in precision, not in kind
        there = DTYPES[dtype]
        same = here.dtype.is_floating_point == there.is_floating_point
        if not same or here.dtype.is_complex != there.is_complex:
            problems.append(
                f"{what} is {dtype_name(here.dtype)} here and {dtype} in the checkpoint"
            )

    def compare_names(kind: str, here: Iterable[str], there: Iterable[str]) -> None:
        for names, where in (
            ({*here} - {*there}, "is not in the checkpoint"),
            ({*there} - {*here}, "of the checkpoint is not in the model"),
        ):
            listed = sorted(names) if strict else []
            problems.extend(f"{kind} {name!r} {where}" for name in listed[:5])
            if listed[5:]:
                problems.append(f"the same of {len(listed) - 5} more")

    saved = {n: (f, slot) for f in index.flats for slot in f.slots for n in slot.names}
    names, found = names_of(net.model), {}
    compare_names("parameter", sum(names.values(), []), saved)
    for flat in (flat for unit in net.units for flat in unit.flats):
        for slot in flat.slots:
            known = [n for n in names[slot.parameter] if n in saved]
            if known:
                found[slot.name] = place = saved[known[0]]
                what, dtype = f"parameter {known[0]!r}", place[0].dtypes["parameters"]
                compare(what, slot.parameter, place[1].shape, dtype)
            if any(saved[n][1] is not place[1] for n in known):
                problems.append(
                    f"{' and '.join(map(repr, known))} are one parameter here, and not "
                    "in the checkpoint"
                )
    buffers = buffers_of(net.model)
    compare_names("buffer", buffers, index.buffers)
    for name in buffers.keys() & index.buffers.keys():
        compare(f"buffer {name!r}", buffers[name], *reversed(index.buffers[name]))
    if optimizer:
        problems += _match_optimizer(net, run, found)
    if problems:
        raise CheckpointError(
            f"{run.path}: this checkpoint does not fit: {'; '.join(problems)}"
        )
    return found


def _match_optimizer(
    net: DataParallel, run: SavedRun, found: dict[str, Place]
) -> Iterator[str]:
    """What does not fit of the optimizer, in sentences."""
    mine, index, scalars = net.optimizer, run.index, run.values("scalars")
    if type(mine).__name__ != index.optimizer:
        yield f"the optimizer is {type(mine).__name__} here and was {index.optimizer}"
    if len(mine.param_groups) != index.groups:
        yield (
            f"the optimizer has {len(mine.param_groups)} groups here and had "
            f"{index.groups}"
        )
    for flat in (flat for unit in net.units for flat in unit.trainable):
        states = set()
        for slot in flat.slots:
            if slot.name not in found or not slot.numel:
                continue
            saved = found[slot.name][0]
            states.add((*saved.dtypes, str(scalars[saved.key])))
            if saved.group is None:
                yield (
                    f"parameter {slot.name!r} is trained here and was frozen, so it has "
                    "no optimizer state; load with optimizer=False (of an engine: "
                    "load_optimizer_states=False)"
                )
            elif saved.group != flat.group:
                yield (
                    f"parameter {slot.name!r} is in group {flat.group} of the optimizer "
                    f"here and was in group {saved.group}"
                )
        if len(states) > 1:
            yield (
                f"the parameters {', '.join(repr(s.name) for s in flat.slots[:3])}... "
                "share a buffer here, and have made different steps; keep the `units` "
                "of the saved run"
            )


# ---- read


def fill(net: DataParallel, run: SavedRun, found: dict[str, Place]) -> None:
    """Read this rank's part of every flat buffer into the master and the shard."""
    for flat in (flat for unit in net.units for flat in unit.flats):
        if flat.trainable:
            same = flat.master is flat.shard
            tensors = [flat.master] if same else [flat.master, flat.shard]
        elif net.plan.parameters.sharded:
            tensors = [flat.shard]
        else:
            # frozen parameters are never sent: each rank reads all of them
            tensors = [flat.full]
        _read_into(net, run, flat, found, "parameters", tensors)


def _read_into(
    net: DataParallel,
    run: SavedRun,
    flat: Flat,
    found: dict[str, Place],
    what: str,
    tensors: list[Tensor],
) -> None:
    """Read this rank's elements of a flat buffer, in each tensor's dtype."""
    count = tensors[0].numel()
    start = rank() % (flat.padded // count) * count
    for saved, first, a, b in places(flat, start, start + count, found):
        for done, values in run.read(saved, what, first, first + b - a):
            for tensor in tensors:
                net.storage.write_shard(tensor, values.to(tensor.dtype), a + done)


def fill_modules(net: DataParallel, run: SavedRun, number: int) -> None:
    """Read buffers, and what modules keep as extra state, from a rank's file."""
    for name, buffer in buffers_of(net.model).items():
        if name in run.index.buffers:
            buffer.copy_(run.file(number).get_tensor(f"buffers/{name}"))
    modules = dict(net.model.named_modules())
    for name, state in run.values("modules", number).items():
        if name in modules:
            modules[name].set_extra_state(state)


def fill_optimizer(net: DataParallel, run: SavedRun, found: dict[str, Place]) -> None:
    """Read options, this rank's part of the states, and the precision's state."""
    groups = net.optimizer.param_groups
    for group, options in zip(groups, run.values("groups"), strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(float(value))  # a graph may hold the tensor
            else:
                group[key] = value
    scalars = run.values("scalars")
    for flat in (flat for unit in net.units for flat in unit.trainable):
        saved = [found[s.name][0] for s in flat.slots if s.name in found and s.numel]
        if not saved:
            continue
        state, master = net.optimizer.state[flat.master], flat.master
        kept = dict(scalars[saved[0].key])
        for key, value in kept.items():
            group = groups[flat.group or 0]
            if isinstance(value, Tensor) and (
                group.get("fused") or group.get("capturable")
            ):
                kept[key] = value.to(master.device)
        dtypes = saved[0].dtypes
        for what, name in dtypes.items():
            place, _, key = what.partition("/")
            if place != "optimizer":
                continue
            # a state in the parameter's dtype follows it
            same = name == dtypes["parameters"]
            dtype = master.dtype if same else DTYPES[name]
            kept[key] = old = state.get(key)
            if (
                not isinstance(old, Tensor)
                or old.shape != master.shape
                or old.dtype != dtype
            ):
                on_device = net.plan.optimizer.on == "device"
                where = flat.full.device if on_device else "cpu"
                zeros = torch.zeros(master.shape, dtype=dtype, device=where)
                kept[key] = net.storage.store(zeros, "optimizer", flat)
            _read_into(net, run, flat, found, what, [kept[key]])
        state.clear()
        state.update(kept)
    label_states(net.optimizer)
    net.precision.load_state_dict(_precision(net, run))


def _precision(net: DataParallel, run: SavedRun) -> dict[str, Any]:
    """The saved state that this precision can take.

    A loss scale of another kind, or of a run that had none, is of no use: this one's
    starts as it was made.
    """
    mine, saved = net.precision.state_dict(), run.values("precision")
    state = {key: saved.get(key, mine[key]) for key in mine}
    here, there = mine.get("loss_scale"), saved.get("loss_scale")
    if not here or not there or here.keys() != there.keys():
        if "loss_scale" in mine:
            state["loss_scale"] = here
        if there and rank() == 0:
            warnings.warn(
                f"{run.path}: the loss scale that was saved is dropped; the precision "
                f"here has {'one of another kind' if here else 'none'}",
                stacklevel=4,
            )
    return state
