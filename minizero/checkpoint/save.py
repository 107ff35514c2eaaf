"""Save a training run: every rank writes one file, then rank 0 commits them together.

saving = save(net, "checkpoints", "step-100", extra={"step": 100})
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import comm
from ..ranks.launch import rank, world_size
from ..zero import DataParallel, Flat
from .files import CheckpointError, LazyTensor, dtype_name, pack, write_tensors
from .folder import Folder, decide, is_tag, point, prepare, retire, sweep
from .layout import Index, SavedFile, SavedFlat, SavedSlot

# options of an optimizer that depend on the machine, and references to parameters
_NOT_SAVED = "params param_names foreach fused capturable differentiable".split()


# ---- what ranks tell each other

_group: tuple[Any, Any] = None, None  # a process group, and the one made for it


def exchange(value: Any) -> list[Any]:
    """The values of all ranks, in rank order.

    Over a gloo group of this package's own: a save in the background exchanges values
    while the main thread calls other collectives.
    """
    global _group
    if world_size() == 1:
        return [value]
    if _group[0] is not dist.group.WORLD:
        _group = dist.group.WORLD, dist.new_group(backend="gloo")
    values = [None] * world_size()
    dist.all_gather_object(values, value, _group[1])
    return values


@contextmanager
def agreed() -> Iterator[None]:
    """An error inside, on any rank, is raised on all of them as a CheckpointError."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    for words in exchange(error and (str(error) or repr(error))):
        if words:
            raise CheckpointError(words) from error


# ---- save


class Saving:
    """A save that was begun. `path`: the checkpoint's folder."""

    under_way: Saving | None = None  # the one in the background; never two

    def __init__(self, path: Path) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Do the work in a thread, which the program waits for before it ends."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()
        Saving.under_way = self

    def wait(self) -> None:
        """Return when the checkpoint is complete: on all ranks or on none.

        Raises what went wrong, on all ranks in the same words; a second call does
        nothing.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def finish() -> None:
    """Wait for the save in the background, if there is one; raises its error."""
    saving, Saving.under_way = Saving.under_way, None
    if saving is not None:
        saving.wait()


def save(
    net: DataParallel,
    folder: Folder,
    tag: str,
    *,
    extra: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    keep: int | None = None,
    background: bool = False,
    latest: bool = True,
) -> Saving:
    """Save a training run as `folder/tag`; every rank calls it.

    Each rank writes its shards of the parameters (in fp32, if the precision has fp32
    masters) and of the optimizer's states, and its random states. Nothing is gathered.
    A folder belongs to one job, which deletes what looks like a killed save's files.

    extra: what else a resumed run needs, such as a scheduler's state; rank 0's is kept.
        own: likewise, each rank's. `files.pack` says what they may hold.
    keep: delete all but the last so many checkpoints in the folder.
    background: copy everything to host memory and write it while training goes on. With
        NVMe, whose states have no room in memory, everything is written at once.
    latest: whether `load` without a tag is to find this checkpoint.

    Raises CheckpointError on all ranks if one of them cannot write; the checkpoints that
    were there are then unchanged. In the background, `wait()` of the returned value
    raises it, or the next `save` or `finish()`.
    """
    finish()
    with comm.phase("checkpoint"):
        net.synchronize()
        with agreed():
            if not is_tag(tag):
                raise CheckpointError(
                    f"the tag {tag!r} cannot name a folder beside `latest`; take one "
                    "such as 'step-100', without slashes"
                )
            if keep is not None and not (isinstance(keep, int) and keep >= 1):
                raise CheckpointError(
                    f"keep must be at least 1, or None for all, not {keep!r}"
                )
            if net.has_gradients:
                raise CheckpointError(
                    "gradients of a step that is not complete are not saved; save after "
                    "step(), or drop the gradients by zero_grad()"
                )
            index, tensors = describe(net, tag, extra or {}, own or {})
            on_disk = "nvme" in (net.plan.parameters.on, net.plan.optimizer.on)
            if background and not on_disk:
                tensors = [tensor.copied() for tensor in tensors]
        path, written = Path(folder, tag), None
        with agreed():
            if rank() == 0:
                written, index.number = prepare(Path(folder), tag)
        every = exchange((str(path), written))
        with agreed():
            if every[0][0] != str(path):
                raise CheckpointError(
                    f"rank {rank()} saves {path}, and rank 0 {every[0][0]}; pass the "
                    "same folder and tag on all ranks"
                )
        work = partial(_commit, path, every[0][1], index, tensors, keep, latest)
        saving = Saving(path)
        if background and not on_disk:
            saving.start(work)
        else:
            work()
        return saving


def _commit(
    path: Path,
    written: Path,
    index: Index,
    tensors: list[LazyTensor],
    keep: int | None,
    latest: bool,
) -> None:
    """Write this rank's file; when all ranks have, rank 0 decides and points."""
    name = f"rank-{rank():04d}-of-{world_size():04d}.safetensors"
    try:
        with agreed():
            # a node that has just looked may not see the folder without this
            written.mkdir(exist_ok=True)
            facts = write_tensors(written / name, tensors)
        index.files = exchange(SavedFile(name, *facts))
        with agreed():
            if rank() == 0:
                decide(written, path, index)
                if latest:
                    point(path.parent, index.tag)
                if keep is not None:
                    retire(path.parent, keep)
                sweep(path.parent)
    except CheckpointError:
        if rank() == 0:
            with contextlib.suppress(OSError):
                sweep(path.parent)
        raise


