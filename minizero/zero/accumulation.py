"""Gradients from forward to step: expected, added up, set aside, joined, forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn

from .. import comm
from ..memory import labels
from .flat_buffer import Flat, Slot, Unit
from .interfaces import Home, Precision
from .moves import Moves


class Accumulation(Moves):
    """What a step's gradients are, whatever number of backwards they come from.

    `syncing`: whether a backward reduces. `has_gradients`: since a backward began,
    until `zero_grad`.
    """

    model: nn.Module
    units: list[Unit]
    precision: Precision
    home: Home
    _owner: dict[nn.Parameter, tuple[Unit, Flat, Slot]]

    def __init__(self) -> None:
        super().__init__()
        self.syncing, self.has_gradients = True, False
        self._unsynced = self._in_backward = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        args, kwargs = self.precision.inputs(args, kwargs)
        with comm.phase("forward"):
            return self.model(*args, **kwargs)

    def _begin_backward(self) -> None:
        self._in_backward = self.has_gradients = True
        self.finish()  # what a backward that failed has left
        self.schedule.backward_begins()
        # the last unit's gradients come first; the root's end last
        self._left = list(self.units)
        self._missing = {
            unit: {s.parameter for f in unit.trainable for s in f.slots}
            for unit in self.units
        }
        self._reduced: set[Unit] = set()
        # to be reduced once more. Autograd brings each parameter one gradient; a backward
        # inside backward (reentrant checkpointing) brings one of its own
        self._late: set[Unit] = set()
        for unit in self.units:
            self._open(unit)

    def _refuse_grad(self, p: Tensor) -> NoReturn:
        p.grad = None  # else the next step would have it
        self.zero_grad()
        raise RuntimeError(
            "a gradient came outside of backward(loss) of the wrapper; "
            "call net.backward(loss), not loss.backward(); the gradients "
            "of this step are gone"
        )

    def _trainable(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.trainable]

    def _open(self, unit: Unit) -> None:
        """Make the unit's buffers ready for more gradients."""
        for flat in unit.trainable:
            if flat.reduced:
                self._set_aside(flat)
                flat.reduced = False

    def _set_aside(self, flat: Flat) -> None:
        """Keep a reduced gradient elsewhere: autograd adds to the buffer."""
        grads = self.owned_grads(flat)
        if flat.total is None:
            flat.total = [labels.label(grad.clone(), "gradients") for grad in grads]
        else:
            for total, grad in zip(flat.total, grads, strict=True):
                total.add_(grad)
        flat.new_grad().zero_()

    def _reduce(self, unit: Unit) -> None:
        self._reduced.add(unit)
        for flat in unit.trainable:
            flat.detach_grads()
        labels.mark("reduce", unit.name)
        self.carry_out(self.schedule.grads_ready(unit), unit)

    def _finish_gradients(self) -> None:
        """Reduce what `no_sync` left behind, and join what was set aside."""
        if self._unsynced:
            for unit in reversed(self.units):
                self._reduce(unit)
            self.finish()
            self._unsynced = False
        self.home.finish_adds()
        self.join()

    def join(self) -> None:
        """Add what was set aside to the gradients."""
        for flat in self._trainable():
            if flat.total:
                for total, grad in zip(flat.total, self.owned_grads(flat), strict=True):
                    grad.add_(total)
            flat.total = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds up; the next one outside reduces."""
        self.syncing, before = False, self.syncing
        try:
            yield
        finally:
            self.syncing = before

    def zero_grad(self) -> None:
        """Forget all gradients; `step` does, an abandoned step needs it."""
        self.finish()
        self.home.finish_adds()
        for flat in self._trainable():
            self.clear_grads(flat)
            flat.reduced = False
        self._unsynced = self.has_gradients = False
        self.precision.forget()
