"""Load a checkpoint into a net of any plan, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .. import comm
from ..comm import agreeing
from ..memory.labels import label_states
from ..ranks import rank, world_size
from ..zero import DataParallel, Flat
from .files import CheckpointError, LazyTensor, length_and_crc32, unpack
from .layout import INDEX, LATEST, Folder, Index, SavedFlat, SavedSlot, find, pieces
from .save import FROZEN, facts_of, finish, names_of, set_random_states

SavedPlace = tuple[SavedFlat, SavedSlot]


def exists(folder: Folder) -> bool:
    """Whether rank 0 finds a checkpoint, be it damaged; every rank calls it."""
    latest = Path(folder, LATEST)
    found = latest.exists() or any(latest.parent.glob(f"*/{INDEX}"))
    return bool(comm.gather_objects(found)[0])


@dataclass
class Loaded:
    """What `load` returns. `path`: the checkpoint's folder."""

    path: Path
    tag: str
    extra: dict[str, Any]


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

    Each rank reads what it stores, piece by piece. Before the net is changed, all files
    are verified, and the checkpoint is compared with the net.

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
        with agreeing(CheckpointError):
            mine = find(Path(folder), tag) if rank() == 0 else None
        tag, raw = comm.gather_objects(mine)[0]
        with agreeing(CheckpointError):
            run = SavedRun(Path(folder, tag), raw)
            run.verify(rank(), world_size())
        with agreeing(CheckpointError):
            found = match(net, run.index, strict, optimizer)
            as_many = len(run.index.files) == world_size()
            loaded = Loaded(run.path, tag, run.values("extra"))
            if check is not None:
                check(loaded)
        with agreeing(CheckpointError):
            fill(net, run, found, optimizer)
            fill_modules(net, run, rank() if as_many else 0)
            if optimizer:
                fill_options(net, run)
        net.shards_written()
        if optimizer and as_many:
            set_random_states(run.values("random", rank()))
        return loaded


class SavedRun:
    """A checkpoint's files. Verify them first: they are mapped into memory, where the end
    of a file that is too short ends the process."""

    def __init__(self, path: Path, raw: bytes) -> None:
        self.path, self.index = path, Index.loads(raw, path / INDEX)
        self._files: dict[int, Any] = {}

    def verify(self, first: int = 0, step: int = 1) -> None:
        """Compare every `step`th file with the length and the checksum that it had."""
        for name, *saved in self.index.files[first::step]:
            if [*length_and_crc32(self.path / name)] != saved:
                raise CheckpointError(
                    f"{self.path / name}: its length or its checksum is not what it was; "
                    "the file was truncated, damaged or replaced"
                )

    def file(self, number: int) -> Any:
        """The file of a rank, open."""
        if number not in self._files:
            path = self.path / self.index.files[number][0]
            self._files[number] = safe_open(path, "pt")
        return self._files[number]

    def lazy(
        self, name: str, flat: SavedFlat, what: str, start: int, shape: Sequence[int]
    ) -> LazyTensor:
        """A part of a saved buffer, to be read from the files that have it."""
        key = f"{flat.key}/{what}"

        def read(a: int, b: int) -> Tensor:
            parts = [
                self.file(flat.savers[shard]).get_slice(key)[i:j]
                for shard, i, j in pieces(a, b, flat.size)
            ]
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        dtype = getattr(torch, flat.dtypes[what])
        return LazyTensor(name, dtype, tuple(shape), read, start)

    def values(self, name: str, number: int = 0) -> Any:
        """A Python value that was packed under a name, from the file of a rank."""
        return unpack(self.file(number).get_tensor(f"values/{name}"))


def match(
    net: DataParallel, index: Index, strict: bool, optimizer: bool
) -> dict[str, SavedPlace]:
    """Where each parameter was saved, by its slot's name; raises all that does not fit."""
    here, there, problems = facts_of(net), index.facts, list[str]()
    for what in here.keys() & there.keys():
        ignored = what.startswith("optimizer") and not optimizer
        # what was trained may be frozen here, but not the other way round
        if here[what] != there[what] and here[what] != FROZEN and not ignored:
            problems.append(f"{what} is {here[what]} here and was {there[what]}")
    for only, where in (
        (here.keys() - there.keys(), "checkpoint"),
        (there.keys() - here.keys(), "model"),
    ):
        missing = sorted(n for n in only if strict and not n.startswith("optimizer"))
        more = f" and {len(missing) - 5} more" if missing[5:] else ""
        if missing:
            problems.append(f"{', '.join(missing[:5])}{more}: not in the {where}")
    aliases = names_of(net.model)
    saved = {n: (f, s) for f in index.flats for s in f.slots for n in s.names}
    found: dict[str, SavedPlace] = {}
    for slot in (slot for flat in net.flats for slot in flat.slots):
        names = [name for name in aliases[slot.parameter] if name in saved]
        for name in names:
            if found.setdefault(slot.name, saved[name]) != saved[name]:
                problems.append(f"{names} are one parameter here and were several")
    if problems:
        raise CheckpointError(
            f"the checkpoint {index.tag!r} does not fit: {'; '.join(sorted(problems))}"
        )
    return found


