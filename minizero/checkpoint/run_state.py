"""What of a training run a checkpoint holds, and where each part rests."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..zero.data_parallel import DataParallel
from ..zero.flat_buffer import Flat, Unit
from .manifest import Index, SavedFlat, SavedSlot
from ..ranks.launch import rank, world_size
from .encoding import dtype_name, encode
from .tensor_writer import Source
from ..zero.owned import Owned

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


def own_row(net: DataParallel, flat: Flat) -> Owned:
    """The row that this rank saves."""
    if not flat.numel:  # parameters without elements: nothing is made of it
        return Owned(flat, rank(), flat.full, flat.full, flat.full)
    rows = net.owned_states(flat)
    return next(owned for owned in rows if owned.index == rank())


def is_elementwise(value: Any, row: Tensor) -> TypeGuard[Tensor]:
    """Whether an optimizer's state has a value for each element of a row."""
    return isinstance(value, Tensor) and value.shape == row.shape


def saved_flat(net: DataParallel, unit: Unit, number: int, flat: Flat) -> SavedFlat:
    """What the index says of a buffer."""
    owned = own_row(net, flat)
    states, scalars = {}, {}
    for key, value in owned.state.items():
        if is_elementwise(value, owned.shard):
            states[key] = dtype_name(value.dtype)
        else:
            where = f"the optimizer's state {key!r} of {flat.slots[0].name!r}"
            scalars[key], tensors = encode(value, where)
            if tensors:
                raise TypeError(
                    f"{where} is a tensor of shape {tuple(value.shape)}, "
                    f"which is neither a scalar nor of the row's shape "
                    f"{tuple(owned.shard.shape)}; it cannot be cut into shards"
                )
    return SavedFlat(
        unit.name,
        number,
        dtype_name(owned.master.dtype),
        flat.trainable,
        flat.group,
        flat.size,
        [SavedSlot(s.name, list(s.shape), s.offset) for s in flat.slots],
        states,
        scalars,
    )


def row_sources(net: DataParallel, flat: Flat, saved: SavedFlat) -> Iterator[Source]:
    """The own row of a buffer: its values, and the optimizer's states."""
    owned = own_row(net, flat)
    tensors: dict[str | None, Tensor] = {None: owned.master}
    tensors |= {key: owned.state[key] for key in saved.states}
    for key, tensor in tensors.items():
        plan = net.home.plan
        rests = plan.parameters if tensor is owned.shard else plan.optimizer
        name, shape = saved.tensor(key), (flat.size,)
        read = partial(net.home.fetch, tensor)
        yield Source(name, tensor.dtype, shape, read, rests.on == "nvme")


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


def random_states() -> dict[str, Any]:
    """The states of this rank's generators: Python's, torch's, NumPy's."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """The inverse. A generator that is missing here or there is left."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])


def describe(
    net: DataParallel,
    tag: str,
    extra: dict[str, Any] | None,
    own: dict[str, Any] | None,
) -> tuple[Index, list[Source]]:
    """The index, but for its files, and what this rank has to write.

    Raises TypeError for a value that would need pickle.
    """
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
    sources.append(Source.of("own", torch.frombuffer(text, dtype=torch.uint8)))
    # wide ones first keeps all aligned
    sources.sort(key=lambda s: (not s.on_disk, -s.dtype.itemsize))
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
    return index, sources
