"""Mistakes of scripts that are cheap to notice.

Writes to parameters, in place or by `p.data = values`, are taken over by the next step
if every rank makes them; sharded parameters are written to inside
`zero.GatheredParameters(..., modifier_rank=0)`. What is refused raises here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..memory.plan import Plan

# the net that trains a parameter, weakly
OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def nets_of(params: Iterable[nn.Parameter]) -> list[Any]:
    """The nets that train these parameters, each once."""
    found = (OWNERS[p]() for p in params if p in OWNERS)
    return list(dict.fromkeys(net for net in found if net is not None))


def check_model(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError for a model that cannot be wrapped."""
    params = list(model.parameters())
    if nets_of(params):
        gc.collect()  # a net that nobody holds any more
    if nets_of(params):
        raise ValueError(
            "the model is wrapped already; build another, with the weights of "
            "net.state_dict()"
        )
    sharded = any(hasattr(p, "sharded_in") for p in params)
    if sharded and not plan.parameters.sharded:
        raise ValueError(
            "the model was built inside zero.Init, so its parameters are sharded; use a "
            "plan that shards parameters (stage 3), or build it outside"
        )
    for name, buffer in model.named_buffers() if sharded else ():
        if buffer.is_floating_point() and buffer.isnan().any():
            raise ValueError(
                f"buffer {name!r} has NaNs: it was computed from sharded parameters; "
                "compute it inside zero.GatheredParameters"
            )
    for name, module in model.named_modules() if plan.parameters.sharded else ():
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise ValueError(
                f"{name or 'the model'} is compiled, and parameters that are gathered "
                "and freed cannot be part of a graph; wrap the model first, then call "
                "engine.compile(), which compiles unit by unit"
            )
    _check_apart(model)


def _check_apart(model: nn.Module) -> None:
    """Refuse two parameters that share memory: one would get the other's values."""
    spans = []
    for name, p in model.named_parameters():
        if p.numel() and not p.is_meta and not hasattr(p, "sharded_in"):
            last = sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
            spans.append((p.data_ptr(), p.data_ptr() + (last + 1) * p.itemsize, name))
    end, before = 0, ""
    for start, stop, name in sorted(spans):
        if start < end:
            raise ValueError(
                f"parameters {before!r} and {name!r} are two that share memory, and "
                "would be pulled apart; to tie them, assign one parameter to both "
                "modules (head.weight = embedding.weight)"
            )
        end, before = stop, name


def check_unchanged(net: Any) -> None:
    """Raise RuntimeError for parameters that were frozen, unfrozen or got a `.grad`."""
    for p, (_, flat, slot) in net.where.items():
        if p.requires_grad != flat.trainable:
            raise RuntimeError(
                f"requires_grad of parameter {slot.name!r} has changed since the model "
                "was wrapped; set it before"
            )
        if p.grad is not None:
            raise RuntimeError(
                f"the script has set the gradient of parameter {slot.name!r}; the net "
                "keeps gradients itself: scale the loss instead, or use "
                "minizero.utils.safe_set_full_grad after backward"
            )


def note_writes(net: Any) -> None:
    """Remember the values as they are now, to notice what is written later."""
    net.noted = _state(net)


def take_over_writes(net: Any) -> None:
    """Let masters take over what the script has written since the last update."""
    check_unchanged(net)
    if net.plan.parameters.sharded:  # noticed when they are gathered
        return
    for flat in net.flats:
        for slot, view in zip(flat.slots, flat.views(), strict=True):
            p = slot.parameter
            if p.data_ptr() != view.data_ptr():
                view.copy_(p.data)
                p.data = view
                net.noted = None
    if _state(net) != net.noted:
        net.refresh()


def _state(net: Any) -> tuple[list[int], list[int]]:
    """Version counters, and checksums of values that have a copy in another dtype.

    A write through `.data` moves no counter. Without a copy it needs no notice.
    """
    copied = [
        flat.full
        for flat in net.trained
        if flat.master.dtype != flat.full.dtype and not net.plan.parameters.sharded
    ]
    sums = [_checksum(full) for full in copied]
    return (
        [0 if p.is_inference() else p._version for p in net.where],
        torch.stack(sums).tolist() if sums else [],
    )


def _checksum(buffer: Tensor) -> Tensor:
    """A sum of the buffer's bytes, taken eight at a time."""
    raw = buffer.view(torch.uint8)
    words = len(raw) // 8 * 8
    return raw[:words].view(torch.int64).sum() + raw[words:].sum(dtype=torch.int64)


def refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook on the optimizer: RuntimeError if no net has called its `step`."""
    groups = optimizer.param_groups
    if not any(p.grad is not None for group in groups for p in group["params"]):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() would change nothing: its parameters are "
            "shards, which get their gradients from the net; call net.step() "
            "(engine.step())"
        )
