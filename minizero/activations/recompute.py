"""Less saved for backward: recomputation, whole or selective."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..zero.flat import Policy, find_units
from .saved_tensors import note, noting
from .stores import Store


Keep = Callable[..., bool]

_KEPT = (
    "mm",
    "addmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def keep_matmuls(op: Any, *args: Any) -> bool:
    """Keep what linear layers and fused attention return.

    What is computed again is cheap: norms, activation functions, and the
    scores of an attention that is not fused, which are all that Korthikanti
    et al. (2022, sec. 4.2) call selective.
    """
    return op._schema.name.removeprefix("aten::") in _KEPT


def selective_contexts(
    keep: Keep,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward and of its recomputation."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if keep(op, *args):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    forward, backward = create_selective_checkpoint_contexts(policy)
    return noting(keep, forward), backward


def store_hooks(store: Store, unit: str) -> saved_tensors_hooks:
    """Hand to the store what autograd saves, but parameters and integers."""
    call = store.begin(unit)

    def pack(x: Tensor) -> Any:
        base = x._base if x._is_view() else x
        stays = isinstance(base, nn.Parameter) or not x.is_floating_point()
        if not stays and x.numel():
            return False, store.pack(x, call)
        note(x)
        return True, (x, x._version)

    def unpack(packed: Any) -> Tensor:
        stays, held = packed
        if not stays:
            return store.unpack(held)
        x, version = held
        if x._version != version:  # autograd does not check behind hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(x.shape)} that backward needs was "
                "changed in place after the forward; step the optimizer after "
                "the backward"
            )
        return x

    return saved_tensors_hooks(pack, unpack)


MODES = ("none", "selective", "full")


class Recompute:
    """Calls functions so that less of what they compute is saved.

    `mode`: "full" saves the arguments and computes the rest again in backward
    (Chen et al. 2016); "selective" also saves what `keep` chooses; "none"
    saves all.
    `store`: where the saved arguments wait, or with "none" everything that is
    saved but parameters (default: on the device).
    `keep`: of an operator and its arguments, whether to keep its results.
    """

    def __init__(
        self,
        mode: str = "full",
        store: Store | None = None,
        keep: Keep = keep_matmuls,
    ) -> None:
        if mode not in MODES:
            raise ValueError(
                f"mode must be one of {', '.join(MODES)}, not {mode!r}"
            )
        if mode == "none" and store is not None and store.replicated:
            raise ValueError(
                f"{type(store).__name__} takes only tensors that are identical "
                "on all ranks, and inside a unit they differ; use it with mode "
                "'full' or 'selective', which store the unit's input"
            )
        self.mode, self.store = mode, store
        self.options: dict[str, Any] = {}  # of torch's `checkpoint`
        if mode == "selective":
            self.options["context_fn"] = partial(selective_contexts, keep)

    def __call__(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """`function(*args, **kwargs)`."""
        name = getattr(function, "__qualname__", type(function).__name__)
        return self.call(name, function, args, kwargs)

    def call(
        self, unit: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """The same, as the unit of a name."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with store_hooks(self.store or Store(), unit):
            if self.mode == "none":
                return function(*args, **kwargs)
            # by position: torch would store keyword arguments itself, unseen
            leaves, spec = tree_flatten((args, kwargs))

            def inside(*leaves: Any) -> Any:
                args, kwargs = tree_unflatten(list(leaves), spec)
                return function(*args, **kwargs)

            return checkpoint(
                inside, *leaves, use_reentrant=False, **self.options
            )

    def wrap(self, name: str, module: nn.Module) -> None:
        """Let `module` call its forward in this way."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            own = type(module).forward.__get__(module)
            return self.call(name, own, args, kwargs)

        forward.wraps_unit = True  # type: ignore[attr-defined]
        # a method, which a copy of the module binds to the copy
        module.forward = MethodType(forward, module)


CHECKPOINT = Recompute("full")
"""How `deepspeed.checkpointing.checkpoint` calls functions in this process."""


def recompute_units(
    model: nn.Module,
    how: Recompute | str = "full",
    *,
    units: Policy | None = None,
    number: int | None = None,
) -> list[str]:
    """From now on the units of `model` save what `how` says.

    `how`: a `Recompute`, or its mode; "none" undoes an earlier call.
    `units`: says which modules are units (default: as `find_units`).
    `number`: how many, the first ones (default: all). The last unit's
    backward comes right after its forward, so that recomputing it saves
    least.

    Wraps the modules' `forward`, inside their hooks: call it before or after
    `parallelize`. Returns the units' names.
    """
    how = Recompute(how) if isinstance(how, str) else how
    found = {n: m for n, m in find_units(model, units).items() if n}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no units to recompute; keep its "
            "blocks in an nn.ModuleList or nn.Sequential, or pass `units`"
        )
    chosen = list(found)[:number]
    for name, module in found.items():
        if "forward" in vars(module):
            if not hasattr(module.forward, "wraps_unit"):
                raise ValueError(
                    f"unit {name!r} has a forward of its own that something "
                    "else has set; call recompute_units before that"
                )
            del module.forward
        if name in chosen and (how.mode != "none" or how.store is not None):
            how.wrap(name, module)
    return chosen
