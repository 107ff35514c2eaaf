"""What an optimizer must be like to update shards."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .flat import Flat
from .muon import Muon


def _twin(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    params: list[nn.Parameter],
) -> torch.optim.Optimizer:
    """The same optimizer with one group's options, over other parameters."""
    twin = copy.copy(optimizer)
    # a small learning rate, or none in a warm-up, would hide any difference
    rate = {"lr": 0.1} if "lr" in group else {}
    twin.param_groups = [{**group, **rate, "params": params}]
    twin.state = defaultdict(dict)
    return twin


def _same_on_pieces(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: str | None
) -> bool:
    """Whether a matrix and its flat pieces are updated alike."""
    generator = torch.Generator().manual_seed(0)
    # unless it is told, where the parameters are: a capturable one works nowhere else
    places = {p.device for p in group["params"] if not p.is_meta}
    where = device or next(iter(places), "cpu")

    def draw() -> Tensor:
        return torch.randn(4, 6, generator=generator).to(where)

    whole = nn.Parameter(draw())
    flat = whole.detach().flatten()
    pieces = [nn.Parameter(part.clone()) for part in flat.split([10, 14])]
    on_whole = _twin(optimizer, group, [whole])
    on_pieces = _twin(optimizer, group, pieces)
    for _ in range(3):
        whole.grad = draw()
        pieces[0].grad, pieces[1].grad = whole.grad.flatten().split([10, 14])
        on_whole.step()
        on_pieces.step()
    return torch.allclose(whole.flatten(), torch.cat([*pieces]), rtol=1e-4)


def check_elementwise(
    optimizer: torch.optim.Optimizer, device: str | None = None
) -> None:
    """Refuse an optimizer whose update of an element depends on others.

    A shard is a cut through flattened parameters, so the optimizer must do
    the same to a matrix as to its pieces. Tried on a small one, for each
    group of options, not looked up; on `device`, or where the parameters are.
    """
    name = type(optimizer).__name__
    advice = "use an element-wise optimizer such as AdamW or SGD"
    if isinstance(optimizer, torch.optim.Muon):
        advice = "use minizero.zero.Muon, which leaves matrices whole"
    for index, group in enumerate(optimizer.param_groups):
        if isinstance(optimizer, Muon) and optimizer.owns_whole(index):
            continue
        try:
            same = _same_on_pieces(optimizer, group, device)
        except Exception as error:
            raise ValueError(
                f"{name} does not work on one-dimensional pieces of "
                f"parameters ({error}); {advice}"
            ) from error
        if not same:
            raise ValueError(
                f"{name} needs the shape of a parameter: its update of a "
                "matrix and of the matrix's pieces differ, and shards are "
                f"pieces; {advice}"
            )


def state_made(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], like: Tensor
) -> dict[str, Any]:
    """What the optimizer makes, in its first step, as states: of [3].

    For a parameter of three elements of the dtype and on the device of
    `like`, and with one group's options.
    """
    p = nn.Parameter(torch.zeros(3, dtype=like.dtype, device=like.device))
    p.grad = torch.ones_like(p)
    twin = _twin(optimizer, group, [p])
    twin.step()
    return dict(twin.state[p])


def state_layout(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], like: Tensor
) -> dict[str, torch.dtype]:
    """Names and dtypes of the states with one value for each element.

    Those of `state_made`.
    """
    return {
        key: value.dtype
        for key, value in state_made(optimizer, group, like).items()
        if isinstance(value, Tensor) and value.shape == (3,)
    }


def is_nothing(grad: Tensor) -> Tensor:
    """Whether nobody has brought a gradient: all is NOTHING; 0-dim, on the device."""
    return ((grad == 0) & grad.real.signbit()).all()


@contextmanager
def left_alone(
    optimizer: torch.optim.Optimizer,
    every: list[tuple[Tensor, list[tuple[int, int]]]],
) -> Iterator[None]:
    """Elements that nobody has a gradient for keep their values and their states.

    As torch leaves alone a parameter whose gradient is None. A state without a value for
    each element, such as Adam's `step`, is the buffer's and counts on. `every`: what the
    optimizer updates, and elements a to b of it that may have got no gradient. Whether
    they have is not asked on the host, which would wait for the device.
    """
    kept = []
    for tensor, cuts in every:
        assert tensor.grad is not None
        state = optimizer.state.get(tensor, {})
        tensors = {None: tensor.detach(), **_elementwise(state, tensor)}
        for a, b in cuts:
            before = {key: t[a:b].clone() for key, t in tensors.items()}
            kept.append((tensor, a, b, is_nothing(tensor.grad[a:b]), before))
    yield
    for tensor, a, b, nothing, before in kept:
        state = optimizer.state.get(tensor, {})
        tensors = {None: tensor.detach(), **_elementwise(state, tensor)}
        for key, t in tensors.items():
            old = before.get(key)
            new = t[a:b]
            new.copy_(torch.where(nothing, new.new_zeros(()) if old is None else old, new))


def _elementwise(state: dict[Any, Any], like: Tensor) -> dict[Any, Tensor]:
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == like.shape
    }


def groups_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[nn.Parameter, int]:
    """The optimizer group of each parameter of the model."""
    groups = enumerate(optimizer.param_groups)
    group_of = {p: index for index, group in groups for p in group["params"]}
    for p in group_of.keys() - {*model.parameters()}:
        raise ValueError(
            f"the optimizer's group {group_of[p]} has a parameter of shape "
            f"{tuple(p.shape)} that is not the model's; make the "
            "optimizer over model.parameters()"
        )
    return group_of


def take_state(optimizer: torch.optim.Optimizer, flat: Flat) -> dict[str, Any]:
    """Move the states of a buffer's parameters out, in the buffer's layout.

    {} where there is no state yet, as with most optimizers before the first
    step (Adagrad has some from the start). A state that has not one value for
    each element, such as a step counter, must be the same for all. The shape
    does not tell: all states of a 0-dimensional parameter are 0-dimensional.
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
                    f"the optimizer's state {key!r} of {slot.name!r} is "
                    f"{value}, and {merged[key]} for others that share its "
                    "buffer; hand the optimizer over before parameters have "
                    "made unequal steps"
                )
    return merged
