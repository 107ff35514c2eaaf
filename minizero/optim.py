"""What an optimizer must be like to update shards."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from minizero.flat import Flat


def _twin(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The same optimizer with the same options, over other parameters."""
    twin = copy.copy(optimizer)
    twin.param_groups = [{**optimizer.param_groups[0], "params": params}]
    twin.state = defaultdict(dict)
    return twin


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on its neighbours.

    A shard is a cut through flattened parameters, so the optimizer must do the same
    to a matrix as to its pieces. Tried out here on a small one, not looked up.
    """
    name, generator = type(optimizer).__name__, torch.Generator().manual_seed(0)
    whole = nn.Parameter(torch.randn(4, 6, generator=generator))
    flat = whole.detach().flatten()
    pieces = [nn.Parameter(flat[:10].clone()), nn.Parameter(flat[10:].clone())]
    try:
        on_whole, on_pieces = _twin(optimizer, [whole]), _twin(optimizer, pieces)
        for _ in range(3):
            whole.grad = torch.randn(4, 6, generator=generator)
            pieces[0].grad, pieces[1].grad = whole.grad.flatten().split([10, 14])
            on_whole.step()
            on_pieces.step()
        same = torch.allclose(whole.flatten(), torch.cat([*pieces]), rtol=1e-4)
    except Exception as error:
        raise ValueError(
            f"{name} does not work on one-dimensional pieces of parameters "
            f"({error}); use an element-wise optimizer such as AdamW or SGD"
        ) from error
    if not same:
        raise ValueError(
            f"{name} needs the shape of a parameter: its update of a matrix "
            "and of the matrix's pieces differ, and shards are pieces; use an "
            "element-wise optimizer such as AdamW or SGD"
        )


def groups_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[nn.Parameter, int]:
    """The optimizer group of each parameter of the model."""
    known = set(model.parameters())
    group_of: dict[nn.Parameter, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p not in known:
                raise ValueError(
                    f"the optimizer's group {index} has a parameter of shape "
                    f"{tuple(p.shape)} that is not the model's; make the optimizer "
                    "over model.parameters()"
                )
            group_of[p] = index
    return group_of


def take_state(optimizer: torch.optim.Optimizer, flat: Flat) -> dict[str, Any]:
    """Move the states of a buffer's parameters out, into buffers of its layout.

    {} where there is no state yet, as with most optimizers before the first step
    (Adagrad has some from the start). A state that is no tensor of the parameter's
    shape, such as a step counter, must be the same for all of them.
    """
    states = [optimizer.state.pop(slot.parameter, {}) for slot in flat.slots]
    merged: dict[str, Any] = {}
    for slot, state in zip(flat.slots, states, strict=True):
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == slot.shape:
                if key not in merged:
                    merged[key] = value.new_zeros(flat.padded)
                slot.view(merged[key]).copy_(value)
            elif merged.setdefault(key, value) != value:
                raise ValueError(
                    f"the optimizer's state {key!r} of {slot.name!r} is {value}, and "
                    f"{merged[key]} for others that share its buffer; hand the "
                    "optimizer over before parameters have made unequal steps"
                )
    return merged
