"""What an engine refuses, in sentences."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from ..zero import DataParallel


def check_alive(destroyed: bool, net: DataParallel) -> None:
    """Raise RuntimeError once the engine was destroyed, or another has its model."""
    if net.over:
        raise RuntimeError(
            "another minizero.initialize has taken over this engine's model; go on with "
            "that engine"
        )
    if destroyed:
        raise RuntimeError(
            "this engine was destroyed; make a new one, of a new model, "
            "and load a checkpoint into it"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise RuntimeError unless there is one."""
    if optimizer is None:
        raise RuntimeError(
            "this engine has no optimizer: it evaluates, and does not "
            "train; give minizero.initialize an optimizer, or name one "
            "in the config"
        )


def check_loss(loss: Any) -> None:
    """Raise TypeError or ValueError unless backward can start from it."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            "backward takes the loss, a tensor with one element, not a "
            f"{type(loss).__name__}"
        )
    if loss.numel() != 1:
        raise ValueError(
            "backward takes the loss, a tensor with one element, not one of "
            f"shape {tuple(loss.shape)}; take its mean or sum first"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss requires no gradient; compute it outside of "
            "torch.no_grad(), from the engine's output"
        )


def check_options(scheduler: Any, options: dict[str, Any]) -> None:
    """Raise TypeError if the scheduler's step does not take the options.

    Called before an update: after it, the two would be at different steps.
    """
    if scheduler is None:
        return
    try:
        inspect.signature(scheduler.step).bind(**options)
    except TypeError as error:
        raise TypeError(
            f"{type(scheduler).__name__}.step has other arguments than "
            f"{options} ({error}); pass them by name, as in "
            'engine.step(lr_kwargs={"metrics": loss})'
        ) from None
