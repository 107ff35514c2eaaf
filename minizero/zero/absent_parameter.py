"""What a parameter is while it is absent: it has its shape, and writes are refused.

Torch alone would refuse some of them, in words about memory, and lose others: what fills
all elements alike, and any write to a single one. Refused are methods that write, NumPy's
view of the memory, functions that write to `.data` (by `out=`, or a name that ends in
`_`), and other values as `.data`, which `model.half()` and `vector_to_parameters` give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

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
    return [*in_place, *operators, "__setitem__", "numpy"]


def _refusing(name: str) -> Callable[..., Any]:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        p = self.stands_for
        if p.sharded_in.building:  # `zero.Init` gathers for each operation
            with torch.set_grad_enabled(torch.is_grad_enabled() and self is p):
                return getattr(Tensor, name)(p, *args, **kwargs)
        _refuse(p, name)

    return write


def _named(p: Any) -> str:
    [named] = (s.name for s in p.sharded_in.slots if s.parameter is p)
    return named


def _refuse(p: Any, name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} would write to parameter {_named(p)!r}, which is sharded, and absent "
        "now, so that it would be lost; write to it inside "
        "minizero.zero.GatheredParameters([p], modifier_rank=0), on every rank"
    )


def _tensors(x: Any) -> list[Any]:
    return list(x) if isinstance(x, list | tuple) else [x]


class _Refuses:
    """A tensor whose methods that write say where to write instead."""


for _name in _writes():
    setattr(_Refuses, _name, _refusing(_name))


def _of(t: Any) -> Any:
    """The parameter that it stands for."""
    return t.stands_for


class AbsentData(_Refuses, Tensor):
    """The `.data` of an absent parameter: to be looked at."""

    stands_for: nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        written = _tensors(kwargs.get("out"))
        if name.endswith("_") and not name.endswith("__") and name not in _HARMLESS:
            written += _tensors(args[0])
        for t in written:
            if isinstance(t, _Refuses) and not _of(t).sharded_in.building:
                _refuse(_of(t), name)
        plain: Any = torch._C._disabled_torch_function_impl
        return plain(func, types, args, kwargs)

    def detach(self) -> Tensor:
        """Of this class too, or `nn.Parameter` would not take it."""
        made = super().detach().as_subclass(type(self))
        made.stands_for = self.stands_for
        return made


class Detached(AbsentData):
    """The same of `detach()`, by which `nn.Parameter(p)` begins."""

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:
        """Refused: what trains from here would be NaN for good."""
        raise RuntimeError(
            f"parameter {_named(self.stands_for)!r} is sharded, and absent now, so that "
            "nothing can be made of its values; do it inside "
            "minizero.zero.GatheredParameters([p]), on every rank"
        )


class AbsentParameter(_Refuses, nn.Parameter):
    """The class of a parameter as long as it is absent."""

    @property
    def stands_for(self) -> nn.Parameter:
        return self

    @property
    def data(self) -> Tensor:
        return self._seen_as(AbsentData)

    @data.setter
    def data(self, values: Tensor) -> None:
        own: Any = self.sharded_in  # type: ignore[attr-defined]
        alias = torch._C._is_alias_of(values, own.nan)  # type: ignore[attr-defined]
        unchanged = alias and values.dtype == self.dtype  # as by `to` its own device
        if not own.building and not unchanged:
            _refuse(self, "other values as .data (as of half() or to(dtype))")
        _DATA.__set__(self, values)

    def detach(self) -> Tensor:
        """As `data`."""
        return self._seen_as(Detached)

    def _seen_as(self, kind: type[AbsentData]) -> AbsentData:
        made = _DATA.__get__(self).as_subclass(kind)
        made.stands_for = self
        return made

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return self.sharded_in.copied(self, memo)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.sharded_in.saved(self, protocol)  # type: ignore[attr-defined]


def point(p: nn.Parameter, tensor: Tensor, absent: bool) -> None:
    """Let a parameter be this tensor, and of the class that it is to have.

    A script's own class stays.
    """
    _DATA.__set__(p, tensor)  # past what `AbsentParameter` refuses
    if type(p) in (nn.Parameter, AbsentParameter):
        p.__class__ = AbsentParameter if absent else nn.Parameter
