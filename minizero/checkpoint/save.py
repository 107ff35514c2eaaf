"""Save a training run: every rank writes one file, then rank 0 commits them together.

save(net, "checkpoints", "step-100", extra={"step": 100})
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import comm
from ..comm import agreeing
from ..ranks import rank, world_size
from ..zero import DataParallel
from .commit import prepare, save_together
from .files import CheckpointError, LazyTensor, dtype_name, pack
from .layout import Folder, Index, SavedFlat, SavedSlot

# recorded for a parameter that the optimizer does not update, and shown in errors
FROZEN = "frozen, so without states (load with optimizer=False)"
# options of an optimizer that depend on the machine, and references to parameters
_NOT_SAVED = "params param_names foreach fused capturable differentiable".split()

# one thread, so that only one save is under way at a time; a program that ends waits for it
_writer = ThreadPoolExecutor(1, "checkpoint")
_under_way: Future[None] | None = None


def finish() -> None:
    """Wait for the save in the background, if there is one: it is on all ranks or none.

    Raises what went wrong, on all ranks in the same words, and only once.
    """
    global _under_way
    saving, _under_way = _under_way, None
    if saving is not None:
        saving.result()


def save(
    net: DataParallel,
    folder: Folder,
    tag: str,
    *,
    extra: dict[str, Any] | None = None,
    keep: int | None = None,
    background: bool = False,
    latest: bool = True,
) -> None:
    """Save a training run as `folder/tag`; every rank calls it.

    Each rank writes its shards of the parameters (in fp32, if the precision has fp32
    masters) and of the optimizer's states, and its random states. Nothing is gathered.
    A folder belongs to one job, which deletes what looks like a killed save's files, and
    folders in it that are empty.

    extra: what else a resumed run needs, such as a scheduler's state; rank 0's is kept.
        `files.pack` says what it may hold.
    keep: delete all but the last so many checkpoints in the folder (None, 0, -1: none).
    background: copy everything to host memory and write it while training goes on. With
        NVMe, whose states have no room in memory, everything is written at once.
    latest: whether `load` without a tag is to find this checkpoint.

    Raises CheckpointError on all ranks if one of them cannot write; the checkpoints that
    were there are then unchanged. In the background `finish()` raises it, which each
    `save` and `load` begins with.
    """
    global _under_way
    finish()
    with comm.phase("checkpoint"):
        net.synchronize()
        with agreeing(CheckpointError):
            if net.has_gradients:
                raise CheckpointError(
                    "gradients of a step that is not complete are not saved; save after "
                    "step(), or drop the gradients by zero_grad()"
                )
            index, shards, tensors = describe(net, tag, extra or {})
            background &= "nvme" not in (net.plan.parameters.on, net.plan.optimizer.on)
            if background:
                tensors = [LazyTensor.of(t.name, t.tensor()) for t in tensors]
        with agreeing(CheckpointError):
            prepared = prepare(Path(folder), tag) if rank() == 0 else None
        every = comm.gather_objects((prepared, shards))
        path, mark = every[0][0]  # rank 0's on all ranks: a tag may hold the time
        for flat, *by_rank in zip(index.flats, *(s for _, s in every), strict=True):
            flat.savers = [by_rank.index(shard) for shard in range(world_size())]
        write = partial(save_together, path, mark, index, tensors, keep, latest)
        if background:
            _under_way = _writer.submit(write)
        else:
            write()


def describe(
    net: DataParallel, tag: str, extra: Any
) -> tuple[Index, list[int], list[LazyTensor]]:
    """What this rank saves: the index, without files and savers; the number of the shard
    that it writes of each flat buffer; and the tensors of its file."""
    names, scalars = names_of(net.model), dict[str, dict[str, Any]]()
    flats, shards, tensors = [], [], []
    for number, flat in enumerate(net.flats):
        key = f"flat-{number}"
        stored = {"parameters": flat.master}
        scalars[key] = {}
        for state, value in net.optimizer.state.get(flat.master, {}).items():
            if isinstance(value, Tensor) and value.shape == flat.master.shape:
                stored[f"optimizer/{state}"] = value
            else:
                scalars[key][state] = value
        size = flat.padded // world_size()
        # the buffer is cut into so many parts; the ranks that store the same part
        # write different shards of it
        parts = flat.padded // flat.master.numel()
        start_in_part = rank() // parts * size
        for what, tensor in stored.items():
            name, read = f"{key}/{what}", partial(net.storage.read_shard, tensor)
            tensors.append(LazyTensor(name, tensor.dtype, (size,), read, start_in_part))
        shards.append((flat.start + start_in_part) // size)
        slots = [
            SavedSlot(names[s.parameter], [*s.shape], s.offset) for s in flat.slots
        ]
        dtypes = {what: dtype_name(tensor.dtype) for what, tensor in stored.items()}
        flats.append(SavedFlat(key, size, [], dtypes, slots))
    state = net.module_state()
    buffers = {name: b for name, b in state.items() if isinstance(b, Tensor)}
    modules = {name: value for name, value in state.items() if name not in buffers}
    values: dict[str, Any] = {"random": random_states(), "modules": modules}
    if rank() == 0:
        groups = net.optimizer.param_groups
        values["groups"] = [
            {k: v for k, v in g.items() if k not in _NOT_SAVED} for g in groups
        ]
        precision = net.precision.state_dict()
        values |= {"extra": extra, "scalars": scalars, "precision": precision}
    tensors += [LazyTensor.of(f"buffers/{name}", b) for name, b in buffers.items()]
    tensors += [LazyTensor.of(f"values/{k}", pack(v, k)) for k, v in values.items()]
    return Index(tag, facts_of(net), flats), shards, tensors


def facts_of(net: DataParallel) -> dict[str, str]:
    """What a net that loads must have in common with the one that was saved."""
    if (n := net.group.size) < world_size():
        raise CheckpointError(
            f"a checkpoint holds one model that all ranks train, and {n} of "
            f"{world_size()} train this one; keep its state_dict() instead"
        )
    optimizer, names = net.optimizer, names_of(net.model)
    facts = {
        "optimizer": type(optimizer).__name__,
        "optimizer's number of groups": str(len(optimizer.param_groups)),
    }
    for flat in net.flats:
        group = f"group {flat.group}" if flat.trainable else FROZEN
        for name in (name for slot in flat.slots for name in names[slot.parameter]):
            facts[f"optimizer of parameter {name!r}"] = group
    tensors = {f"parameter {n!r}": p for p, every in names.items() for n in every}
    tensors |= {f"buffer {n!r}": b for n, b in net.module_state().items()}
    for what, t in tensors.items():
        # a float may be saved and loaded in different precisions
        if isinstance(t, Tensor):
            kind = "float" if t.is_floating_point() else dtype_name(t.dtype)
            facts[what] = f"{kind} of shape {tuple(t.shape)}"
    return facts


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter; a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return names


def random_states() -> dict[str, Any]:
    """The states of the generators of Python, torch and NumPy."""
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, key, *others = sys.modules["numpy"].random.get_state()
        states["numpy"] = name, key.tolist(), *others
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """The inverse, for the generators that there are."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
