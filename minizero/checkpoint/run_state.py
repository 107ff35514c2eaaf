"""What of a training run a checkpoint holds, and where each part rests."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..ranks.launch import rank, world_size
from ..zero.data_parallel import DataParallel
from ..zero.flat_buffer import Flat, Unit
from ..zero.owned import Owned
from .encoding import dtype_name, encode
from .manifest import Index, SavedBuffer, SavedFlat, SavedSlot
from .tensor_file import LazyTensor

# how an optimizer computes, which is this machine's affair; and the names of
# parameters that it no longer has
_NOT_SAVED = frozenset(
    "params param_names foreach fused capturable differentiable".split()
)


def settle(net: DataParallel) -> None:
    """Let everything arrive that is under way."""
    net.synchronize()
    net.home.finish_adds()
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
        return Owned(flat, net.number, flat.full, flat.full, flat.full)
    return next(o for o in net.owned_states(flat) if o.index == net.number)


def is_elementwise(value: Any, shard: Tensor) -> TypeGuard[Tensor]:
    """Whether an optimizer's state has a value for each element of a shard."""
    return isinstance(value, Tensor) and value.shape == shard.shape


def saved_flat(
    net: DataParallel, unit: Unit, number: int, flat: Flat
) -> tuple[SavedFlat, list[LazyTensor]]:
    """What the index says of a buffer, and this rank's part of it."""
    owned, plan = own_shard(net, flat), net.home.plan
    states, scalars = {}, {}
    for key, value in owned.state.items():
        if is_elementwise(value, owned.shard):
            states[key] = value
            continue
        where = f"the optimizer's state {key!r} of {flat.slots[0].name!r}"
        scalars[key], parts = encode(value, where)
        if parts:
            raise TypeError(
                f"{where} is a tensor of shape {tuple(value.shape)}, which is neither "
                f"a scalar nor of the shard's shape {tuple(owned.shard.shape)}; it "
                "cannot be cut into shards"
            )
    grads = {
        k: v[net.numbers(v).index(net.number)] if k == "mean" else v[0]
        for k, v in net.partial_grads(flat).items()
    }
    saved = SavedFlat(
        unit=unit.name,
        number=number,
        dtype=dtype_name(owned.master.dtype),
        trainable=flat.trainable,
        group=flat.group,
        size=flat.size,
        slots=[SavedSlot(s.name, list(s.shape), s.offset) for s in flat.slots],
        states={k: dtype_name(v.dtype) for k, v in states.items()},
        scalars=scalars,
        gradients={k: dtype_name(v.dtype) for k, v in grads.items()},
    )

    def lazy(what: str, tensor: Tensor, on: str) -> LazyTensor:
        size = flat.padded if what == "gradients/local" else flat.size
        read = partial(net.home.fetch, tensor)
        # every backward adds to gradients
        steady = on == "device" and not what.startswith("gradients")
        return LazyTensor(
            saved.named(what),
            tensor.dtype,
            (size,),
            read,
            on_disk=on == "nvme",
            steady=tensor.detach() if steady else None,
        )

    rests = plan.parameters if owned.master is owned.shard else plan.optimizer
    return saved, [
        lazy("parameters", owned.master, rests.on),
        *(lazy(f"optimizer/{k}", v, plan.optimizer.on) for k, v in states.items()),
        *(lazy(f"gradients/{k}", v, plan.gradients.on) for k, v in grads.items()),
    ]


def tied_names(net: DataParallel) -> dict[str, str]:
    """Further names of parameters, each with the one in the layout."""
    slots = [slot for *_, flat in flats_of(net) for slot in flat.slots]
    first = {slot.parameter: slot.name for slot in slots}
    named = net.model.named_parameters(remove_duplicate=False)
    return {name: first[p] for name, p in named if first[p] != name}


def group_options(net: DataParallel) -> list[dict[str, Any]]:
    """What the optimizer's groups say, but for what is the machine's."""
    return [
        {k: v for k, v in group.items() if k not in _NOT_SAVED}
        for group in net.optimizer.param_groups
    ]


class Generator(NamedTuple):
    """How to get and set a generator's state, and try one on another generator."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    check: Callable[[Any], Any]


def generators() -> dict[str, Generator]:
    """Python's, torch's and NumPy's."""
    python = Generator(random.getstate, random.setstate, random.Random().setstate)
    check = torch.Generator().set_state
    found = {
        "python": python,
        "torch": Generator(torch.get_rng_state, torch.set_rng_state, check),
    }
    if torch.cuda.is_available():
        check = torch.Generator("cuda").set_state
        cuda = torch.cuda.get_rng_state, torch.cuda.set_rng_state
        found["cuda"] = Generator(*cuda, check)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        check = numpy.RandomState().set_state
        found["numpy"] = Generator(numpy.get_state, numpy.set_state, check)
    return found


def describe(
    net: DataParallel,
    tag: str,
    extra: dict[str, Any] | None,
    own: dict[str, Any] | None,
) -> tuple[Index, list[LazyTensor]]:
    """The index, but for its files, and what this rank has to write.

    Raises TypeError for a value that would need pickle.
    """
    parts = [saved_flat(net, *found) for found in flats_of(net)]
    written = [lazy for _, shards in parts for lazy in shards]
    state = net.module_state()
    buffers = {k: v for k, v in state.items() if isinstance(v, Tensor)}
    written += [LazyTensor.of(f"buffers/{k}", v) for k, v in buffers.items()]
    own_values = {
        "own": own or {},
        "random": {name: each.get() for name, each in generators().items()},
        "modules": {k: v for k, v in state.items() if k not in buffers},
    }
    all_values = own_values | {
        "extra": extra or {},
        "groups": group_options(net),
        "precision": net.precision.state_dict(),
    }
    trees = {}
    for name, value in all_values.items():
        trees[name], tensors = encode(value, name)
        if rank() == 0 or name in own_values:
            written += [LazyTensor.of(k, v) for k, v in tensors.items()]
    text = bytearray(
        json.dumps({name: trees.pop(name) for name in own_values}).encode()
    )
    written.append(LazyTensor.of("own", torch.frombuffer(text, dtype=torch.uint8)))
    # wide ones first keeps all aligned
    written.sort(key=lambda t: (not t.on_disk, -t.dtype.itemsize))
    index = Index(
        tag=tag,
        number=0,
        world_size=world_size(),
        flats=[flat for flat, _ in parts],
        tied=tied_names(net),
        buffers={
            k: SavedBuffer(dtype_name(v.dtype), list(v.shape))
            for k, v in buffers.items()
        },
        optimizer=type(net.optimizer).__name__,
        group=net.plan.group,
        **trees,
    )
    return index, written
