"""`deepspeed.utils`: what a parameter, its gradient and its states are now.

Values that are spread over ranks, host memory and files are put together in
fp32, or only this rank's part of them is. Every rank must call the functions
named "full", and `safe_set_local_fp32_param`: they communicate, under some
plans. With a `Delayed` home that holds for all of them, since an update that
is under way arrives first.

A frozen parameter has no master, gradient or state: None, as in DeepSpeed,
and setting them is an error. One that is tied has them once, whatever its
names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import comm
from ..ranks.launch import world_size
from .views import View, seen, trained


class RepeatingLoader:
    """Starts a data loader anew whenever it ends; an iterator without end.

    The loader's sampler is left alone: call its `set_epoch` yourself.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        # by `next` alone: a loader may be its own iterator, and `iter` of
        # that would start it anew
        end = object()
        batch = next(self._batches, end)
        if batch is end:
            self._batches = iter(self.loader)
            batch = next(self._batches, end)
        if batch is not end:
            return batch
        raise RuntimeError(
            f"the {type(self.loader).__name__} gives no batch when it is "
            "started again; repeat a data loader that has one, and not an "
            "iterator, which cannot be started again"
        )


def safe_get_full_fp32_param(p: nn.Parameter) -> Tensor | None:
    """The parameter as the optimizer has it, in fp32, on every rank."""
    return _get(p, View.masters, local=False)


def safe_get_local_fp32_param(p: nn.Parameter) -> Tensor | None:
    """What of it is in the shards that this rank updates: 1-D, maybe empty.

    DeepSpeed cuts each parameter for itself, so that its parts have other sizes.
    """
    return _get(p, View.masters, local=True)


def safe_get_full_optimizer_state(
    p: nn.Parameter, optim_state_key: str
) -> Tensor | None:
    """A state of the optimizer, such as "exp_avg", in the shape of `p`.

    ValueError for one that there is not, as before the first update.
    """
    return _get(p, lambda view: view.states(optim_state_key), local=False)


def safe_get_local_optimizer_state(
    p: nn.Parameter, optim_state_key: str
) -> Tensor | None:
    """This rank's part of it, 1-D."""
    return _get(p, lambda view: view.states(optim_state_key), local=True)


def safe_get_full_grad(p: nn.Parameter) -> Tensor | None:
    """The gradient, between a backward and `step`; else None.

    The mean over ranks of what has been added up so far. It carries the loss scale, as
    in DeepSpeed, and is not clipped yet.
    """
    view = seen(p)
    if view is None or not view.net.has_gradients:
        return None
    if not view.net._unsynced:
        return view.whole(view.gradients())
    # not reduced yet: each rank has a sum of its own, beside what was
    own = view.slot.view(view.flat.new_grad())
    mean = own.to(torch.float32, copy=True)
    with comm.phase("view", view.unit.name):
        comm.all_reduce(mean)
    mean.div_(world_size())
    if view.flat.total is not None:
        mean += view.whole(view.read(view.flat.total))
    return mean


def safe_get_local_grad(p: nn.Parameter) -> Tensor | None:
    """This rank's part of it, 1-D; RuntimeError before it is reduced."""
    view = seen(p)
    if view is None or not view.net.has_gradients:
        return None
    view.need_reduced()
    return torch.cat(view.gradients())


def safe_set_full_fp32_param(p: nn.Parameter, value: Tensor) -> None:
    """Set the parameter and its master to `value`, the same on every rank.

    In DeepSpeed the next forward still sees the old parameter.
    """
    _set_param(p, value, local=False)


def safe_set_local_fp32_param(p: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of it, 1-D; every rank must call it."""
    _set_param(p, value, local=True)


def safe_set_full_optimizer_state(
    p: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Set a state of the optimizer to `value`, the same on every rank."""
    _set_state(p, value, optim_state_key, local=False)


def safe_set_local_optimizer_state(
    p: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Set this rank's part of it, 1-D."""
    _set_state(p, value, optim_state_key, local=True)


def safe_set_full_grad(p: nn.Parameter, value: Tensor) -> None:
    """Set the gradient to `value`, the same on every rank.

    What micro-batches have left to be reduced is reduced first.
    """
    _set_grad(p, value, local=False)


def safe_set_local_grad(p: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of it, 1-D; RuntimeError before it is reduced."""
    _set_grad(p, value, local=True)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter],
    update_func: Callable[[Tensor, nn.Parameter], Tensor],
) -> None:
    """Set each gradient to `update_func(gradient, parameter)`."""
    for p in param_list:
        grad = safe_get_full_grad(p)
        if grad is not None:
            safe_set_full_grad(p, update_func(grad, p))


def _get(
    p: nn.Parameter, rests: Callable[[View], list[Tensor]], local: bool
) -> Tensor | None:
    """What rests by owned shard: this rank's part of it, or in the shape of `p`."""
    view = seen(p)
    if view is None:
        return None
    parts = view.read(rests(view))
    return torch.cat(parts) if local else view.whole(parts)


def _set_state(p: nn.Parameter, value: Tensor, key: str, local: bool) -> None:
    view = trained(p)
    view.write(view.states(key), view.split(value, local))


def _set_param(p: nn.Parameter, value: Tensor, local: bool) -> None:
    view = trained(p)
    if getattr(view.flat, "pinned", 0):
        raise RuntimeError(
            f"parameter {view.slot.name!r} is gathered: write to it, or call "
            "this after zero.GatheredParameters"
        )
    net = view.net
    net.finish()
    parts = view.split(value, local)
    view.write(view.masters(), parts)
    # a 16-bit shard is always its master's rounding
    shards = [owned.shard for owned in view.owned()]
    view.write(shards, [part.float() for part in parts])
    net.updated([view.unit])
    net.finish()


def _set_grad(p: nn.Parameter, value: Tensor, local: bool) -> None:
    view = trained(p)
    net = view.net
    if not net.has_gradients:
        raise RuntimeError(
            f"there is no gradient of {view.slot.name!r} to set: there is "
            "one between a backward and step"
        )
    if local:
        view.need_reduced()
    parts = view.split(value, local)
    net._finish_gradients()
    view.write(net.owned_grads(view.flat), parts)
