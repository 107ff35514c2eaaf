"""Less saved for backward: checkpointing, and stores for what remains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from minizero.flat import Policy, find_units
from minizero.saved import note, watching
from minizero.stores import Store

MODES = ("none", "selective", "full")

_KEPT = (
    "mm",
    "addmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

Keep = Callable[..., bool]


def keep_matmuls(op: Any, *args: Any) -> bool:
    """Keep what linear layers and fused attention return.

    What is computed again is cheap: norms, activation functions, and the
    scores of an attention that is not fused, which are all that Korthikanti
    et al. (2022, sec. 4.2) call selective.
    """
    return op._schema.name.removeprefix("aten::") in _KEPT


class _Kept(TorchDispatchMode):
    """Tells who looks of what selective checkpointing keeps."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self._keep = keep

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._keep(func, *args):
            for x in tree_iter(out):
                if isinstance(x, Tensor):
                    note(x, func._schema.name)
        return out


@contextmanager
def _both(
    first: AbstractContextManager[Any], second: AbstractContextManager[Any]
) -> Iterator[None]:
    with first, second:
        yield


def _selective(keep: Keep) -> tuple[AbstractContextManager[Any], ...]:
    """The contexts of a forward and of its recomputation."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if keep(op, *args):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    forward, again = create_selective_checkpoint_contexts(policy)
    if watching():
        forward = _both(forward, _Kept(keep))
    return forward, again


class Checkpointing:
    """Calls functions so that less of what they compute is saved.

    `mode`: "full" saves the arguments and computes the rest again in backward
    (Chen et al. 2016); "selective" saves what `keep` says as well; "none"
    saves all.
    `store`: where the saved arguments wait, or with "none" everything that is
    saved but parameters (default: on the device).
    `keep`: of an operator and its arguments, whether to keep its results.
    `preserve_rng_state`: recompute with the random numbers of the forward.
    """

    def __init__(
        self,
        mode: str = "full",
        store: Store | None = None,
        keep: Keep = keep_matmuls,
        preserve_rng_state: bool = True,
    ) -> None:
        if mode not in MODES:
            raise ValueError(
                f"mode must be one of {', '.join(MODES)}, not {mode!r}"
            )
        if mode == "none" and store is not None and store.replicated:
            raise ValueError(
                f"{type(store).__name__} needs tensors that all ranks have "
                "alike, and inside a unit they differ; use it with mode "
                "'full' or 'selective', which store the unit's input"
            )
        self.mode, self.store, self.keep = mode, store, keep
        self.preserve_rng_state = preserve_rng_state

    @property
    def active(self) -> bool:
        """Whether it changes anything."""
        return self.mode != "none" or self.store is not None

    def __call__(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """`function(*args, **kwargs)`."""
        name = getattr(function, "__qualname__", type(function).__name__)
        return self.call(name, function, args, kwargs)

    def call(
        self,
        unit: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The same, as the unit of a name."""
        if not self.active or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        store = self.store or Store()
        pack = partial(_pack, store, store.begin(unit))
        # Only what is saved first reaches these hooks when checkpointing: the
        # arguments. Inside, torch's own hooks throw away what is saved.
        with saved_tensors_hooks(pack, partial(_unpack, store)):
            if self.mode == "none":
                return function(*args, **kwargs)
            return self._checkpoint(function, args, kwargs)

    def _checkpoint(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        # by position: torch would hold on to keyword arguments itself
        leaves, spec = tree_flatten((args, kwargs))

        def call(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(list(leaves), spec)
            return function(*args, **kwargs)

        options: dict[str, Any] = {}
        if self.mode == "selective":
            options["context_fn"] = partial(_selective, self.keep)
        return checkpoint(
            call,
            *leaves,
            use_reentrant=False,
            preserve_rng_state=self.preserve_rng_state,
            **options,
        )


@dataclass
class _Same:
    """A tensor that stays where it is: a parameter, or integers."""

    x: Tensor
    version: int


def _pack(store: Store, call: Any, x: Tensor) -> Any:
    base = x._base if x._is_view() else x
    stays = isinstance(base, nn.Parameter) or not x.is_floating_point()
    if stays or not x.numel():
        note(x)
        return _Same(x, x._version)
    return store.pack(x, call)


def _unpack(store: Store, held: Any) -> Tensor:
    if not isinstance(held, _Same):
        return store.unpack(held)
    # hooks keep autograd from looking itself
    if held.x._version != held.version:
        raise RuntimeError(
            f"a tensor of shape {tuple(held.x.shape)} that backward needs "
            "was changed in place after the forward; step the optimizer "
            "after the backward"
        )
    return held.x


def checkpoint_units(
    model: nn.Module,
    how: Checkpointing | str = "full",
    *,
    units: Policy | None = None,
    number: int | None = None,
) -> list[str]:
    """From now on the units of `model` save what `how` says.

    `how`: a `Checkpointing`, or its mode; "none" undoes an earlier call.
    `units`: says which modules are units (default: as `find_units`).
    `number`: how many, the first ones (default: all). The last unit's
    backward comes right after its forward, so that recomputing it saves
    least.

    Wraps the modules' `forward`, inside their hooks: call it before or after
    `parallelize`. Returns the units' names.
    """
    how = Checkpointing(how) if isinstance(how, str) else how
    found = {n: m for n, m in find_units(model, units).items() if n}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no units to checkpoint; keep its "
            "blocks in an nn.ModuleList or nn.Sequential, or pass `units`"
        )
    if number is not None and not 0 <= number <= len(found):
        raise ValueError(
            f"number must be 0 to {len(found)}, the number of units, not "
            f"{number!r}"
        )
    for name, module in found.items():
        _restore(name, module)
    chosen = list(found)[:number]
    for name in chosen if how.active else ():
        _wrap(name, found[name], how)
    return chosen


def _wrap(name: str, module: nn.Module, how: Checkpointing) -> None:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = type(self).forward.__get__(self)
        return how.call(name, function, args, kwargs)

    forward.checkpointing = how  # type: ignore[attr-defined]
    # a method, which a copy of the module binds to the copy
    module.forward = MethodType(forward, module)


def _restore(name: str, module: nn.Module) -> None:
    own = module.__dict__.get("forward")
    if own is None:
        return
    if not hasattr(own, "checkpointing"):
        raise ValueError(
            f"unit {name!r} has a forward of its own that something else has "
            "set; wrap its class instead, or checkpoint before"
        )
    del module.forward
