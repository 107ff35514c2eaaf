"""A flat buffer whose parameters can be absent: they keep shapes, and read as NaN."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .flat_buffer import Flat, Slot

if TYPE_CHECKING:
    from .sharded_buffer import ShardedFlat


class AbsentFlat(Flat):
    """Points its parameters at the buffer, or at a single NaN that stands for all.

    A write to an absent parameter is refused by torch. (`fill_` gets through; it makes
    the next `gather` raise.)
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], group: int | None
    ) -> None:
        super().__init__(named, group)
        self._versions: dict[Slot, int] = {}  # of absent parameters
        self._cut()

    def _cut(self) -> None:
        # what an absent element reads as; integers have no NaN
        self._nothing = 0 if _is_integer(self.full) else torch.nan
        self.nan = self.full.new_full((), self._nothing)
        # made now: a view cannot be cut from an empty storage
        self.views = [slot.view(self.full) for slot in self.slots]
        self.absent = [self.nan.expand(slot.shape) for slot in self.slots]

    def cast(self, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        """As `Flat.cast`; while the buffer is whole."""
        super().cast(dtype, grad_dtype)
        self._cut()

    def fill(self, slot: Slot) -> None:
        """Take a parameter over, out of another sharded buffer if need be."""
        before = owners([slot.parameter])
        for old in before:
            if not old.whole:
                old.gather().wait()
        super().fill(slot)
        # on the parameter: a table of owners would keep them alive
        slot.parameter.sharded_in = self  # type: ignore[attr-defined]
        for old in before:
            old.free()

    def show(self) -> None:
        """The parameters are views of the buffer from now on."""
        self._point(self.views)

    def hide(self) -> None:
        """The parameters are absent from now on."""
        self.nan.fill_(self._nothing)
        self._point(self.absent)
        self._versions = {s: _version(s.parameter) for s in self.slots}

    def check_unwritten(self) -> None:
        """Raise RuntimeError if a parameter was filled while it was absent."""
        for slot, version in self._versions.items():
            if _version(slot.parameter) != version:
                self.hide()
                raise RuntimeError(
                    f"parameter {slot.name!r} was filled while absent, and "
                    "what was written is lost; write to it inside "
                    "zero.GatheredParameters(..., modifier_rank=0)"
                )

    def _point(self, tensors: list[Tensor]) -> None:
        for slot, tensor in zip(self.slots, tensors, strict=True):
            # unless another buffer has taken it over
            if owners([slot.parameter]) == [self]:
                slot.parameter.data = tensor


def _is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex())


def _version(p: Tensor) -> int:
    """How often a tensor was written to, as far as autograd keeps count."""
    return 0 if p.is_inference() else p._version


def owners(params: Iterable[nn.Parameter]) -> list[ShardedFlat]:
    """The sharded buffers that hold these parameters, each once."""
    found = (getattr(p, "sharded_in", None) for p in params)
    return list(dict.fromkeys(flat for flat in found if flat is not None))


def is_sharded(p: nn.Parameter) -> bool:
    """Whether a parameter lives in a sharded buffer."""
    return hasattr(p, "sharded_in")
