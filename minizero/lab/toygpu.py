"""A toy GPU: a budget of bytes that is enforced, on a CPU too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minizero.memory.labels import amount
from minizero.memory.tracker import Tracker


class ToyGPU(Tracker):
    """A tracker that refuses to hold more than `capacity` bytes.

    An operation whose result does not fit raises torch.OutOfMemoryError, and its
    result is not kept. What counts is what a `Tracker` counts, to the byte: with no
    fragmentation, no cache and no context, unlike on a real device. State that was
    labelled before is on the device when it is entered.

    Inside `launch`, each rank enters its own.
    """

    def __init__(
        self,
        capacity: float,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(model, optimizer)
        self.capacity = capacity

    def allocated(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Raise torch.OutOfMemoryError if the last allocation is one too many."""
        if self.total <= self.capacity:
            return
        in_use = dict(self.live)
        in_use[self.records[storage._cdata].category] -= nbytes
        raise torch.OutOfMemoryError(
            f"Out of memory: tried to allocate {amount(nbytes)} on a toy GPU of "
            f"{amount(self.capacity)}{_in_use(in_use)}."
        )

    def __enter__(self) -> ToyGPU:
        try:
            super().__enter__()
        except torch.OutOfMemoryError:
            self._stack.close()
            raise
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except torch.OutOfMemoryError as error:
            # The frames of the traceback hold the result that did not fit.
            raise error.with_traceback(None) from None

    def see(self, storage: torch.UntypedStorage, category: str | None = None) -> None:
        known = self.records.get(storage._cdata)
        before = known.nbytes if known else None
        peak, peaks, moments = self.peak, dict(self.peaks), len(self.samples)
        try:
            super().see(storage, category)
        except torch.OutOfMemoryError:
            # What did not fit was never there.
            self.peak, self.peaks = peak, peaks
            del self.samples[moments:]
            if before is not None:  # it grew in place, and its owner still holds it
                storage.resize_(before)
            raise


def _in_use(live: dict[str, int]) -> str:
    held = {name: nbytes for name, nbytes in live.items() if nbytes}
    if not held:
        return " that is empty"
    parts = ", ".join(f"{name} {amount(nbytes)}" for name, nbytes in held.items())
    largest = max(held, key=held.__getitem__)
    total = amount(sum(held.values()))
    return f", where {total} are in use ({parts}); the largest part is {largest}"
