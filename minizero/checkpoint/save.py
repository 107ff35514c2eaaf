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
from ..zero import DataParallel
from .files import (
    CheckpointError,
    LazyTensor,
    dtype_name,
    explained,
    pack,
    write_tensors,
)
from .folder import Folder, decide, is_tag, point, prepare, retire, sweep
from .layout import Index, SavedFile, SavedFlat, SavedSlot, file_name

# options of the optimizer that depend on the machine, and references to parameters
_NOT_SAVED = "params param_names foreach fused capturable differentiable".split()

# ---- what ranks must agree on

_group: tuple[Any, Any] = (None, None)  # of the process group, and made for it


def exchange(value: Any) -> list[Any]:
    """The values of all ranks, in rank order.

    Over a gloo group of this package's own: a save in the background may exchange values
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
    except Exception as found:
        error = found
    for words in exchange(error and (str(error) or repr(error))):
        if words:
            raise CheckpointError(words) from error


# ---- saving


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

    Each rank writes its shards: the optimizer's states and the parameters, in fp32 if
    the precision has fp32 masters; and its random states. Nothing is gathered. A folder
    belongs to one job, which deletes what it takes for the files of a killed save.

    extra: what else a resumed run needs, such as a scheduler's state; rank 0's is kept.
        own: likewise, each rank's. `files.pack` says what they may hold.
    keep: delete all but the last so many checkpoints in the folder.
    background: copy everything to host memory and write it while training goes on. What
        is stored on a disk has no copy: with NVMe everything is written before this
        returns. Only one save is under way at a time; the next one waits for it.
    latest: whether `load` without a tag is to find this checkpoint.

    Raises CheckpointError on all ranks if one of them cannot write; the checkpoints that
    were there are then unchanged. In the background, `wait()` of the returned value
    raises it, or the next `save` or `finish()`.
    """
    global _under_way
    finish()
    with comm.phase("checkpoint"):
        net.synchronize()
        net.storage.wait_for_copies()
        with agreed():
            _check(net, tag, keep)
            index, tensors = describe(net, tag, extra or {}, own or {})
            places = net.plan.parameters, net.plan.optimizer
            if background and all(place.on != "nvme" for place in places):
                tensors = [tensor.copied() for tensor in tensors]
        saving = Saving(Path(folder), index, tensors, keep, latest)
        saving.prepare()
        if background:
            _under_way = saving
            saving.start()
        else:
            saving.write()
            saving.wait()
        return saving


_under_way: Saving | None = None


def finish() -> None:
    """Wait for the save in the background, if there is one; raises its error."""
    global _under_way
    saving, _under_way = _under_way, None
    if saving is not None:
        saving.wait()


def _check(net: DataParallel, tag: str, keep: int | None) -> None:
    if not is_tag(tag):
        raise CheckpointError(
            f"the tag {tag!r} cannot name a folder beside `latest`; take one such as "
            "'step-100', without slashes"
        )
    if keep is not None and not (isinstance(keep, int) and keep >= 1):
        raise CheckpointError(f"keep must be at least 1, or None for all, not {keep!r}")
    if net.has_gradients:
        raise CheckpointError(
            "gradients of a step that is not complete are not saved; save after step(), "
            "or give the gradients up by zero_grad()"
        )


class Saving:
    """A save that was begun; `wait()` returns when the checkpoint is complete.

    path: the checkpoint's folder.
    """

    def __init__(
        self,
        folder: Path,
        index: Index,
        tensors: list[LazyTensor],
        keep: int | None,
        latest: bool,
    ) -> None:
        self.path, self.index, self.keep, self.latest = (
            folder / index.tag,
            index,
            keep,
            latest,
        )
        self._tensors = tensors
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        """Rank 0 makes a folder to write in; all ranks get its name."""
        folder, written = self.path.parent, None
        options = str(self.path), self.keep, self.latest
        with agreed():
            if rank() == 0:
                written, self.index.number = prepare(folder, self.index.tag)
        every = exchange((options, written))
        with agreed():
            if every[0][0] != options:
                raise CheckpointError(
                    f"rank {rank()} saves with path, keep, latest = {options}, and rank "
                    f"0 with {every[0][0]}; pass the same on all ranks"
                )
            self._written = Path(every[0][1])
            # a node that has just looked may not see the folder without this
            self._written.mkdir(parents=True, exist_ok=True)

    def write(self) -> None:
        """Write this rank's file; when all ranks have, rank 0 commits them."""
        try:
            with agreed():
                name = file_name(rank(), world_size())
                facts = write_tensors(self._written / name, self._tensors)
            self._tensors = []
            self.index.files = exchange(SavedFile(name, *facts))
            with agreed():
                if rank() == 0:
                    self._commit()
        except Exception as error:
            self._error = error
            if rank() == 0:
                with contextlib.suppress(OSError):
                    sweep(self.path.parent)

    def _commit(self) -> None:
        folder = self.path.parent
        try:
            decide(self._written, self.path, self.index)
            if self.latest:
                point(folder, self.index.tag)
        except OSError as error:
            raise explained(self.path, error) from error
        try:
            if self.keep is not None:
                retire(folder, self.keep)
            sweep(folder)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: the checkpoint is complete, but what is older cannot be "
                f"deleted: {error}"
            ) from error

    def start(self) -> None:
        """`write` in a thread, which ends before the program does."""
        self._thread = threading.Thread(target=self.write, name="checkpoint")
        self._thread.start()

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


