"""`deepspeed.utils`: a parameter, its gradient and its optimizer states, as they are now.

Values that are spread over ranks, host memory and files are returned in fp32, in the
parameter's shape. All ranks must call these functions: some plans communicate. A frozen
parameter has no master, gradient or state: None, as in DeepSpeed, and setting them is an
error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import comm
from ..zero import nets_of


class StoredParameter:
    """Reads and writes one parameter in the buffers that the ranks store.

    Elements `a` to `b` of this rank's shard are the parameter's, none if a = b. They
    begin at element `start` of the flattened parameter.
    """

    def __init__(self, p: nn.Parameter) -> None:
        nets = nets_of([p]) if isinstance(p, nn.Parameter) else []
        if not nets:
            raise ValueError(
                f"this {type(p).__name__} belongs to no model that minizero trains; "
                "pass one of engine.module.parameters(), as it is now"
            )
        self.net = nets[0]
        self.net.synchronize()  # a delayed update arrives first
        self.unit, self.flat, self.slot = self.net.where[p]
        first, numel = self.slot.offset - self.flat.start, self.flat.master.numel()
        self.a = min(max(first, 0), numel)
        self.b = min(max(first + self.slot.numel, 0), numel)
        self.start = self.a - first if self.b > self.a else 0

    def read(self, stored: Tensor) -> Tensor:
        """The whole parameter's values in a stored buffer, on the device, in fp32.

        Each rank puts its elements into zeros, and the sum over ranks has them all.
        """
        part = self.net.storage.read_shard(stored, self.a, self.b)
        part = part.to(self.flat.full.device, torch.float32, copy=True)
        if self.flat.master.numel() == self.flat.padded:  # this rank has all
            return part.view(self.slot.shape)
        values = part.new_zeros(self.slot.numel)
        # where each group of ranks has a copy, only the first group's counts
        is_copied = self.flat.master.numel() == self.flat.size
        if not is_copied or self.net.grid.number == 0:
            values[self.start : self.start + part.numel()] = part
        with comm.phase("view", self.unit.name):
            comm.all_reduce(values, group=self.net.group)
        return values.view(self.slot.shape)

    def write(self, stored: Tensor, value: Tensor) -> None:
        """Store this rank's part of a value, which is the same on every rank."""
        if value.shape != self.slot.shape:
            raise ValueError(
                f"the value for {self.slot.name!r} has shape {tuple(value.shape)}, and "
                f"{tuple(self.slot.shape)} is needed"
            )
        if self.b > self.a:
            part = value.detach().flatten()[self.start : self.start + self.b - self.a]
            part = part.to(self.flat.full.device, stored.dtype)
            self.net.storage.write_shard(stored, part, self.a)

    def state(self, key: str) -> Tensor:
        """An optimizer state as it is stored."""
        states = self.net.optimizer.state[self.flat.master]
        found = states.get(key)
        if isinstance(found, Tensor) and found.shape == self.flat.master.shape:
            return found
        names = [k for k, v in states.items() if isinstance(v, Tensor) and v.ndim]
        known = f"it keeps {', '.join(names)}"
        raise ValueError(
            f"the optimizer keeps no {key!r} for the elements of {self.slot.name!r}; "
            f"{known if names else 'it has no states before the first update'}"
        )


def _get(p: nn.Parameter, stored: Callable[[StoredParameter], Tensor]) -> Tensor | None:
    """What is stored of a parameter; None if it is frozen."""
    view = StoredParameter(p)
    return view.read(stored(view)) if view.flat.trainable else None


def _trained(p: nn.Parameter) -> StoredParameter:
    """Where to write a parameter that the optimizer updates; ValueError if frozen."""
    view = StoredParameter(p)
    if not view.flat.trainable:
        raise ValueError(
            f"parameter {view.slot.name!r} is frozen: the optimizer has nothing of it; "
            "write to it inside zero.GatheredParameters([p], modifier_rank=0)"
        )
    return view


def safe_get_full_fp32_param(p: nn.Parameter) -> Tensor | None:
    """The parameter as the optimizer has it."""
    return _get(p, lambda view: view.flat.master)


def safe_set_full_fp32_param(p: nn.Parameter, value: Tensor) -> None:
    """Set the parameter and its master to `value`, the same on every rank.

    Inside `zero.GatheredParameters`, write to the parameter instead. (In DeepSpeed the
    next forward still uses the old parameter.)
    """
    view = _trained(p)
    view.write(view.flat.master, value)
    view.write(view.flat.shard, value)
    view.net.shards_written(view.unit)


def safe_get_full_optimizer_state(
    p: nn.Parameter, optim_state_key: str
) -> Tensor | None:
    """A state of the optimizer, such as "exp_avg", in the shape of `p`.

    ValueError for one that does not exist, as before the first update.
    """
    return _get(p, lambda view: view.state(optim_state_key))


def safe_set_full_optimizer_state(
    p: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Set a state of the optimizer to `value`, the same on every rank."""
    view = _trained(p)
    view.write(view.state(optim_state_key), value)


def safe_get_full_grad(p: nn.Parameter) -> Tensor | None:
    """The gradient, between a backward and `step`; else None.

    The mean over ranks of the sum over micro-batches so far. It carries the loss scale,
    as in DeepSpeed, and is not clipped yet.
    """
    view = StoredParameter(p)
    net, flat = view.net, view.flat
    if not (flat.trainable and net.has_gradients):
        return None
    net.storage.wait_for_copies()
    total = None if flat.mean is None else view.read(flat.mean)
    if not net.unsynced:
        return total
    # what is not reduced yet: a sum of this rank's own
    own = view.slot.view(flat.full_grad()).to(torch.float32, copy=True)
    with comm.phase("view", view.unit.name):
        comm.all_reduce(own, average=True, group=net.group)
    return own if total is None else own + total


def safe_set_full_grad(p: nn.Parameter, value: Tensor) -> None:
    """Set the mean gradient to `value`, times the loss scale; equal on all ranks."""
    view = _trained(p)
    if not view.net.has_gradients:
        raise RuntimeError(
            f"there is no gradient of {view.slot.name!r} to set: there is one between a "
            "backward and step"
        )
    view.net._means()
    assert view.flat.mean is not None
    view.write(view.flat.mean, value)
