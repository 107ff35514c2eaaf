"""Values for what a model has on the meta device: a unit at a time, never all at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from ..ranks.launch import device
from .units import named


def _blank(module: nn.Module) -> list[Tensor]:
    """The module's own tensors that have no values."""
    own = (*module._parameters.values(), *module._buffers.values())
    return [t for t in own if t is not None and t.is_meta]


def blank_modules(model: nn.Module) -> dict[Tensor, nn.Module]:
    """The module of each parameter and buffer on the meta device.

    Raises ValueError for a module that could not fill its own.
    """
    found: dict[Tensor, nn.Module] = {}
    for module, name in named(model).items():
        blank = _blank(module)
        if blank and not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"{name or 'the model'}, a {type(module).__name__}, has tensors on the "
                "meta device and no reset_parameters() that would give them values; "
                "write one, or build the model inside minizero.zero.Init instead"
            )
        for t in blank:
            found.setdefault(t, module)
    return found


def materialise(modules: Iterable[nn.Module | None]) -> None:
    """Put these modules' own tensors on this rank's device, and let them fill them."""
    for module in dict.fromkeys(modules):
        blank = [] if module is None else _blank(module)
        for t in blank:
            new = torch.empty_like(t, device=device())
            is_parameter = isinstance(t, nn.Parameter)
            # in place: the optimizer and other modules hold the same object
            swap_tensors(t, nn.Parameter(new, t.requires_grad) if is_parameter else new)
        if blank:
            assert module is not None
            module.reset_parameters()  # type: ignore[operator]
