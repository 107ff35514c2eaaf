"""What of a training run a checkpoint holds, and where each part rests."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..ranks.launch import rank, world_size
from ..zero.data_parallel import DataParallel
from ..zero.flat_buffer import Flat, Unit
from ..zero.owned import Owned
from .encoding import dtype_name, encode
from .manifest import Index, SavedFlat, SavedSlot
from .tensor_file import LazyTensor

# how an optimizer computes, which is this machine's affair; and the names of
# parameters that it no longer has
_NOT_SAVED = frozenset(
    "params param_names foreach fused capturable differentiable".split()
)


def settle(net: DataParallel) -> None:
    """Let everything arrive that is under way."""
    net.synchronize()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # copies to host memory too


def flats_of(net: DataParallel) -> Iterator[tuple[Unit, int, Flat]]:
    """Every buffer, with its unit and its number there."""
    for unit in net.units:
        for number, flat in enumerate(unit.flats):
            yield unit, number, flat


def own_shard(net: DataParallel, flat: Flat) -> Owned:
    """The shard that this rank saves: its own, though it may hold all."""
    if not flat.numel:  # parameters without elements: nothing is made of it
        return Owned(flat, rank(), flat.full, flat.full, flat.full)
    owned = net.owned_states(flat)
    return next(shard for shard in owned if shard.index == rank())


def is_elementwise(value: Any, shard: Tensor) -> TypeGuard[Tensor]:
    """Whether an optimizer's state has a value for each element of a shard."""
    return isinstance(value, Tensor) and value.shape == shard.shape


def saved_flat(
    net: DataParallel, unit: Unit, number: int, flat: Flat
) -> tuple[SavedFlat, list[LazyTensor]]:
    """What the index says of a buffer, and this rank's shard of it."""
    owned = own_shard(net, flat)
    tensors: dict[str | None, Tensor] = {None: owned.master}
    scalars = {}
    for key, value in owned.state.items():
        if is_elementwise(value, owned.shard):
            tensors[key] = value
            continue
        where = f"the optimizer's state {key!r} of {flat.slots[0].name!r}"
        scalars[key], parts = encode(value, where)
        if parts:
            raise TypeError(
                f"{where} is a tensor of shape {tuple(value.shape)}, which is neither "
                f"a scalar nor of the shard's shape {tuple(owned.shard.shape)}; it "
                "cannot be cut into shards"
            )
    saved = SavedFlat(
        unit=unit.name,
        number=number,
        dtype=dtype_name(owned.master.dtype),
        trainable=flat.trainable,
        group=flat.group,
        size=flat.size,
        slots=[SavedSlot(s.name, list(s.shape), s.offset) for s in flat.slots],
        states={k: dtype_name(t.dtype) for k, t in tensors.items() if k is not None},
        scalars=scalars,
    )
    lazy, plan = [], net.home.plan
    for state, tensor in tensors.items():
        rests = plan.parameters if tensor is owned.shard else plan.optimizer
        read, name = partial(net.home.fetch, tensor), saved.tensor(state)
        on_disk = rests.on == "nvme"
        lazy.append(LazyTensor(name, tensor.dtype, (flat.size,), read, on_disk))
    return saved, lazy


def tied_names(net: DataParallel) -> dict[str, str]:
    """Further names of parameters, each with the one in the layout."""
    first = {
        slot.parameter: slot.name
        for unit in net.units
        for flat in unit.flats
        for slot in flat.slots
    }
    named = net.model.named_parameters(remove_duplicate=False)
    return {name: first[p] for name, p in named if first[p] != name}


def module_state(net: DataParallel) -> dict[str, Any]:
    """Persistent buffers, and what modules have as extra state, by name."""
    named = net.model.named_parameters(remove_duplicate=False)
    parameters = {name for name, _ in named}
    state = net.model.state_dict()
    return {k: v for k, v in state.items() if k not in parameters}


def group_options(net: DataParallel) -> list[dict[str, Any]]:
    """What the optimizer's groups say, but for what is the machine's."""
    return [
        {k: v for k, v in group.items() if k not in _NOT_SAVED}
        for group in net.optimizer.param_groups
    ]


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to get and set the states of Python's, torch's and NumPy's generators."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "python": (random.getstate, random.setstate),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        found["numpy"] = numpy.get_state, numpy.set_state
    return found


def random_states() -> dict[str, Any]:
    """The states of this rank's generators, by name."""
    return {name: get() for name, (get, _) in _generators().items()}


def set_random_states(states: dict[str, Any]) -> None:
    """The inverse. A generator that is missing here or there is left."""
    for name, (_, put) in _generators().items():
        if name in states:
            put(states[name])


def describe(
    net: DataParallel,
    tag: str,
    extra: dict[str, Any] | None,
    own: dict[str, Any] | None,
) -> tuple[Index, list[LazyTensor]]:
    """The index, but for its files, and what this rank has to write.

    Raises TypeError for a value that would need pickle.
    """
    flats: list[SavedFlat] = []
    written: list[LazyTensor] = []
    for unit, number, flat in flats_of(net):
        saved, shards = saved_flat(net, unit, number, flat)
        flats.append(saved)
        written += shards
    state = module_state(net)
    buffers = {k: v for k, v in state.items() if isinstance(v, Tensor)}
    written += [LazyTensor.of(f"buffers/{k}", v) for k, v in buffers.items()]
    own_trees = {
        "own": own or {},
        "random": random_states(),
        "modules": {k: v for k, v in state.items() if k not in buffers},
    }
    all_trees = own_trees | {
        "extra": extra or {},
        "groups": group_options(net),
        "precision": net.precision.state_dict(),
    }
    trees = {}
    for name, value in all_trees.items():
        trees[name], tensors = encode(value, name)
        if rank() == 0 or name in own_trees:
            written += [LazyTensor.of(k, v) for k, v in tensors.items()]
    text = bytearray(json.dumps({name: trees[name] for name in own_trees}).encode())
    written.append(LazyTensor.of("own", torch.frombuffer(text, dtype=torch.uint8)))
    # wide ones first keeps all aligned
    written.sort(key=lambda t: (not t.on_disk, -t.dtype.itemsize))
    index = Index(
        tag=tag,
        number=0,
        world_size=world_size(),
        flats=flats,
        tied=tied_names(net),
        buffers={k: [dtype_name(v.dtype), list(v.shape)] for k, v in buffers.items()},
        optimizer=type(net.optimizer).__name__,
        groups=trees["groups"],
        precision=trees["precision"],
        extra=trees["extra"],
    )
    return index, written
