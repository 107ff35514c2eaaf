"""`deepspeed.utils`: a parameter, its gradient and its optimizer states, as they are now.

Values that are spread over ranks, host memory and files are returned in fp32, complete
("full") or only this rank's part ("local", 1-D, maybe empty). All ranks must call these
functions: some plans communicate. A frozen parameter has no master, gradient or state:
None, as in DeepSpeed, and setting them is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import comm
from ..zero import nets_of


class View:
    """One parameter in the buffer that this rank updates: its elements a to b.

    `start` is the first of these elements, counted in the parameter.
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
        """This rank's part of a stored buffer, on the device, in fp32."""
        part = self.net.storage.read_shard(stored, self.a, self.b)
        return part.to(self.flat.full.device, torch.float32, copy=True)

    def write(self, stored: Tensor, part: Tensor) -> None:
        """The inverse of `read`."""
        if self.b > self.a:
            self.net.storage.write_shard(stored, part.to(stored.dtype), self.a)

    def full(self, part: Tensor) -> Tensor:
        """The parts of all ranks, in the parameter's shape."""
        if self.flat.master.numel() == self.flat.padded:
            return part.view(self.slot.shape)
        values = part.new_zeros(self.slot.numel)
        is_shared = self.flat.master.numel() < self.flat.size  # by all groups
        if is_shared or self.net.grid.number == 0:  # not a copy
            values[self.start : self.start + part.numel()] = part
        with comm.phase("view", self.unit.name):
            comm.all_reduce(values, group=self.net.group)
        return values.view(self.slot.shape)

    def part(self, value: Tensor, local: bool) -> Tensor:
        """This rank's part of a value that is to be set."""
        wanted = (self.b - self.a,) if local else tuple(self.slot.shape)
        if value.shape != wanted:
            raise ValueError(
                f"the value for {self.slot.name!r} has shape {tuple(value.shape)}, and "
                f"{wanted} is needed"
            )
        flat = value.detach().to(self.flat.full.device).flatten()
        return flat if local else flat[self.start : self.start + self.b - self.a]

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

    def gradient(self, local: bool) -> Tensor:
        """The mean gradient as it is stored, after every reduction.

        RuntimeError if there is none, or if a local one is not reduced yet.
        """
        net, name = self.net, self.slot.name
        if not net.has_gradients:
            raise RuntimeError(
                f"there is no gradient of {name!r} to set: there is one between a "
                "backward and step"
            )
        if local and net.unsynced:
            raise RuntimeError(
                f"the gradient of {name!r} is not reduced before the last micro-batch "
                'of a step; call the function with "full" in its name, on every rank'
            )
        net._means()
        assert self.flat.mean is not None
        return self.flat.mean


def _get(p: nn.Parameter, stored: Callable[[View], Tensor], local: bool) -> Any:
    """What is stored of a parameter; None if it is frozen."""
    view = View(p)
    if not view.flat.trainable:
        return None
    part = view.read(stored(view))
    return part if local else view.full(part)


def _trained(p: nn.Parameter) -> View:
    """The view of a parameter that is set; ValueError if it is frozen."""
    view = View(p)
    if not view.flat.trainable:
        raise ValueError(
            f"parameter {view.slot.name!r} is frozen: the optimizer has nothing of it; "
            "write to it inside zero.GatheredParameters([p], modifier_rank=0)"
        )
    return view


def safe_get_full_fp32_param(p: nn.Parameter, local: bool = False) -> Tensor | None:
    """The parameter as the optimizer has it."""
    return _get(p, lambda view: view.flat.master, local)


def safe_set_full_fp32_param(
    p: nn.Parameter, value: Tensor, local: bool = False
) -> None:
    """Set the parameter and its master to `value`, the same on every rank.

    In DeepSpeed the next forward still uses the old parameter.
    """
    view = _trained(p)
    net, flat = view.net, view.flat
    if getattr(flat, "holders", 0):
        raise RuntimeError(
            f"parameter {view.slot.name!r} is gathered: write to it, or call this "
            "after zero.GatheredParameters"
        )
    part = view.part(value, local)
    view.write(flat.master, part)
    view.write(flat.shard, part)
    net.shards_written(view.unit)


def safe_get_full_optimizer_state(
    p: nn.Parameter, optim_state_key: str, local: bool = False
) -> Tensor | None:
    """A state of the optimizer, such as "exp_avg", in the shape of `p`.

    ValueError for one that does not exist, as before the first update.
    """
    return _get(p, lambda view: view.state(optim_state_key), local)


def safe_set_full_optimizer_state(
    p: nn.Parameter, value: Tensor, optim_state_key: str, local: bool = False
) -> None:
    """Set a state of the optimizer to `value`, the same on every rank."""
    view = _trained(p)
    view.write(view.state(optim_state_key), view.part(value, local))


def safe_get_full_grad(p: nn.Parameter) -> Tensor | None:
    """The gradient, between a backward and `step`; else None.

    The mean over ranks of the sum over micro-batches so far. It carries the loss scale,
    as in DeepSpeed, and is not clipped yet.
    """
    view = View(p)
    net, flat = view.net, view.flat
    if not (flat.trainable and net.has_gradients):
        return None
    net.storage.wait_for_copies()
    total = None if flat.mean is None else view.full(view.read(flat.mean))
    if not net.unsynced:
        return total
    # what is not reduced yet: a sum of this rank's own
    own = view.slot.view(flat.grad_buffer()).to(torch.float32, copy=True)
    if p in flat.uninitialized:
        own.zero_()
    with comm.phase("view", view.unit.name):
        comm.all_reduce(own, average=True, group=net.group)
    return own if total is None else own + total


def safe_get_local_grad(p: nn.Parameter) -> Tensor | None:
    """This rank's part of it; RuntimeError before it is reduced."""
    view = View(p)
    if not (view.flat.trainable and view.net.has_gradients):
        return None
    return view.read(view.gradient(local=True))


def safe_set_full_grad(p: nn.Parameter, value: Tensor, local: bool = False) -> None:
    """Set the gradient to `value`, the same on every rank; reduces it first."""
    view = _trained(p)
    view.write(view.gradient(local), view.part(value, local))


# These take and return this rank's part; DeepSpeed's parts have other sizes.
safe_get_local_fp32_param = partial(safe_get_full_fp32_param, local=True)
safe_set_local_fp32_param = partial(safe_set_full_fp32_param, local=True)
safe_get_local_optimizer_state = partial(safe_get_full_optimizer_state, local=True)
safe_set_local_optimizer_state = partial(safe_set_full_optimizer_state, local=True)
safe_set_local_grad = partial(safe_set_full_grad, local=True)
