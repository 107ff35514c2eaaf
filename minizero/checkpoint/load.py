"""Load a checkpoint into a net of any plan, on any number of ranks.

loaded = load(net, "checkpoints")          # loaded.extra["step"] == 100
"""

from __future__ import annotations

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
from .files import CHUNK, CheckpointError, dtype_name, measure, unpack
from .folder import Folder, find
from .layout import INDEX, Index, Place, SavedFlat, pieces, places
from .save import (
    agreed,
    buffers_of,
    exchange,
    finish,
    flats_of,
    generators,
    names_of,
)


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
        mine = None
        with agreed():
            if rank() == 0:
                tag, path = find(Path(folder), tag)
                mine = tag, path.parent.name, path.read_bytes()
        tag, name, raw = exchange(mine)[0]
        with agreed():
            run = SavedRun(Path(folder, name), raw)
            run.verify(rank(), world_size())
        with agreed():
            found = match(net, run, strict, optimizer)
            as_many = len(run.index.files) == world_size()
            own = run.values("own", rank()) if as_many else None
            loaded = Loaded(run.path, tag, run.values("extra"), own)
            if check is not None:
                check(loaded)
        with agreed():
            fill(net, run, found)
            fill_modules(net, run, rank() if as_many else 0)
            if optimizer:
                fill_optimizer(net, run, found)
        net.shards_written()
        if optimizer and as_many:
            states = run.values("random", rank())
            for kind in states.keys() & generators().keys():
                generators()[kind][1](states[kind])
        return loaded


