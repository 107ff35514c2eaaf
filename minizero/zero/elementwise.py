"""Optimizers that update shards: the check of one, its groups, its state."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .flat import Flat, Layout, in_order
from .muon import Muon


def _twin(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The same optimizer, with one group's options, over other parameters."""
    twin = copy.copy(optimizer)
    # a small learning rate, or none in a warm-up, would hide any difference
    rate = {"lr": 0.1} if "lr" in group else {}
    twin.param_groups = [{**group, **rate, "params": params}]
    twin.state = defaultdict(dict)
    return twin


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer whose update of an element depends on others.

    A shard is a piece of flattened parameters, so the optimizer must do the same to a
    matrix as to its pieces. This tries each group of options on a small matrix.
    """
    name = type(optimizer).__name__
    advice = "use an element-wise optimizer such as AdamW or SGD"
    if isinstance(optimizer, torch.optim.Muon):
        advice = "use minizero.zero.Muon, which leaves matrices whole"
    for group in optimizer.param_groups:
        if isinstance(optimizer, Muon) and group["use_muon"]:
            continue
        try:
            same = _same_on_pieces(optimizer, group)
        except Exception as error:
            raise ValueError(
                f"{name} does not work on one-dimensional pieces of parameters "
                f"({error}); {advice}"
            ) from error
        if not same:
            raise ValueError(
                f"{name} needs the shape of a parameter: its update of a matrix and of "
                f"the matrix's pieces differ, and shards are pieces; {advice}"
            )


def _same_on_pieces(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether a matrix and its flat pieces get the same updates."""
    generator = torch.Generator().manual_seed(0)
    # where the parameters are: a capturable optimizer works nowhere else
    places = {p.device for p in group["params"] if not p.is_meta}
    where = next(iter(places), torch.device("cpu"))

    def draw() -> Tensor:
        return torch.randn(4, 6, generator=generator).to(where)

    matrix = nn.Parameter(draw())
    cut = matrix.detach().flatten().split([10, 14])
    pieces = [nn.Parameter(part.clone()) for part in cut]
    twins = [_twin(optimizer, group, params) for params in ([matrix], pieces)]
    for _ in range(3):
        matrix.grad = draw()
        pieces[0].grad, pieces[1].grad = matrix.grad.flatten().split([10, 14])
        for twin in twins:
            twin.step()
    return torch.allclose(matrix.flatten(), torch.cat([*pieces]), rtol=1e-4)


def state_layout(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], like: Tensor
) -> dict[str, torch.dtype]:
    """Names and dtypes of the states that have one value for each element.

    Those that one step makes for three elements of the dtype of `like`.
    """
    p = nn.Parameter(torch.zeros(3, dtype=like.dtype, device=like.device))
    p.grad = torch.ones_like(p)
    twin = _twin(optimizer, group, [p])
    twin.step()
    state = twin.state[p].items()
    return {k: v.dtype for k, v in state if isinstance(v, Tensor) and v.shape == (3,)}


def groups_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[nn.Parameter, int]:
    """The optimizer group of each parameter of the model."""
    groups = enumerate(optimizer.param_groups)
    group_of = {p: index for index, group in groups for p in group["params"]}
    for p in group_of.keys() - {*model.parameters()}:
        raise ValueError(
            f"the optimizer's group {group_of[p]} has a parameter of shape "
            f"{tuple(p.shape)} that is not the model's; make the optimizer over "
            "model.parameters()"
        )
    return group_of


def layout_of(optimizer: torch.optim.Optimizer, group: int | None) -> Layout:
    """How to lay out a flat buffer of one of the optimizer's groups."""
    options = optimizer.param_groups[group] if group is not None else {}
    if isinstance(optimizer, Muon) and options.get("use_muon"):
        return optimizer.owners
    # torch's fused updates round what is left over from blocks of 64 bytes otherwise
    return partial(in_order, multiple=32) if options.get("fused") else in_order


def take_state(optimizer: torch.optim.Optimizer, flat: Flat) -> dict[str, Any]:
    """Move the states of a buffer's parameters out, in the buffer's layout.

    {} where there is no state yet. A state that has not one value for each element,
    such as a step counter, must be the same for all parameters of the buffer.
    """
    states = [optimizer.state.pop(slot.parameter, {}) for slot in flat.slots]
    if not any(states):
        return {}
    group = optimizer.param_groups[flat.group or 0]
    elementwise = state_layout(optimizer, group, flat.full)
    merged: dict[str, Any] = {}
    for slot, state in zip(flat.slots, states, strict=True):
        for key, value in state.items():
            if key in elementwise and isinstance(value, Tensor):
                if key not in merged:
                    merged[key] = value.new_zeros(flat.padded)
                slot.view(merged[key]).copy_(value)
            elif merged.setdefault(key, value) != value:
                raise ValueError(
                    f"the optimizer's state {key!r} of {slot.name!r} is {value}, and "
                    f"{merged[key]} for others that share its buffer; wrap the model "
                    "before parameters have made unequal steps"
                )
    return merged
