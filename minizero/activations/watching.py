"""Who looks at what is kept for backward, and how others tell them.

Autograd shows a hook what it saves. A store, or selective recomputation, keeps tensors
without autograd, and calls `note` so that they are listed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


Look = Callable[[Tensor, str], None]

_looks: list[Look] = []


@contextmanager
def watching(look: Look) -> Iterator[None]:
    """`look` is called with every tensor and operator noted inside the block."""
    _looks.append(look)
    try:
        yield
    finally:
        _looks.remove(look)


def note(tensor: Tensor, op: str = "") -> None:
    """Tell those who look of a tensor that is kept without autograd.

    `op` stands for the function of torch under way, if there is none.
    """
    for look in _looks:
        look(tensor, op)


@contextmanager
def noting(
    keep: Callable[..., bool], inside: AbstractContextManager[Any]
) -> Iterator[None]:
    """`inside`, and every result of an operator that `keep` accepts is noted."""
    with inside, _Noting(keep) if _looks else nullcontext():
        yield


class _Noting(TorchDispatchMode):
    def __init__(self, keep: Callable[..., bool]) -> None:
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
