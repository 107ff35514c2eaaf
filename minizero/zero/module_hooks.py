"""Which modules a plan with absent parameters watches, and by what."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .absent import check_present
from .flat_buffer import Unit
from .units import Policy, find_units, named, own


def users(model: nn.Module, units: Iterable[Unit]) -> dict[Unit, list[nn.Module]]:
    """The modules whose call needs a unit.

    They are the unit's own modules (the root's: the model), and those between it and
    the parameters. A module that shares a parameter with the root needs both.
    """
    found = {(module, unit): None for unit in units for module in unit.modules}
    owner = {s.parameter: u for u in units for f in u.flats for s in f.slots}
    parents: dict[nn.Module, list[nn.Module]] = {}
    for module in named(model):
        for child in module.children() if module._modules else ():
            parents.setdefault(child, []).append(module)
    waiting = [(module, owner[p]) for module in (model, *parents) for p in own(module)]
    while waiting:
        pair = module, unit = waiting.pop()
        if pair not in found:
            found[pair] = None
            waiting += [(parent, unit) for parent in parents.get(module, ())]
    using: dict[Unit, list[nn.Module]] = {}
    for module, unit in found:
        using.setdefault(unit, []).append(module)
    return using


def refuse_compiled(model: nn.Module, policy: Policy | None) -> None:
    """Raise ValueError if units would be inside a graph: there no hook gathers."""
    for name, module in find_units(model, policy).items():
        alone = module._compiled_call_impl is not None
        if alone or (not name and hasattr(module, "_orig_mod")):
            raise ValueError(
                f"{name or 'the model'} is compiled already, and parameters that are "
                "gathered and freed cannot be part of a graph; wrap the model first, "
                "then call engine.compile(), which compiles unit by unit"
            )


def guard(module: nn.Module) -> None:
    """Let a module refuse to hand out or to load a state dict without values."""
    module.register_state_dict_pre_hook(_saved)
    module.register_load_state_dict_pre_hook(_loaded)


def guard_all(model: nn.Module) -> None:
    """`guard` a model and the modules in it that have parameters of their own."""
    for module in named(model):
        if module._parameters or module is model:
            guard(module)


def _nothing() -> Callable[..., None]:
    return _ignore


def _ignore(*_: Any, **__: Any) -> None:
    """What is left of a hook in a copy of its module."""


Call = Callable[..., Any]


class Hook:
    """Calls a function; where its module is copied or saved, it stays behind.

    Inside a unit that is compiled it does nothing: the unit's own hooks have run.
    """

    def __init__(self, call: Call) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return None if torch.compiler.is_compiling() else self.call(*args)

    def __reduce__(self) -> Any:
        return _nothing, ()


_saved = Hook(lambda m, *_: check_present(m.parameters(), "saved"))
_loaded = Hook(lambda m, *_: check_present(m.parameters(), "loaded"))


class Placed:
    """Hooks around the forwards of modules: whatever hooks come later run inside."""

    def __init__(self) -> None:
        self._ids: list[tuple[nn.Module, int, int]] = []

    def around(self, modules: Iterable[nn.Module], before: Call, after: Call) -> None:
        """Call `before` with the inputs, and `after` whether the forward fails or not."""
        begins, ends = Hook(before), Hook(after)
        for m in modules:
            first = m.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
            last = m.register_forward_hook(ends, always_call=True)
            # not the handles: each is four more objects for the garbage collector
            self._ids.append((m, first.id, last.id))

    def remove(self) -> None:
        """Call them no longer."""
        for module, first, last in self._ids:
            del module._forward_pre_hooks[first], module._forward_hooks[last]
            del module._forward_pre_hooks_with_kwargs[first]
            del module._forward_hooks_always_called[last]

    def outermost(self) -> None:
        """Put them first and last again: a script may have registered others."""
        for module, first, last in self._ids:
            before: Any = module._forward_pre_hooks  # ordered, as torch makes both
            after: Any = module._forward_hooks
            before.move_to_end(first, last=False)
            after.move_to_end(last)