# ---- what is saved


def describe(
    net: DataParallel, tag: str, extra: dict[str, Any], own: dict[str, Any]
) -> tuple[Index, list[LazyTensor]]:
    """The index, without its files; and what this rank is to write."""
    names, buffers = names_of(net.model), buffers_of(net.model)
    flats, tensors, scalars = [], [], {}
    for key, flat in flats_of(net):
        stored = {"parameters": flat.master if flat.trainable else flat.shard}
        scalars[key] = {}
        for state, value in net.optimizer.state.get(flat.master, {}).items():
            if isinstance(value, Tensor) and value.shape == flat.master.shape:
                stored[f"optimizer/{state}"] = value
            elif isinstance(value, Tensor) and value.ndim:
                raise CheckpointError(
                    f"the optimizer's state {state!r} of {flat.slots[0].name!r} has the "
                    f"shape {tuple(value.shape)}: neither one value for each element nor "
                    "one for all; it cannot be cut into shards"
                )
            else:
                scalars[key][state] = value
        size = flat.padded // world_size()
        ranks = flat.padded // stored["parameters"].numel()
        # ranks that store the same elements each write another part of them
        start = rank() // ranks * size
        for what, tensor in stored.items():
            read = partial(_read, net.storage, tensor, start)
            lazy = LazyTensor(f"{key}/{what}", tensor.dtype, (size,), read)
            tensors.append(lazy)
        dtypes = {what: dtype_name(tensor.dtype) for what, tensor in stored.items()}
        slots = [
            SavedSlot(names[s.parameter], list(s.shape), s.offset) for s in flat.slots
        ]
        group = flat.group if flat.trainable else None
        flats.append(SavedFlat(key, group, size, ranks, dtypes, slots))
    values: dict[str, Any] = {
        "own": own,
        "random": {name: get() for name, (get, _) in generators().items()},
        "modules": {
            name: module.get_extra_state()
            for name, module in net.model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        },
    }
    groups = net.optimizer.param_groups
    if rank() == 0:
        values |= {
            "extra": extra,
            "scalars": scalars,
            "precision": net.precision.state_dict(),
            "groups": [
                {k: v for k, v in group.items() if k not in _NOT_SAVED}
                for group in groups
            ],
        }
    tensors += [LazyTensor.of(f"buffers/{name}", b) for name, b in buffers.items()]
    tensors += [LazyTensor.of(f"values/{k}", pack(v, k)) for k, v in values.items()]
    shapes = {k: (dtype_name(b.dtype), list(b.shape)) for k, b in buffers.items()}
    optimizer = type(net.optimizer).__name__
    return Index(tag, optimizer, len(groups), flats, shapes), tensors


def _read(storage: Any, tensor: Tensor, start: int, a: int, b: int) -> Tensor:
    values: Tensor = storage.read_shard(tensor, start + a, start + b)
    return values


def flats_of(net: DataParallel) -> Iterator[tuple[str, Flat]]:
    """Every flat buffer, with what its tensors' names begin with."""
    for unit in net.units:
        for number, flat in enumerate(unit.flats):
            yield f"{unit.name}/{number}", flat


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter; a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return names


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that `model.state_dict()` would have, by name."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    }


def generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to get and how to set the states of Python's, torch's and NumPy's generators."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "python": (random.getstate, random.setstate),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random

        def get() -> Any:
            name, key, *others = numpy.get_state()
            return name, key.tolist(), *others

        found["numpy"] = get, numpy.set_state
    return found