def fill(
    net: DataParallel, run: SavedRun, found: dict[str, SavedPlace], optimizer: bool
) -> None:
    """Read this rank's part of the parameters, and of the optimizer's states."""

    def read(flat: Flat, what: str, start: int, *tensors: Tensor) -> None:
        """Fill tensors, each in its dtype, with saved elements of `flat`.

        Each tensor begins at element `start` of the flat buffer.
        """
        end = start + tensors[0].numel()
        for slot in flat.slots:
            a, b = max(start, slot.offset), min(end, slot.offset + slot.numel)
            if a >= b or slot.name not in found:
                continue
            saved_flat, saved_slot = found[slot.name]
            first = saved_slot.offset + a - slot.offset
            for chunk in run.lazy(what, saved_flat, what, first, [b - a]).chunks():
                for tensor in tensors:
                    net.storage.write_shard(tensor, chunk.to(tensor.dtype), a - start)
                a += len(chunk)

    scalars = run.values("scalars")
    for flat in net.flats:
        if not flat.trainable:  # no update sends it: each rank reads all that it stores
            stored = flat.stored if net.plan.parameters.sharded else flat.full
            start = rank() % (flat.padded // stored.numel()) * stored.numel()
            read(flat, "parameters", start, stored)
            continue
        # the shard, and its master copy if it has one
        read(flat, "parameters", flat.start, *{flat.master, flat.shard})
        # all its parameters are of one optimizer group: the first has the states of all
        saved = next((found[s.name][0] for s in flat.slots if s.name in found), None)
        if not saved or not optimizer:
            continue
        # numbers such as Adam's step are copied: several flats may have been one
        group = net.optimizer.param_groups[flat.group or 0]
        on_device = group.get("fused") or group.get("capturable")
        where = flat.master.device if on_device else "cpu"
        state = {
            key: value.to(where, copy=True) if isinstance(value, Tensor) else value
            for key, value in scalars[saved.key].items()
        }
        for what in [what for what in saved.dtypes if what != "parameters"]:
            key, dtype = what.removeprefix("optimizer/"), saved.dtypes[what]
            values = net.optimizer.state[flat.master].get(key)
            if not isinstance(values, Tensor):  # no update has made it yet
                # a state in the parameters' dtype follows them
                follows = dtype == saved.dtypes["parameters"]
                kind = flat.master.dtype if follows else getattr(torch, dtype)
                zeros = flat.full.new_zeros(flat.master.shape, dtype=kind)
                values = net.storage.store(zeros, "optimizer")
            read(flat, what, flat.start, values)
            state[key] = values
        net.optimizer.state[flat.master] = state


def fill_modules(net: DataParallel, run: SavedRun, number: int) -> None:
    """Read buffers, and the extra state of modules, from the file of a rank."""
    extra = run.values("modules", number)
    for name, value in net.module_state().items():
        if f"buffer {name!r}" in run.index.facts:
            extra[name] = run.file(number).get_tensor(f"buffers/{name}")
        module, _, last = name.rpartition(".")
        if last == "_extra_state" and name in extra:
            net.model.get_submodule(module).set_extra_state(extra[name])
        elif name in extra:
            value.copy_(extra[name])


def fill_options(net: DataParallel, run: SavedRun) -> None:
    """Read the options of the optimizer's groups, and the precision's state."""
    groups = net.optimizer.param_groups
    for group, options in zip(groups, run.values("groups"), strict=True):
        group.update(options)
    label_states(net.optimizer)
    own, saved = net.precision.state_dict(), run.values("precision")
    state = {key: saved.get(key, value) for key, value in own.items()}
    kinds = [(each.get("loss_scale") or {}).keys() for each in (own, saved)]
    if kinds[0] != kinds[1]:  # a loss scale of another kind keeps its initial state
        state |= {key: own[key] for key in own.keys() & {"loss_scale"}}
    net.precision.load_state_dict(state)