# ---- what is saved


def describe(
    net: DataParallel, tag: str, extra: dict[str, Any], own: dict[str, Any]
) -> tuple[Index, list[LazyTensor]]:
    """The index without its files, and what this rank writes."""
    names = names_of(net.model)
    flats, tensors, scalars = [], [], {}
    for unit in net.units:
        for number, flat in enumerate(unit.flats):
            key = f"{unit.name}/{number}"
            kept = {"parameters": flat.master if flat.trainable else flat.shard}
            scalars[key] = {}
            for state, value in net.optimizer.state.get(flat.master, {}).items():
                if isinstance(value, Tensor) and value.shape == flat.master.shape:
                    kept[f"optimizer/{state}"] = value
                elif isinstance(value, Tensor) and value.ndim:
                    raise CheckpointError(
                        f"the optimizer's state {state!r} of {flat.slots[0].name!r} has "
                        f"shape {tuple(value.shape)}: neither one value for each element "
                        "nor one for all; it cannot be cut into shards"
                    )
                else:
                    scalars[key][state] = value
            size = flat.padded // world_size()
            ranks = flat.padded // kept["parameters"].numel()
            # ranks with the same elements write different parts of them
            start = rank() // ranks * size
            for what, tensor in kept.items():
                read = partial(_read, net.storage, tensor, start)
                name = f"{key}/{what}"
                tensors.append(LazyTensor(name, tensor.dtype, (size,), read))
            slots = [
                SavedSlot(names[s.parameter], list(s.shape), s.offset)
                for s in flat.slots
            ]
            dtypes = {what: dtype_name(tensor.dtype) for what, tensor in kept.items()}
            group = flat.group if flat.trainable else None
            flats.append(SavedFlat(key, group, size, ranks, dtypes, slots))
    buffers = buffers_of(net.model)
    tensors += [LazyTensor.of(f"buffers/{name}", b) for name, b in buffers.items()]
    values: dict[str, Any] = {
        "own": own,
        "random": {name: get() for name, (get, _) in generators().items()},
        "modules": {
            name: module.get_extra_state()
            for name, module in net.model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        },
    }
    if rank() == 0:
        values |= {
            "extra": extra,
            "scalars": scalars,
            "precision": net.precision.state_dict(),
            "groups": [
                {k: v for k, v in group.items() if k not in _NOT_SAVED}
                for group in net.optimizer.param_groups
            ],
        }
    for name, value in values.items():
        tensors.append(LazyTensor.of(f"values/{name}", pack(value, name)))
    index = Index(
        tag=tag,
        optimizer=type(net.optimizer).__name__,
        groups=len(net.optimizer.param_groups),
        flats=flats,
        buffers={k: (dtype_name(b.dtype), list(b.shape)) for k, b in buffers.items()},
    )
    return index, tensors


def _read(storage: Any, tensor: Tensor, start: int, a: int, b: int) -> Tensor:
    return storage.read_shard(tensor, start + a, start + b)


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter; a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return names


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that `model.state_dict()` would have, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    }


Generator = tuple[Callable[[], Any], Callable[[Any], Any]]


def generators() -> dict[str, Generator]:
    """How to get and how to set the states of Python's, torch's and NumPy's generators."""
    found: dict[str, Generator] = {
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
