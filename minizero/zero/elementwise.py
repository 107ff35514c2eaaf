"""Optimizers that update shards: the check of one, its groups, its state."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .flat import Flat, Layout, in_order
from .muon import Muon


def _twin(
    optimizer: Optimizer, group: dict[str, Any], params: list[nn.Parameter]
) -> Optimizer:
    """The same optimizer, with one group's options, over other parameters."""
    twin = copy.copy(optimizer)
    # a small learning rate, or none in a warm-up, would hide any difference
    rate = {"lr": 0.1} if "lr" in group else {}
    twin.param_groups = [{**group, **rate, "params": params}]
    twin.state = defaultdict(dict)
    return twin


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer whose update of an element depends on others.

    A shard is a piece of flattened parameters, so the optimizer must do the same to a
    matrix as to its pieces. This tries each group of options on a small matrix.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, Muon) and group["use_muon"]:
            continue
        problem = "it would update the pieces of a matrix otherwise than the matrix"
        try:
            if _same_on_pieces(optimizer, group):
                continue
        except Exception as error:
            problem = str(error)
        advice = "use an element-wise optimizer such as AdamW or SGD"
        if isinstance(optimizer, torch.optim.Muon):
            advice = "use minizero.zero.Muon, which leaves matrices whole"
        raise ValueError(
            f"{type(optimizer).__name__} needs the shape of a parameter, and shards are "
            f"pieces of flattened ones ({problem}); {advice}"
        )


def _same_on_pieces(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a matrix and its flat pieces get the same updates."""
    generator = torch.Generator().manual_seed(0)
    # where the parameters are: a capturable optimizer works nowhere else
    where = next((p.device for p in group["params"]), None)
    start, *grads = torch.randn(4, 4, 6, generator=generator).to(where)
    matrix = nn.Parameter(start)
    pieces = [nn.Parameter(part.clone()) for part in start.flatten().split([10, 14])]
    twins = [_twin(optimizer, group, params) for params in ([matrix], pieces)]
    for matrix.grad in grads:
        pieces[0].grad, pieces[1].grad = matrix.grad.flatten().split([10, 14])
        for twin in twins:
            twin.step()
    return torch.allclose(matrix.flatten(), torch.cat([*pieces]), rtol=1e-4)


def state_layout(
    optimizer: Optimizer, group: dict[str, Any], like: Tensor
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


def groups_of(model: nn.Module, optimizer: Optimizer) -> dict[nn.Parameter, int]:
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


def layout_of(optimizer: Optimizer, group: int | None) -> Layout:
    """How to lay out a flat buffer of one of the optimizer's groups."""
    options = optimizer.param_groups[group] if group is not None else {}
    if isinstance(optimizer, Muon) and options.get("use_muon"):
        return optimizer.owners
    # torch's fused updates round what is left over from blocks of 64 bytes otherwise
    return partial(in_order, multiple=32) if options.get("fused") else in_order


def initial_state(optimizer: Optimizer, flat: Flat) -> dict[str, Tensor]:
    """For a shard, the state that Adagrad has made at construction; {} of most others.

    ValueError for an optimizer that has made steps.
    """
    states = [optimizer.state.pop(slot.parameter, {}) for slot in flat.slots]
    made: dict[str, Tensor] = {}
    for key in states[0]:
        values = torch.cat([torch.as_tensor(s[key]).flatten() for s in states])
        first = values[:1].sum()  # 0 where there are no elements
        if (values != first).any() or (key == "step" and first):
            raise ValueError(
                f"{type(optimizer).__name__} has made steps, and its state cannot be "
                "sharded any more; wrap the model before, or load a checkpoint after"
            )
        made[key] = first
    if made:
        group = optimizer.param_groups[flat.group or 0]
        for key, dtype in state_layout(optimizer, group, flat.master).items():
            value = made[key].item()
            made[key] = torch.full_like(flat.master, value, dtype=dtype)
    return made
