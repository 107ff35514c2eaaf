"""The optimizer that a script gave: its groups hold shards now, and the net calls it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

_refusals: WeakIdKeyDictionary = WeakIdKeyDictionary()


def adopt_optimizer(
    optimizer: torch.optim.Optimizer, zero_grad: Callable[[bool], None]
) -> None:
    """Let `optimizer.zero_grad` be the net's, and `optimizer.step` say whose it is.

    `zero_grad`: a bound method, which is not kept alive.
    """
    previous: RemovableHandle | None = _refusals.pop(optimizer, None)
    if previous is not None:
        previous.remove()
    _refusals[optimizer] = optimizer.register_step_pre_hook(_refuse_step)
    forget = partial(_forget, weakref.WeakMethod(zero_grad))
    optimizer.zero_grad = forget  # type: ignore[method-assign]


def _forget(method: weakref.WeakMethod[Any], set_to_none: bool = True) -> None:
    zero_grad = method()
    if zero_grad is not None:
        zero_grad(set_to_none)


def _refuse_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    raise RuntimeError(
        f"{type(optimizer).__name__}.step() would change nothing: its parameters are "
        "shards by now, which get their gradients from the net; call net.step() "
        "(engine.step()), which reduces, clips and updates"
    )


@contextmanager
def hooks_once(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimizer's step hooks run once, however many calls an update is made of."""
    before, after = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    ran: list[None] = []

    def first(optimizer: Any, args: Any, kwargs: Any) -> None:
        for hook in before.values() if not ran else ():
            if hook is not _refuse_step:
                hook(optimizer, args, kwargs)
        ran.append(None)

    optimizer._optimizer_step_pre_hooks = OrderedDict({0: first})
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks = before
        optimizer._optimizer_step_post_hooks = after
    for hook in after.values() if ran else ():
        hook(optimizer, (), {})