class SavedRun:
    """A checkpoint's files. Verify them first: they are mapped into memory, where the end
    of a file that is too short ends the process."""

    def __init__(self, path: Path, raw: bytes) -> None:
        self.path, self.index = path, Index.loads(raw, path / INDEX)
        self._files: dict[int, Any] = {}

    def verify(self, first: int = 0, step: int = 1) -> None:
        """Compare every `step`th file with the length and the checksum that it had."""
        for saved in self.index.files[first::step]:
            path = self.path / saved.name
            length, crc32 = measure(path)
            if length != saved.bytes:
                raise CheckpointError(
                    f"{path}: it has {length:,} bytes, and {saved.bytes:,} were saved; "
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
        """Elements a to b of a saved buffer, chunk by chunk: offset from a, values."""
        done = 0
        for shard, i, j in pieces(a, b, flat.size):
            file = self.file(flat.saver(shard, len(self.index.files)))
            saved = file.get_slice(f"{flat.key}/{what}")
            step = CHUNK // getattr(torch, flat.dtypes[what]).itemsize
            for k in range(i, j, step):
                values = saved[k : min(k + step, j)]
                yield done, values
                done += len(values)

    def buffer(self, name: str, number: int = 0) -> Tensor:
        """A buffer of a module, from the file of a rank."""
        buffer: Tensor = self.file(number).get_tensor(f"buffers/{name}")
        return buffer

    def values(self, name: str, number: int = 0) -> Any:
        """A value that was packed under a name, from the file of a rank."""
        return unpack(self.file(number).get_tensor(f"values/{name}"))


# ---- compare


def match(
    net: DataParallel, run: SavedRun, strict: bool, optimizer: bool
) -> dict[str, Place]:
    """Where each parameter of a net was saved, by its slot's name.

    Raises CheckpointError, with everything that does not fit.
    """
    saved = {n: (f, s) for f in run.index.flats for s in f.slots for n in s.names}
    names, buffers = names_of(net.model), buffers_of(net.model)
    all_names = [name for aliases in names.values() for name in aliases]
    problems = []
    if strict:
        problems += _differ("parameter", {*all_names}, {*saved})
        problems += _differ("buffer", {*buffers}, {*run.index.buffers})
    found = {}
    for _, flat in flats_of(net):
        for slot in flat.slots:
            aliases = [n for n in names[slot.parameter] if n in saved]
            if len({id(saved[n][1]) for n in aliases}) > 1:
                problems.append(
                    f"{' and '.join(map(repr, aliases))} are one parameter here, and not "
                    "in the checkpoint"
                )
            for name in aliases[:1]:
                found[slot.name] = was, place = saved[name]
                facts = was.dtypes["parameters"], place.shape
                problems += _compare(f"parameter {name!r}", slot.parameter, *facts)
    for name in buffers.keys() & run.index.buffers.keys():
        facts = run.index.buffers[name]
        problems += _compare(f"buffer {name!r}", buffers[name], *facts)
    if optimizer:
        problems += _match_optimizer(net, run, found)
    if problems:
        raise CheckpointError(
            f"{run.path}: this checkpoint does not fit: {'; '.join(problems)}"
        )
    return found


def _differ(kind: str, here: set[str], there: set[str]) -> Iterator[str]:
    for names, where in (
        (sorted(here - there), "is not in the checkpoint"),
        (sorted(there - here), "of the checkpoint is not in the model"),
    ):
        yield from (f"{kind} {name!r} {where}" for name in names[:5])
        if names[5:]:
            yield f"the same of {len(names) - 5} more"


def _compare(what: str, here: Tensor, name: str, shape: Iterable[int]) -> Iterator[str]:
    if tuple(here.shape) != tuple(shape):
        there = tuple(shape)
        yield f"{what} has shape {tuple(here.shape)} here and {there} in the checkpoint"
    # dtypes may differ in precision, not in kind
    mine, its = here.dtype, getattr(torch, name)
    floats = mine.is_floating_point, its.is_floating_point
    if floats[0] != floats[1] or mine.is_complex != its.is_complex:
        yield f"{what} is {dtype_name(mine)} here and {name} in the checkpoint"


def _match_optimizer(
    net: DataParallel, run: SavedRun, found: dict[str, Place]
) -> Iterator[str]:
    groups, scalars = net.optimizer.param_groups, run.values("scalars")
    mine, its = type(net.optimizer).__name__, run.index.optimizer
    if mine != its:
        yield f"the optimizer is {mine} here and was {its}"
    if len(groups) != run.index.groups:
        yield f"the optimizer has {len(groups)} groups here and had {run.index.groups}"
    for flat in (flat for unit in net.units for flat in unit.trainable):
        states = set()
        for slot in (s for s in flat.slots if s.name in found and s.numel):
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
    """Read this rank's part of the parameters into masters and shards."""
    for _, flat in flats_of(net):
        if flat.trainable:
            # the same tensor, if the precision has no fp32 masters
            tensors = [*{id(t): t for t in (flat.master, flat.shard)}.values()]
        elif net.plan.parameters.sharded:
            tensors = [flat.shard]
        else:
            # frozen parameters are never sent: each rank reads all of them
            tensors = [flat.full]
        _read_into(tensors, "parameters", net, run, flat, found)


def _read_into(
    tensors: list[Tensor],
    what: str,
    net: DataParallel,
    run: SavedRun,
    flat: Flat,
    found: dict[str, Place],
) -> None:
    """Read the elements of a flat buffer that this rank stores, in each one's dtype."""
    count = tensors[0].numel()
    start = rank() % (flat.padded // count) * count
    for saved, first, a, b in places(flat, start, start + count, found):
        for done, values in run.read(saved, what, first, first + b - a):
            for tensor in tensors:
                net.storage.write_shard(tensor, values.to(tensor.dtype), a + done)


def fill_modules(net: DataParallel, run: SavedRun, number: int) -> None:
    """Read buffers, and the extra state of modules, from the file of a rank."""
    buffers, modules = buffers_of(net.model), dict(net.model.named_modules())
    extra = run.values("modules", number)
    for name in buffers.keys() & run.index.buffers.keys():
        buffers[name].copy_(run.buffer(name, number))
    for name in modules.keys() & extra.keys():
        modules[name].set_extra_state(extra[name])


def fill_optimizer(net: DataParallel, run: SavedRun, found: dict[str, Place]) -> None:
    """Read this rank's part of the states, the options, and the precision's state."""
    groups, scalars = net.optimizer.param_groups, run.values("scalars")
    for group, options in zip(groups, run.values("groups"), strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(float(value))  # a graph may hold the tensor
            else:
                group[key] = value
    for flat in (flat for unit in net.units for flat in unit.trainable):
        saved = [found[s.name][0] for s in flat.slots if s.name in found and s.numel]
        if not saved:
            continue
        state, group, dtypes = {}, groups[flat.group or 0], saved[0].dtypes
        old = net.optimizer.state.get(flat.master, {})
        for key, value in scalars[saved[0].key].items():
            beside = group.get("fused") or group.get("capturable")
            moves = beside and isinstance(value, Tensor)
            state[key] = value.to(flat.master.device) if moves else value
        for what in dtypes.keys() - {"parameters"}:
            key = what.removeprefix("optimizer/")
            state[key] = _room_for(net, flat, old.get(key), dtypes[what], dtypes)
            _read_into([state[key]], what, net, run, flat, found)
        net.optimizer.state[flat.master] = state
    label_states(net.optimizer)
    net.precision.load_state_dict(_precision(net, run))


def _room_for(
    net: DataParallel, flat: Flat, old: Any, name: str, dtypes: dict[str, str]
) -> Tensor:
    """Where a state of a flat buffer is stored: as it is, or new, with zeros."""
    # a state in the parameters' dtype follows them
    same = name == dtypes["parameters"]
    dtype = flat.master.dtype if same else getattr(torch, name)
    shape = flat.master.shape
    if isinstance(old, Tensor) and old.shape == shape and old.dtype == dtype:
        return old
    on_device = net.plan.optimizer.on == "device"
    where = flat.full.device if on_device else torch.device("cpu")
    zeros = torch.zeros(shape, dtype=dtype, device=where)
    return net.storage.store(zeros, "optimizer", flat)


def _precision(net: DataParallel, run: SavedRun) -> dict[str, Any]:
    """The saved state, as far as this precision can take it over."""
    mine, saved = net.precision.state_dict(), run.values("precision")
    here, there = mine.get("loss_scale"), saved.get("loss_scale")
    taken = mine.keys() & saved.keys()
    if there and (not here or here.keys() != there.keys()):
        taken -= {"loss_scale"}
        if rank() == 0:
            warnings.warn(
                f"{run.path}: the loss scale that was saved is dropped; the precision "
                f"here has {'one of another kind' if here else 'none'}",
                stacklevel=4,
            )
    return mine | {key: saved[key] for key in taken}
