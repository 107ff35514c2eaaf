"""What a parameter is while it is absent: it has its shape, and writes are refused.

Torch alone would refuse some of them, in words about memory, and lose others: what fills
all elements alike, and any write to a single one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_DATA: Any = torch._C.TensorBase.data
# in place, and no value changes
_HARMLESS = ("requires_grad_", "retain_grad_", "detach_", "rename_")


def _writes() -> list[str]:
    """The names of a tensor's methods that write to it."""
    names = [name for name in dir(Tensor) if not name.startswith("_")]
    in_place = [n for n in names if n.endswith("_") and n not in _HARMLESS]
    operators = [n for n in dir(Tensor) if n.startswith("__i")]  # `__iadd__` of `+=`
    operators = [n for n in operators if hasattr(Tensor, f"__{n[3:]}")]
    return [*in_place, *operators, "__setitem__"]


def _refusing(name: str) -> Callable[..., Any]:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        p = self.stands_for
        if p.sharded_in.building:  # `zero.Init` gathers for each operation
            with torch.set_grad_enabled(torch.is_grad_enabled() and self is p):
                return getattr(Tensor, name)(p, *args, **kwargs)
        [named] = (s.name for s in p.sharded_in.slots if s.parameter is p)
        raise RuntimeError(
            f"{name} would write to parameter {named!r}, which is sharded, and absent "
            "now, so that it would be lost; write to it inside "
            "minizero.zero.GatheredParameters([p], modifier_rank=0), on every rank"
        )

    return write


class _Refuses:
    """A tensor whose methods that write say where to write instead."""


for _name in _writes():
    setattr(_Refuses, _name, _refusing(_name))


class AbsentData(_Refuses, Tensor):
    """The `.data` of an absent parameter: to be looked at."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    stands_for: nn.Parameter

    def detach(self) -> Tensor:
        """Of this class too, or `nn.Parameter` would not take it."""
        made = super().detach().as_subclass(AbsentData)
        made.stands_for = self.stands_for
        return made


class AbsentParameter(_Refuses, nn.Parameter):
    """The class of a parameter as long as it is absent."""

    @property
    def stands_for(self) -> nn.Parameter:
        return self

    @property
    def data(self) -> Tensor:
        made = _DATA.__get__(self).as_subclass(AbsentData)
        made.stands_for = self
        return made

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)


def set_absent(p: nn.Parameter, absent: bool) -> None:
    """Give a parameter the class that it is to have; a script's own class stays."""
    if type(p) in (nn.Parameter, AbsentParameter):
        p.__class__ = AbsentParameter if absent else nn.Parameter
