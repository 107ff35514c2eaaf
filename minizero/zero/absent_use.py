"""A parameter that is used where it is absent reads as NaN: seen, and told."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .absent import unchecked
from .sharded_buffer import ShardedFlat
from .stage2 import ZeRO2

_ABSENT = (
    "A parameter was used outside the forward of its unit, where it is "
    "absent and reads as NaN; let `units` make one unit of all that use it, "
    "or hold it from forward to the end of backward with "
    "zero.GatheredParameters."
)


class TellsAbsentUse(ZeRO2):
    """Looks for the NaN of absent parameters where one may have been used."""

    _first = True

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """As `DataParallel.backward`.

        Raises RuntimeError if a parameter was absent where it was used. Such
        a use is seen when its gradient comes, or when a value is missing; if
        its unit's own forward used it too, there is only a warning.
        """
        first, self._first = self._first, False
        try:
            super().backward(loss, retain_graph)
        except RuntimeError as error:
            if "storage of size 0" in str(error):
                raise RuntimeError(f"A value is missing. {_ABSENT}") from error
            raise
        # not each time: to look at the loss, a host waits for its GPU
        if (self._strays or first) and loss.isnan().any():
            names = ", ".join(sorted(set(self._strays)))
            if names:
                raise RuntimeError(f"The loss is NaN, by {names}. {_ABSENT}")
            warnings.warn(
                f"The first loss is NaN. If the model gives none: {_ABSENT}",
                stacklevel=2,
            )

    def _begin_backward(self) -> None:
        super()._begin_backward()
        self._strays: list[str] = []

    def _end_unasked(self) -> None:
        super()._end_unasked()
        if self._strays:
            names = ", ".join(sorted(set(self._strays)))
            raise RuntimeError(f"{names}: {_ABSENT}")

    def module_state(self) -> dict[str, Any]:
        with unchecked():
            return super().module_state()

    def _on_grad(self, p: Tensor) -> None:
        super()._on_grad(p)
        assert isinstance(p, nn.Parameter)
        _, flat, slot = self._owner[p]
        if isinstance(flat, ShardedFlat) and not flat.whole:
            self._strays.append(slot.name)


def refuse_create_graph(unit_name: str) -> None:
    """Gradients of gradients need the parameters after their backward."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"unit {unit_name!r} is in a backward with "
            "create_graph=True, and another backward through that would "
            "find its parameters freed; for gradients of gradients use a "
            "plan that keeps parameters (stage 0, 1 or 2)"
        )
