"""What is saved for backward: by module and operator, each storage once."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import Self


@dataclass(frozen=True)
class Saved:
    """One storage that waits for backward.

    `module`, `op`: who saved it first: the name of the innermost module, and
    the function of torch that it called.
    `kind`: "activation"; or "parameter", "buffer" or "input" for what exists
    without the graph. `nbytes`: of the whole storage; `shape`, `dtype`: of
    the view of it that was saved first.
    """

    module: str
    op: str
    kind: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


_watching: list[SavedTensors] = []


def watching() -> bool:
    """Whether somebody looks at what is saved."""
    return bool(_watching)


def note(tensor: Tensor, op: str = "") -> None:
    """Tell those who look of a tensor that is kept without autograd.

    `op` stands for the function of torch under way, if there is none.
    """
    for watcher in _watching:
        watcher._note(tensor, op)


class SavedTensors(TorchFunctionMode):
    """Lists what is kept for the backward of `model` while entered.

    Autograd packs each tensor that an operator saves; the pack hook sees it,
    and hooks on the modules and a function mode say where. A storage counts
    once, however many views of it are saved, and until the last of its
    owners lets it go: `live` shrinks during backward.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._module = [""]
        self._op: list[str] = []
        self._saved: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._given: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            handles = (
                module.register_forward_pre_hook(
                    partial(self._enter_module, name), with_kwargs=True
                ),
                module.register_forward_hook(
                    self._leave_module, always_call=True
                ),
            )
            for handle in handles:
                self._stack.callback(handle.remove)
        # detached: an output that held itself would never be freed
        hooks = saved_tensors_hooks(self._pack, lambda x: x)
        self._stack.enter_context(hooks)
        _watching.append(self)
        self._stack.callback(_watching.remove, self)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._stack.close()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._op.append(getattr(func, "__name__", str(func)))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._op.pop()

    def live(self) -> list[Saved]:
        """What is saved at this moment, in the order of saving."""
        return list(self._saved.values())

    def activations(self) -> list[Saved]:
        """The part of `live` that only the graph keeps."""
        return [saved for saved in self.live() if saved.kind == "activation"]

    @property
    def nbytes(self) -> int:
        """Bytes of the activations saved at this moment."""
        return sum(saved.nbytes for saved in self.activations())

    def _enter_module(
        self, name: str, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        self._module.append(name)
        if module is self._model:
            self._give("input", tree_iter((args, kwargs)))
        # now, not at the start: under ZeRO-3 they come and go
        self._give("parameter", module.parameters(recurse=False))
        self._give("buffer", module.buffers(recurse=False))

    def _leave_module(self, *_: Any) -> None:
        self._module.pop()

    def _give(self, kind: str, tensors: Iterable[Any]) -> None:
        for x in tensors:
            if isinstance(x, Tensor):
                self._given[x.untyped_storage()] = kind

    def _pack(self, x: Tensor) -> Tensor:
        self._note(x, "")
        return x.detach()

    def _note(self, x: Tensor, op: str) -> None:
        storage = x.untyped_storage()
        if storage.nbytes() and storage not in self._saved:
            self._saved[storage] = Saved(
                self._module[-1],
                self._op[-1] if self._op else op or "apply",
                self._given.get(storage, "activation"),
                storage.nbytes(),
                tuple(x.shape),
                x.dtype,
            )


def by_operator(saved: Iterable[Saved]) -> dict[tuple[str, str], int]:
    """Bytes by (module, operator)."""
    total: dict[tuple[str, str], int] = {}
    for s in saved:
        key = (s.module, s.op)
        total[key] = total.get(key, 0) + s.nbytes
    return total
