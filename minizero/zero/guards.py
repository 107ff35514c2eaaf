"""Mistakes of scripts that are cheap to notice.

Writes to parameters, in place or by `p.data = values`, are taken over by the next step
if every rank makes them; sharded parameters are written to inside
`zero.GatheredParameters(..., modifier_rank=0)`. What is refused when a model is wrapped,
copied or saved raises here; what is refused in a step, in `net`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import nn
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
            start, memory = int(p.storage_offset()), p.untyped_storage()._cdata
            spans.append((memory, start, start + last + 1, name))
    shared, end, before = 0, 0, ""
    for memory, start, stop, name in sorted(spans):
        if memory == shared and start < end:
            raise ValueError(
                f"parameters {before!r} and {name!r} are two that share memory, and "
                "would be pulled apart; to tie them, assign one parameter to both "
                "modules (head.weight = embedding.weight)"
            )
        shared, end, before = memory, stop, name


def refuse_sharded_state(module: nn.Module) -> None:
    """Let `state_dict` and loading raise RuntimeError for sharded parameters."""
    if not hasattr(module, "_refuses_sharded_state"):
        module._refuses_sharded_state = True  # type: ignore[assignment]
        module.register_state_dict_pre_hook(check_unsharded)
        module.register_load_state_dict_pre_hook(check_unsharded)


def check_unsharded(module: nn.Module, *_: Any) -> None:
    """Raise RuntimeError for a module whose parameters have no values here."""
    for p in module.parameters():
        if hasattr(p, "sharded_in") and not p.sharded_in.is_unsharded:
            raise RuntimeError(
                "the parameters are sharded and have no values here; do this inside "
                "zero.GatheredParameters(model.parameters()), with modifier_rank=0 to "
                "write, or call net.state_dict() (engine.module_state_dict())"
            )


def copy_unsharded(p: Any, memo: Any = None) -> nn.Parameter:
    """For `copy.deepcopy`: a parameter of its own."""
    values = p.detach().clone()  # inside `zero.Init` this gathers
    check_unsharded(nn.ParameterList([p]))
    return nn.Parameter(values, p.requires_grad)


def reduce_unsharded(p: Any, protocol: Any) -> Any:
    """For pickle and `torch.save`."""
    return copy_unsharded(p).__reduce_ex__(protocol)
