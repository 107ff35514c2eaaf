"""Live bytes by category, measured: by storage, exact to the byte, over time."""

from __future__ import annotations

import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import Self

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")

# What each storage is for. Weak keys: a label must not keep memory alive.
_labels: WeakIdKeyDictionary = WeakIdKeyDictionary()
_trackers: list[Tracker] = []


def label(tensor: Tensor, category: str) -> Tensor:
    """Name the category of a tensor's storage, for trackers now and later."""
    if category not in CATEGORIES:
        raise ValueError(
            f"category must be one of {', '.join(CATEGORIES)}, not {category!r}"
        )
    storage = tensor.untyped_storage()
    _labels[storage] = category
    for tracker in _trackers:
        tracker._see(storage, category)
    return tensor


def label_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Label an optimizer's states; a hook for `register_step_post_hook`."""
    for leaf in tree_iter(list(optimizer.state.values())):
        if isinstance(leaf, Tensor):
            label(leaf, "optimizer")


def labelled_bytes() -> dict[str, int]:
    """Live bytes of every labelled storage, by category; no tracker needed."""
    live = dict.fromkeys(CATEGORIES, 0)
    for storage, category in list(_labels.items()):
        live[category] += storage.nbytes()
    return live


@dataclass
class Sample:
    """Live bytes by category at one moment; `event` names it, or is empty."""

    time: float
    event: str
    unit: str
    live: dict[str, int]


@dataclass
class _Known:
    nbytes: int
    category: str
    alive: weakref.ref[Any]


class Tracker(TorchDispatchMode):
    """Counts live bytes by category while it is entered, exact to the byte.

    It sees every tensor that an operation returns, and counts storages, not
    tensors: ten views of one storage are counted once, and a storage counts
    until the last of its owners (autograd's saved tensors too) lets it go.
    What nobody labelled is "activations". A plain `model` and `optimizer` have
    their parameters, gradients and states labelled by hooks; give them here.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__()
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.peaks = dict(self.live)
        self.peak = 0
        self.samples: list[Sample] = []
        self._known: dict[int, _Known] = {}
        self._model, self._optimizer = model, optimizer
        self._stack = ExitStack()

    @property
    def total(self) -> int:
        """Live bytes of all categories."""
        return sum(self.live.values())

    def adopt(self, *tensors: Tensor, category: str = "activations") -> None:
        """Count storages that existed before the tracker was entered."""
        for tensor in tensors:
            label(tensor, category)

    def mark(self, event: str, unit: str = "") -> None:
        """Add a named sample."""
        now = time.perf_counter()
        self.samples.append(Sample(now, event, unit, dict(self.live)))

    def allocated(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Called after a storage has grown by `nbytes`; a budget may refuse it."""

    def __enter__(self) -> Self:
        _trackers.append(self)
        self._stack.callback(_trackers.remove, self)
        self._stack.callback(self._known.clear)
        for storage, category in list(_labels.items()):
            self._see(storage, category)
        self._watch_resize()
        if self._model is not None:
            self._watch_model(self._model)
        if self._optimizer is not None:
            hook = self._optimizer.register_step_post_hook(label_states)
            self._stack.callback(hook.remove)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage, category: str | None = None) -> None:
        """Bring the count of one storage up to date."""
        key = storage._cdata
        known = self._known.get(key)
        if known is None:
            category = category or _labels.get(storage, "activations")
            gone = weakref.ref(storage, lambda _: self._forget(key))
            known = self._known[key] = _Known(0, category, gone)
        nbytes, category = storage.nbytes(), category or known.category
        if nbytes == known.nbytes and category == known.category:
            return
        grown = nbytes - known.nbytes
        self.live[known.category] -= known.nbytes
        self.live[category] += nbytes
        known.nbytes, known.category = nbytes, category
        self._record()
        if grown > 0:
            try:
                self.allocated(storage, grown)
            except BaseException:
                self._forget(key)
                raise

    def _forget(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self.live[known.category] -= known.nbytes
            self._record()

    def _record(self) -> None:
        self.peak = max(self.peak, self.total)
        for category, nbytes in self.live.items():
            self.peaks[category] = max(self.peaks[category], nbytes)
        self.mark("")

    def _watch_resize(self) -> None:
        """`storage.resize_` is no operator, so the dispatch mode cannot see it."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            out = original(storage, nbytes)
            self._see(storage)
            return out

        setattr(torch.UntypedStorage, "resize_", resize_)  # noqa: B010
        self._stack.callback(setattr, torch.UntypedStorage, "resize_", original)

    def _watch_model(self, model: nn.Module) -> None:
        def grad_ready(p: Tensor) -> None:
            if p.grad is not None:
                label(p.grad, "gradients")

        for p in model.parameters():
            label(p, "parameters")
            if p.requires_grad:
                hook = p.register_post_accumulate_grad_hook(grad_ready)
                self._stack.callback(hook.remove)
        for b in model.buffers():
            label(b, "buffers")


def mark(event: str, unit: str = "") -> None:
    """Mark a moment in every tracker that is running."""
    for tracker in _trackers:
        tracker.mark(event, unit)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the live bytes of each labelled category, and the device's own count.

    Like DeepSpeed's function of this name it prints only when `force` is true, and
    on rank 0 only.
    """
    distributed = (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    )
    if not force or (distributed and torch.distributed.get_rank() != 0):
        return
    parts = [f"{k} {v / 1e6:.2f} MB" for k, v in labelled_bytes().items() if v]
    if torch.cuda.is_available():
        parts.append(f"device allocated {torch.cuda.memory_allocated() / 1e6:.2f} MB")
        parts.append(f"peak {torch.cuda.max_memory_allocated() / 1e6:.2f} MB")
    print(f"{message}: {', '.join(parts) or 'nothing labelled'}", flush=True)
