"""What is saved for backward: by module and operator, each storage once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True)
class Saved:
    """One storage that waits for backward.

    `module`, `op`: the innermost module that saved it first, and the function of torch
    that it called. `kind`: "activation"; or "parameter", "buffer" or "input" for what
    exists without the graph.
    """

    module: str
    op: str
    kind: str
    nbytes: int


_active: list[SavedTensors] = []  # those that are entered


class SavedTensors(TorchFunctionMode):
    """A context manager that lists what is kept for the backward of `model`.

    Autograd calls a pack hook with each tensor that an operator saves. A storage counts
    once, until its last owner is gone: `live` shrinks during backward.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model, self._stack = model, ExitStack()
        # names of the running modules and functions, the innermost last
        self._running = [("", "")]
        self._saved: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._preexisting: WeakIdKeyDictionary = WeakIdKeyDictionary()

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

    def record(self, x: Tensor, op: str = "") -> None:
        """List a tensor's storage, unless it is listed already."""
        storage, (module, running) = x.untyped_storage(), self._running[-1]
        if storage.nbytes() and storage not in self._saved:
            kind = self._preexisting.get(storage, "activation")
            where = module, running or op or "apply", kind
            self._saved[storage] = Saved(*where, storage.nbytes())

    def _pack(self, x: Tensor) -> Tensor:
        self.record(x)
        # detached: an output that held itself would never be freed
        return x.detach()

    def __enter__(self) -> Self:
        self._stack.enter_context(saved_tensors_hooks(self._pack, lambda x: x))
        _active.append(self)
        self._stack.callback(_active.remove, self)
        for name, module in self._model.named_modules():
            before = partial(self._before_forward, name)
            for handle in (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(self._after_forward, always_call=True),
            ):
                self._stack.callback(handle.remove)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._stack.close()

    def _before_forward(self, name: str, module: nn.Module, *inputs: Any) -> None:
        self._running.append((name, ""))
        for kind, tensors in (
            ("input", tree_iter(inputs if module is self._model else ())),
            # now, not at the start: under ZeRO-3 they come and go
            ("parameter", module.parameters(recurse=False)),
            ("buffer", module.buffers(recurse=False)),
        ):
            for x in tensors:
                if isinstance(x, Tensor):
                    self._preexisting[x.untyped_storage()] = kind

    def _after_forward(self, *_: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        module, _ = self._running[-1]
        self._running.append((module, getattr(func, "__name__", str(func))))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._running.pop()


def record_saved(x: Tensor, op: str = "") -> None:
    """List a tensor that `op` keeps for backward, unseen by hooks of `SavedTensors`."""
    for saved in _active:
        saved.record(x, op)


class RecordKept(TorchDispatchMode):
    """Lists the results of operators that `keep` chooses."""

    def __init__(self, keep: Callable[..., bool]) -> None:
        super().__init__()
        self.keep = keep

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out) if self.keep(func, *args) else ():
            if isinstance(x, Tensor):
                record_saved(x, func._schema.name)
        return out


@contextmanager
def recording_kept(
    keep: Callable[..., bool], context: AbstractContextManager[Any]
) -> Iterator[None]:
    """Enter `context`, and list the results that `keep` chooses."""
    with context, RecordKept(keep) if _active else nullcontext():
        yield


def by_operator(saved: Iterable[Saved]) -> dict[tuple[str, str], int]:
    """Bytes by (module, operator)."""
    total: Counter[tuple[str, str]] = Counter()
    for s in saved:
        total[s.module, s.op] += s.nbytes
    return dict(total)
