"""The hooks that hand saved tensors to a store, and what wraps a unit's forward."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .stores import Store
from .watching import note

Call = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Of a unit's name, a function and its arguments: calls it in its own way."""


class _Same:
    """A tensor that stays where it is: a parameter, or integers."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.version = x, x._version
        note(x)

    def get(self) -> Tensor:
        # hooks keep autograd from looking itself
        if self.x._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.x.shape)} that backward needs was "
                "changed in place after the forward; step the optimizer after the "
                "backward"
            )
        return self.x


def store_hooks(store: Store, unit: str) -> saved_tensors_hooks:
    """What autograd saves inside goes to the store, but parameters and integers."""
    call = store.begin(unit)

    def pack(x: Tensor) -> Any:
        base = x._base if x._is_view() else x
        stays = isinstance(base, nn.Parameter) or not x.is_floating_point()
        return _Same(x) if stays or not x.numel() else store.pack(x, call)

    def unpack(held: Any) -> Tensor:
        return held.get() if isinstance(held, _Same) else store.unpack(held)

    return saved_tensors_hooks(pack, unpack)


def wrap(name: str, module: nn.Module, call: Call) -> None:
    """From now on `module` calls its forward by `call`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(name, type(self).forward.__get__(self), args, kwargs)

    forward.wraps_unit = True  # type: ignore[attr-defined]
    # a method, which a copy of the module binds to the copy
    module.forward = MethodType(forward, module)


def unwrap(name: str, module: nn.Module) -> None:
    """Undo `wrap`; ValueError if another has set the module's forward."""
    own = module.__dict__.get("forward")
    if own is None:
        return
    if not hasattr(own, "wraps_unit"):
        raise ValueError(
            f"unit {name!r} has a forward of its own that something else has set; "
            "wrap its class instead, or call recompute_units before"
        )
    del module.forward
