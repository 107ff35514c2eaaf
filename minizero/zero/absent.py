"""A flat buffer whose parameters can be absent: they keep shapes, and read as NaN."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..memory import labels
from ..memory.bytes import versions
from .absent_parameter import point
from .flat_buffer import Flat, Place, Slot, in_order

if TYPE_CHECKING:
    from .sharded_buffer import ShardedFlat


class ZeroParamStatus(Enum):
    """Whether a parameter is whole here, in DeepSpeed's words."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_numbers = count()


class AbsentFlat(Flat):
    """Points its parameters at the buffer, or at a single NaN that stands for all.

    A write to an absent parameter is refused; what goes past `AbsentParameter`, such as
    one to `p.detach()`, makes the next `gather` raise. What saves models asks parameters for `ds_id`, `ds_shape`,
    `ds_numel` and `ds_status`, as DeepSpeed's have them; ours keep their own shape too.
    """

    seen = False  # whether a script may have kept views of it since it was gathered
    building = 0  # `zero.Init` blocks that are open: every rank makes the same copies

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        group: int | None,
        place: Place = in_order,
    ) -> None:
        super().__init__(named, group, place)
        self._versions: list[int] | None = None  # of absent parameters
        self.shard = self.full.new_empty(0)
        self._cut()

    def _cut(self) -> None:
        # what an absent element reads as; integers have no NaN
        self._nothing = 0 if _is_integer(self.full) else torch.nan
        self.nan = self.full.new_full((), self._nothing)
        self._cut_views()
        self._pointed = self.views
        shapes = {slot.shape for slot in self.slots}
        expanded = {shape: self.nan.expand(shape) for shape in shapes}
        self.absent = [expanded[slot.shape] for slot in self.slots]

    def _cut_views(self) -> None:
        # while it is whole: a view cannot be cut from an empty storage
        self.views = [slot.view(self.full) for slot in self.slots]

    def give_away(self) -> None:
        """Leave `full` to whoever has kept a view of it, and go on with another.

        Call it when the parameters are absent.
        """
        self.views, self.full = [], self.full.new_empty(0)  # nobody else: it goes now
        self.full = labels.label(self.full.new_empty(self.padded), "parameters")
        self._cut_views()
        self.seen = False

    def cast(self, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        """As `Flat.cast`; while the buffer is whole."""
        super().cast(dtype, grad_dtype)
        self._cut()

    def address(self) -> tuple[int, int]:
        there = self.slots and self._pointed is self.views
        return super().address() if there else (self.nan.data_ptr(), 0)

    def holds(self, slot: Slot) -> bool:
        return getattr(slot.parameter, "sharded_in", None) is self

    def take(self, slots: list[Slot]) -> None:
        """Take parameters over, out of other sharded buffers if need be."""
        sharded = [slot for slot in slots if is_sharded(slot.parameter)]
        others = [slot for slot in slots if not is_sharded(slot.parameter)]
        # one by one: what they come from may be as large as this buffer
        for part in filter(None, (others, *([slot] for slot in sharded))):
            before = owners(slot.parameter for slot in part)
            for old in before:
                if not old.whole:
                    old.gather().wait()
                old.make_exact()
            with torch._C.DisableTorchFunction():  # `zero.Init` would free it in between
                super().take(part)
            for slot in part:
                self._note(slot)
            for old in before:
                old.free()

    def _note(self, slot: Slot) -> None:
        """Note on a parameter whose it is; a table of owners would keep it alive."""
        p = slot.parameter
        noted: dict[str, Any] = vars(p)
        noted.setdefault("ds_id", next(_numbers))
        noted |= {
            "sharded_in": self,
            "ds_shape": slot.shape,
            "ds_numel": slot.numel,
            "ds_status": ZeroParamStatus.AVAILABLE,
            "__getstate__": _no_state,
        }
        if type(p) is not nn.Parameter:  # it will not be an `AbsentParameter`
            noted["__deepcopy__"] = partial(self.copied, p)
            noted["__reduce_ex__"] = partial(self.saved, p)

    def copied(self, p: nn.Parameter, memo: Any) -> nn.Parameter:
        """For `copy.deepcopy`: a parameter of its own."""
        [own] = owners([p])
        gathers = own.building and not own.whole
        with torch._C.DisableTorchFunction():  # `zero.Init` would gather for each call
            if gathers:
                own.gather().wait()
            check_present([p], "copied")
            made = nn.Parameter.__deepcopy__(p, memo)
            if gathers:
                own.free()
        return made

    def saved(self, p: nn.Parameter, protocol: Any) -> Any:
        """For `torch.save` and pickle, likewise."""
        check_present([p], "saved")
        return nn.Parameter(p.detach(), p.requires_grad).__reduce_ex__(protocol)

    def show(self) -> None:
        """The parameters are views of the buffer from now on."""
        self._point(self.views, ZeroParamStatus.AVAILABLE)

    def written(self) -> list[Slot]:
        """Parameters that were written to since this was asked last."""
        now = versions(slot.parameter for slot in self.slots)
        before, self._versions = self._versions, now
        if before in (None, now):
            return []
        pairs = zip(self.slots, before, now, strict=True)
        return [slot for slot, old, new in pairs if old != new]

    def hide(self) -> None:
        """The parameters are absent from now on."""
        self._point(self.absent, ZeroParamStatus.NOT_AVAILABLE)

    def check_unwritten(self) -> None:
        """Raise RuntimeError if a parameter was written to while it was absent."""
        at = self.nan.data_ptr()
        with torch._C.DisableTorchFunction():  # `zero.Init` would gather, to look there
            ptrs = [slot.parameter.data_ptr() for slot in self.slots]
        pairs = zip(self.slots, ptrs, strict=True)
        given = (s for s, ptr in pairs if ptr != at and s.numel and self.holds(s))
        for slot in (*self.written(), *given):
            self.nan.fill_(self._nothing)
            self.hide()
            raise RuntimeError(
                f"parameter {slot.name!r} was written to while absent, and what was "
                "written is lost; write to it inside "
                "zero.GatheredParameters(..., modifier_rank=0)"
            )

    def _point(self, tensors: list[Tensor], status: ZeroParamStatus) -> None:
        self._pointed = tensors
        absent = tensors is self.absent
        for slot, tensor in zip(self.slots, tensors, strict=True):
            p: Any = slot.parameter
            if p.sharded_in is self:  # no other buffer has taken it over
                point(p, tensor, absent)
                p.ds_status = status


def _no_state() -> None:
    """What a copy or a pickle takes of what is noted on a parameter."""


_unchecked = False


@contextmanager
def unchecked() -> Iterator[None]:
    """`check_present` lets everything pass: what is inside leaves parameters alone."""
    global _unchecked
    before, _unchecked = _unchecked, True
    try:
        yield
    finally:
        _unchecked = before


def check_present(params: Iterable[nn.Parameter], done: str) -> None:
    """Raise RuntimeError if one of them would be `done` while it is absent."""
    for flat in () if _unchecked else owners(params):
        if not flat.whole:
            raise RuntimeError(
                f"the parameters cannot be {done} now: they are sharded, and "
                f"{flat.slots[0].name!r} is absent; do it inside minizero.zero."
                "GatheredParameters(model.parameters()) (with modifier_rank=0 if you "
                "change them), or call engine.module_state_dict() on every rank"
            )


def _is_integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex())


