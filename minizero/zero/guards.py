"""Refuse mistakes that a script makes when it wraps, copies or saves a model.

`Net` refuses those in a step. Writes to parameters, in place or by `p.data = values`,
are no mistake if every rank makes them: the next step takes them over. Sharded
parameters are written to inside `zero.GatheredParameters(..., modifier_rank=0)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..memory.plan import Plan

# the net that trains a parameter, weakly
NET_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()


def nets_of(params: Iterable[nn.Parameter]) -> list[Any]:
    """The nets that train these parameters, each once."""
    found = (NET_OF[p]() for p in params if p in NET_OF)
    return list(dict.fromkeys(net for net in found if net is not None))


def is_sharded(p: Any) -> bool:
    """Whether a parameter lies in a sharded buffer, which may be unsharded now."""
    return hasattr(p, "sharded_in")


def check_model(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError for a model that cannot be wrapped."""
    if nets_of(model.parameters()):
        raise ValueError(
            "the model is wrapped already; build another, with the weights of "
            "net.state_dict()"
        )
    sharded = any(map(is_sharded, model.parameters()))
    if sharded and not plan.parameters.sharded:
        raise ValueError(
            "the model was built inside zero.Init, so its parameters are sharded; use a "
            "plan that shards parameters (stage 3), or build it outside"
        )
    for name, module in model.named_modules() if plan.parameters.sharded else ():
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise ValueError(
                f"{name or 'the model'} is compiled, and parameters that are gathered "
                "and freed cannot be part of a graph; wrap the model first, then call "
                "engine.compile(), which compiles unit by unit"
            )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "the model is on the meta device, without values; build it inside zero.Init, "
            "which shards each layer as soon as that has its values"
        )
    names: dict[tuple[int, int], str] = {}
    for name, p in model.named_parameters() if not sharded else ():
        place = p.untyped_storage()._cdata, int(p.storage_offset())
        if names.setdefault(place, name) != name and p.numel():
            raise ValueError(
                f"parameters {names[place]!r} and {name!r} are two that share memory, "
                "and would be pulled apart; to tie them, assign one parameter to both "
                "modules (head.weight = embedding.weight)"
            )


def move(p: Any, to: Any, view: Tensor) -> None:
    """Copy a parameter to its place in a sharded buffer, which it belongs to from now on.

    If `zero.Init` has sharded it, the buffer that it had there is freed.
    """
    if (source := getattr(p, "sharded_in", None)) is not None:
        source.gather().wait()
    with torch._C.DisableTorchFunction():  # inside `zero.Init` this would gather
        view.copy_(p.detach())
    p.sharded_in = to
    p.__deepcopy__ = partial(copy_unsharded, p)  # and for pickle and `torch.save`:
    p.__reduce_ex__ = lambda protocol: copy_unsharded(p).__reduce_ex__(protocol)
    if source is not None:
        source.slots = source.parameters = source.placeholders = []
        source.free()


class Hook(partial[Any]):
    """A method of a net as a hook on a module; a copy of the module calls nothing."""

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    """What the hooks of a copied module call."""


def refuse_sharded_state(module: nn.Module) -> None:
    """Let `state_dict` and loading raise RuntimeError for sharded parameters."""
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
