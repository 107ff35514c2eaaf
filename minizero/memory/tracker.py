"""Live bytes over time: what was there before, marked moments, peaks, host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from typing import Self

from .labels import CATEGORIES, label, label_states, labelled_bytes, watching
from .live_bytes import LiveBytes, Seen


@dataclass
class Sample:
    """Live bytes by category at one moment; `event` names it, or is empty.

    `live` is on the device, `host` what was labelled as host memory.
    """

    time: float
    event: str
    unit: str
    live: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)


class Tracker(LiveBytes):
    """Counts live bytes by category while entered, exact to the byte.

    It sees every tensor that an operation returns, and counts storages, not tensors:
    ten views of one storage are counted once, and a storage counts until the last of
    its owners (autograd's saved tensors too) lets it go. What nobody labelled is
    "activations". A plain `model` and `optimizer` have their parameters, gradients and
    states labelled by hooks; give them here. Storages that were labelled before count
    from the start.

    `live`, `peak` and `peaks` are of the device, in all and by category. What was
    labelled as host memory is counted apart, in `host` and `host_peak`, and so is what
    an operation makes of nothing but that. `samples` has the counts after each change.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__()
        self.peaks = dict(self.live)
        self.peak = self.host_peak = 0
        self.samples: list[Sample] = []
        self._model, self._optimizer = model, optimizer
        self._states = 0
        self._stack = ExitStack()

    @property
    def total(self) -> int:
        """Live bytes of all categories, on the device."""
        return sum(self.live.values())

    def adopt(self, *tensors: Tensor, category: str = "activations") -> None:
        """Count storages that existed before the tracker was entered."""
        for tensor in tensors:
            label(tensor, category)

    def mark(self, event: str, unit: str = "") -> None:
        """Add a named sample."""
        now = time.perf_counter()
        sample = Sample(now, event, unit, dict(self.live), dict(self.host))
        self.samples.append(sample)

    def allocated(self, storage: UntypedStorage, nbytes: int) -> None:
        """Called after a storage grew by `nbytes`; a budget may refuse it."""

    def __enter__(self) -> Self:
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.host = dict(self.live)
        self._stack.callback(self.seen.clear)
        self._stack.enter_context(watching(self))
        self._stack.enter_context(_resizes_seen(self.see))
        if self._model is not None:
            self._stack.enter_context(_labelled(self._model))
        if self._optimizer is not None:
            label_states(self._optimizer)
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
        out = super().__torch_dispatch__(func, types, args, kwargs)
        # the first step makes states, one parameter after the other
        if self._optimizer is not None and len(self._optimizer.state) > self._states:
            self._states = len(self._optimizer.state)
            label_states(self._optimizer)
        return out

    def changed(self, storage: UntypedStorage, before: Seen, after: Seen) -> None:
        """Record the moment, and ask whether what is new on the device fits."""
        self._record()
        grown = after.nbytes - (0 if before.host else before.nbytes)
        if grown > 0 and not after.host:
            try:
                self.allocated(storage, grown)
            except BaseException:
                self.forget(storage._cdata)
                raise

    def forget(self, key: int) -> None:
        if key in self.seen:
            super().forget(key)
            self._record()

    def _record(self) -> None:
        self.peak = max(self.peak, self.total)
        self.host_peak = max(self.host_peak, sum(self.host.values()))
        for category, nbytes in self.live.items():
            self.peaks[category] = max(self.peaks[category], nbytes)
        self.mark("")


@contextmanager
def _resizes_seen(see: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """`storage.resize_` is no operator, and no dispatch mode can see it."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: UntypedStorage, nbytes: int) -> Any:
        out = original(storage, nbytes)
        see(storage)
        return out

    setattr(torch.UntypedStorage, "resize_", resize_)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.UntypedStorage, "resize_", original)  # noqa: B010


@contextmanager
def _labelled(model: nn.Module) -> Iterator[None]:
    """Label what a plain model has, and its gradients as they come."""

    def grad_ready(p: Tensor) -> None:
        if p.grad is not None:
            label(p.grad, "gradients")

    hooks = []
    for p in model.parameters():
        label(p, "parameters")
        grad_ready(p)
        if p.requires_grad:
            hooks.append(p.register_post_accumulate_grad_hook(grad_ready))
    for b in model.buffers():
        label(b, "buffers")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the live bytes of each labelled category, and the device's count.

    Like DeepSpeed's function of this name it prints only when `force` is true, and on
    rank 0 only.
    """
    distributed = (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    )
    if not force or (distributed and torch.distributed.get_rank() != 0):
        return
    live, host = labelled_bytes(), labelled_bytes("cpu")
    parts = [f"{k} {v / 1e6:.2f} MB" for k, v in live.items() if v]
    parts += [f"{k} on the host {v / 1e6:.2f} MB" for k, v in host.items() if v]
    if torch.cuda.is_available():
        now = torch.cuda.memory_allocated() / 1e6
        peak = torch.cuda.max_memory_allocated() / 1e6
        parts += [f"device allocated {now:.2f} MB", f"peak {peak:.2f} MB"]
    print(f"{message}: {', '.join(parts) or 'nothing labelled'}", flush=True)
