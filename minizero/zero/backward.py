"""A backward that reduces each unit when its gradients are complete."""

from __future__ import annotations

from torch import Tensor, nn

from .. import comm
from .accumulation import Accumulation
from .flat_buffer import Unit


class Backward(Accumulation):
    """A backward that reduces each unit when its gradients are complete."""


    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Gradients of `loss`, averaged over ranks (not inside `no_sync`).

        Gradients of several calls add up until `step`: divide the loss by
        the number of micro-batches yourself, if you want their mean.
        """
        self._begin_backward()
        try:
            with comm.phase("backward"):
                self.precision.scaled(loss).backward(retain_graph=retain_graph)
                self._end_backward()
        finally:
            self._in_backward = False

    def _on_grad(self, p: Tensor) -> None:
        """The hook: autograd has left a gradient in `p.grad`."""
        if not self._in_backward:
            self._refuse_grad(p)
        assert isinstance(p, nn.Parameter)
        unit, flat, slot = self._owner[p]
        self.finish(unit)  # no gradient may join a sum that is under way
        if self.syncing and unit in self._reduced and unit not in self._late:
            self._open(unit)
            self._late.add(unit)
        flat.collect(slot)
        self._missing[unit].discard(p)
        self._arrived(unit)

    def _arrived(self, unit: Unit) -> None:
        """Reduce complete units, in one order on every rank.

        Without the order, ranks that use different parameters would reduce
        different units at the same moment.
        """
        left, missing = self._left, self._missing
        while self.syncing and left and not missing[left[-1]]:
            self._reduce(left.pop())

    def _end_backward(self) -> None:
        """Unused parameters never report: their units go last, with zeros.

        After them, units with a gradient that came when they were reduced.
        """
        self._unsynced = not self.syncing
        if self.syncing:
            for unit in reversed(self.units):
                if unit not in self._reduced:
                    self._reduce(unit)
        for unit in reversed(self.units):
            if unit in self._late:
                self._reduce(unit)
        self.finish()
        self.schedule.backward_ends()
        for flat in self._trainable():
            flat.attach_grads()