def owners(params: Iterable[nn.Parameter]) -> list[ShardedFlat]:
    """The sharded buffers that hold these parameters, each once."""
    found = (getattr(p, "sharded_in", None) for p in params)
    return list(dict.fromkeys(flat for flat in found if flat is not None))


def note_views(flats: Iterable[Any], kept: Iterable[Any]) -> None:
    """Let buffers leave their memory to views of them that are among the `kept`.

    What a forward has left on its module, or returns, is read when the buffer has been
    freed; without memory of its own that would be a read of nowhere.
    """
    for x in kept:
        if type(x) is Tensor:
            for flat in flats:
                flat.seen |= torch._C._is_alias_of(x, flat.full)  # type: ignore[attr-defined]


def is_sharded(p: nn.Parameter) -> bool:
    """Whether a parameter lives in a sharded buffer."""
    return hasattr(p, "sharded_in")


def sharded_below(leaves: Iterable[Any]) -> list[nn.Parameter]:
    """The sharded parameters among these, or that they are views of.

    A view, such as a row, has the storage of its parameter, which is freed with it.
    """
    tensors = (x for x in leaves if isinstance(x, Tensor))
    bases = (t if t._base is None else t._base for t in tensors)
    return [p for p in bases if isinstance(p, nn.Parameter) and is_sharded(p)]
