"""Live bytes by category over time: counted by storage, exact to the byte."""

from __future__ import annotations

import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from . import labels
from .labels import CATEGORIES, label, label_states, labelled_bytes


@dataclass
class Sample:
    """Live bytes by category at one moment; `event` names it, or is empty.

    `live`: on the device. `host`: in host memory.
    """

    time: float
    event: str
    unit: str
    live: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StorageRecord:
    """A storage as it is counted; `on_free` calls back when it is freed."""

    nbytes: int
    category: str
    host: bool
    on_free: weakref.ref[Any] = field(compare=False)


class Tracker(TorchDispatchMode):
    """Counts live bytes by category while entered, exact to the byte.

    It sees every tensor that an operation returns, and counts storages: ten views of one
    storage count once, and until its last owner (which may be autograd) is gone. What
    was labelled before counts from the start; what has no label is "activations". The
    tensors of a plain model and optimizer are labelled if you pass these here.

    `live`, `peak` and `peaks` are of the device, `host` and `host_peak` of host memory.
    `samples`: counts after each change. A second `with` adds to samples and peaks.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__()
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.host, self.peaks = dict(self.live), dict(self.live)
        self.peak = self.host_peak = 0
        self.samples: list[Sample] = []
        self.records: dict[int, StorageRecord] = {}
        self._model, self._optimizer = model, optimizer
        self._labelled = 0  # parameters whose optimizer state is labelled
        self._stack = ExitStack()  # undoes what entering did

    @property
    def total(self) -> int:
        """Live bytes of all categories, on the device."""
        return sum(self.live.values())

    def mark(self, event: str, unit: str = "") -> None:
        """Add a named sample."""
        now = time.perf_counter()
        sample = Sample(now, event, unit, dict(self.live), dict(self.host))
        self.samples.append(sample)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        labels.inherit_host(tensors, args, kwargs)
        for x in tensors:
            if x.device.type != "meta":
                self.see(x.untyped_storage())
        # the first step makes states, one parameter after the other
        if self._optimizer is not None and len(self._optimizer.state) > self._labelled:
            self._labelled = len(self._optimizer.state)
            label_states(self._optimizer)
        return out

    def see(self, storage: UntypedStorage, category: str | None = None) -> None:
        """Count a storage that is new, or has another size, category or memory now."""
        key, host = storage._cdata, labels.on_host(storage)
        before = self.records.get(key)
        if before is None:  # new: as if it had been empty before
            category = category or labels.categories.get(storage, "activations")
            on_free = weakref.ref(storage, lambda _: self.forget(key))
            before = StorageRecord(0, category, host, on_free)
        category = category or before.category
        after = StorageRecord(storage.nbytes(), category, host, before.on_free)
        self.records[key] = after
        if after == before:
            return
        self._add(before, -before.nbytes)
        self._add(after, after.nbytes)
        self._record()
        # a storage whose label moves it to the device grows there by all its bytes
        grown = after.nbytes - (0 if before.host else before.nbytes)
        if grown > 0 and not host:
            try:
                self.allocated(storage, grown)
            except BaseException:  # refused: then the operation fails
                self.forget(key)
                raise

    def allocated(self, storage: UntypedStorage, nbytes: int) -> None:
        """Called after a storage grew by `nbytes`; a subclass may refuse that."""

    def forget(self, key: int) -> None:
        """Take a freed storage off the counts."""
        if key in self.records:
            freed = self.records.pop(key)
            self._add(freed, -freed.nbytes)
            self._record()

    def _add(self, record: StorageRecord, nbytes: int) -> None:
        (self.host if record.host else self.live)[record.category] += nbytes

    def _record(self) -> None:
        self.peak = max(self.peak, self.total)
        self.host_peak = max(self.host_peak, sum(self.host.values()))
        for category, nbytes in self.live.items():
            self.peaks[category] = max(self.peaks[category], nbytes)
        self.mark("")

    def __enter__(self) -> Self:
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.host = dict(self.live)
        undo = self._stack.callback
        undo(self.records.clear)
        undo(labels.trackers.remove, self)
        labels.start(self)
        original = torch.UntypedStorage.resize_

        def resize_(storage: UntypedStorage, nbytes: int) -> Any:
            out = original(storage, nbytes)
            self.see(storage)
            return out

        # the dispatch mode cannot see it
        setattr(torch.UntypedStorage, "resize_", resize_)  # noqa: B010
        undo(setattr, torch.UntypedStorage, "resize_", original)
        if self._model is not None:
            self._label_model(self._model)
        if self._optimizer is not None:
            label_states(self._optimizer)
            undo(self._optimizer.register_step_post_hook(label_states).remove)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._stack.close()

    def _label_model(self, model: nn.Module) -> None:
        """Label a plain model, and its gradients when backward forms them."""

        def label_grad(p: Tensor) -> None:
            if p.grad is not None:
                label(p.grad, "gradients")

        for p in model.parameters():
            label_grad(label(p, "parameters"))
            if p.requires_grad:
                hook = p.register_post_accumulate_grad_hook(label_grad)
                self._stack.callback(hook.remove)
        for b in model.buffers():
            label(b, "buffers")


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print live bytes by category; as in DeepSpeed only if forced, and on rank 0."""
    dist = torch.distributed
    is_first = not (dist.is_available() and dist.is_initialized()) or not dist.get_rank()
    if force and is_first:
        host = {f"{k} on the host": n for k, n in labelled_bytes("cpu").items()}
        live = labelled_bytes() | host
        if torch.cuda.is_available():
            live["device allocated"] = torch.cuda.memory_allocated()
            live["peak"] = torch.cuda.max_memory_allocated()
        parts = [f"{k} {n / 1e6:.2f} MB" for k, n in live.items() if n]
        print(f"{message}: {', '.join(parts) or 'nothing labelled'}", flush=True)
