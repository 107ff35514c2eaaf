"""What a script does to parameters and gradients by itself, as plain PyTorch lets it.

Looked for where a backward or a step begins, in one pass over the parameters that waits
for no device. What every rank can take over alone is taken over; the rest is refused:

- a gradient that was dropped (`p.grad = None`, `model.zero_grad()`), zeroed or set, as
  `.grad` or as `.grad.data`;
- a parameter that was frozen (it has no gradient from then on, and the optimizer leaves
  alone what has none) or that requires gradients by now (it gets a place for them);
- values that were written in place: masters take them over. In a forward, as
  `nn.Embedding(max_norm=)` does, each rank writes others: with several ranks refused;
- `p.data = values`: copied to where the parameter belongs. Another parameter in its
  place or in a module that has come, another dtype or device: refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..memory.bytes import versions
from ..ranks.launch import rank, world_size
from .flat_buffer import NOTHING, Flat, Slot, Unit
from .interfaces import Home
from .moves import Moves
from .units import named

_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten.detach.default)
_ADD = torch.ops.aten.add_.Tensor
_SPREAD = (
    "{} needs a gradient that is spread over ranks; for the norm and for clipping there "
    "is net.clip_grad_norm(max_norm) (gradient_clipping in an engine's config), for a "
    "look minizero.deepspeed.utils.safe_get_full_grad"
)


class GradientElsewhere(Tensor):
    """Stands in `.grad` for a gradient that this rank does not have whole.

    It can be dropped or zeroed, which holds for the gradient; nothing else is
    computed with it. `zeroed`: whether it was.
    """

    zeroed = False

    @staticmethod
    def __new__(cls, p: nn.Parameter) -> GradientElsewhere:
        made: Any = Tensor._make_wrapper_subclass(
            cls, p.shape, dtype=p.dtype, device=p.device
        )
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GradientElsewhere(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ZERO:
            args[0].zeroed |= func is _ZERO[0]
            return args[0]
        if func is _ADD and torch._C._current_graph_task_id() != -1:
            return args[0]  # autograd has brought more: the hook that it calls next tells
        raise RuntimeError(_SPREAD.format(func))

    def share_memory_(self) -> Any:
        """Not here: torch would look for memory where there is none, and crash."""
        raise RuntimeError(_SPREAD.format("share_memory_"))


class ScriptChanges(Moves):
    """Finds what has changed between the net's own calls."""

    model: nn.Module
    units: list[Unit]
    home: Home
    optimizer: torch.optim.Optimizer
    _owner: dict[nn.Parameter, tuple[Unit, Flat, Slot]]

    def refresh(self) -> None:
        """Let masters take over what is in the shards."""
        raise NotImplementedError

    def _unfreeze(self, flat: Flat) -> None:
        """Make room for the gradients and states of a buffer that was frozen."""
        raise NotImplementedError

    def _watch(self) -> None:
        """Remember the parameters as they are now."""
        self._note_places()
        self._versions = self._now()
        self._given = self._in_groups()
        self._elsewhere: dict[nn.Parameter, GradientElsewhere] = {}

    def _note_places(self) -> None:
        # side by side: an object for each would be one more for the garbage collector
        both = ((m._parameters, m._modules) for m in named(self.model))
        self._places = [place for places in both for place in places if place]
        self._there = self._in_places()

    def _in_places(self) -> list[object]:
        return [there for place in self._places for there in place.values()]

    def _now(self) -> list[int]:
        return versions(self._owner)

    def _in_groups(self) -> int:
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def _take_over(self) -> None:
        """Take over what the script has changed since the last call, or refuse it."""
        if self._in_groups() != self._given:
            raise RuntimeError(
                "parameters were added to the optimizer's groups, but they are in "
                "buffers by groups already; give the optimizer all of them before, "
                "frozen ones too, and set requires_grad when they shall train"
            )
        self._check_places()
        flats = [flat for unit in self.units for flat in unit.flats]
        moved = [(flat, slot) for flat in flats for slot in self._moved(flat)]
        for _, slot in moved:  # out of the others' places: two may have been swapped
            slot.parameter.data = slot.parameter.data.clone()
        for flat, slot in moved:
            flat.take([slot])
        if moved or self._now() != self._versions:
            self.refresh()

    def _thaw(self) -> None:
        """Let parameters train that require gradients by now."""
        for unit in self.units:
            for flat in unit.flats:
                frozen = not flat.trainable
                if frozen and any(s.parameter.requires_grad for s in flat.slots):
                    self._unfreeze(flat)

    def _check_places(self) -> None:
        """A parameter may move within the model, but no other may come into it."""
        now = self._in_places()
        if len(now) == len(self._there) and all(map(is_, now, self._there)):
            return
        there = set(self.model.parameters())
        for p, (_, _, slot) in self._owner.items():
            if p not in there:
                raise RuntimeError(
                    f"parameter {slot.name!r} was replaced by another after the model "
                    "was wrapped, so what is trained would not be what the model uses; "
                    "copy values into it, under torch.no_grad() (for "
                    "load_state_dict: without assign=True)"
                )
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if p not in self._owner:
                raise RuntimeError(
                    f"parameter {name!r} came into the model after it was wrapped, so it "
                    "would be neither trained nor saved; change the model first, then "
                    "wrap it"
                )
        self._note_places()

    def _moved(self, flat: Flat) -> list[Slot]:
        """The parameters that are views of their buffer no more."""
        start, step = flat.address()
        moved = [
            slot
            for slot in flat.slots
            if slot.parameter.data_ptr() != start + step * slot.offset
            and slot.numel
            and flat.holds(slot)
        ]
        for slot in moved:
            p = slot.parameter
            same = (p.shape, p.dtype, p.device)
            placed = (slot.shape, flat.full.dtype, flat.full.device)
            if self.plan.parameters.sharded or same != placed:
                raise RuntimeError(
                    f"the data of parameter {slot.name!r} was replaced by a {p.dtype} "
                    f"tensor of shape {tuple(p.shape)} on {p.device}, after the model "
                    f"was wrapped with {flat.full.dtype} on {flat.full.device}; "
                    "convert and move a model before, and at stage 3 write to it "
                    "inside zero.GatheredParameters(..., modifier_rank=0)"
                )
        return moved

    @contextmanager
    def _forward_writes(self) -> Iterator[None]:
        """What a forward writes to parameters is this rank's alone."""
        if world_size() == 1:
            yield
            return
        before = self._now()
        yield
        after = self._now()
        if before == after:
            return
        slots = (slot for _, _, slot in self._owner.values())
        for slot, a, b in zip(slots, before, after, strict=True):
            if a != b:
                raise RuntimeError(
                    f"the forward has written to parameter {slot.name!r}, on each rank "
                    "what its own batch asked for, so that ranks would no longer "
                    "agree; do it between steps, on every rank alike (nn.Embedding: "
                    "without max_norm)"
                )

    def numbers(self, owned: list[Tensor]) -> list[int]:
        """Whose shards the owned ones would be if all were sharded."""
        return list(range(len(owned))) if len(owned) != 1 else [self.number]

    @property
    def number(self) -> int:
        """Of all shards, the one that this rank saves: its own."""
        return rank()

    def _show_gradients(self) -> None:
        """Let `.grad` tell who has a gradient, as after a backward of torch."""
        for flat in (flat for unit in self.units for flat in unit.trainable):
            here = not flat.reduced or len(self.owned_grads(flat)) == world_size()
            whole = here and flat.total is None and flat.grad is not None
            for slot in flat.slots if flat.came else ():
                p = slot.parameter
                if p not in flat.came:
                    continue
                if whole and flat.grad_dtype == p.dtype:
                    p.grad = slot.view(flat.new_grad())
                else:
                    if p not in self._elsewhere:
                        self._elsewhere[p] = GradientElsewhere(p)
                    p.grad = self._elsewhere[p]
                    self._elsewhere[p].zeroed = False
                flat.shown[p] = p.grad

    def _take_back_gradients(self, again: bool) -> None:
        """See what the script has done to what was shown.

        `again`: autograd brings more; what is no view of a buffer is in its way.
        """
        for flat in (flat for unit in self.units for flat in unit.trainable):
            grad = flat.full if flat.grad is None else flat.grad
            start, step = grad.data_ptr(), grad.itemsize
            for slot in flat.slots:
                p = slot.parameter
                shown = flat.shown.get(p)
                elsewhere = isinstance(shown, GradientElsewhere)
                if elsewhere:
                    changed = self._elsewhere[p].zeroed
                else:  # p.grad.data = ...; an empty one has no place
                    changed = (
                        shown is not None
                        and shown.data_ptr() != start + step * slot.offset
                        and slot.numel > 0
                        and flat.grad is not None
                    )
                if p.grad is not shown or changed:
                    if shown is not None or not again:
                        self._take_back(flat, slot)
                        shown = flat.shown.get(p)
                    elif p.grad is not None:  # set before: more is added to it
                        flat.collect(slot)
                # what was reduced is set aside, and its buffer is written anew
                if again and p.grad is shown and (elsewhere or flat.reduced):
                    p.grad = None
            if again:
                flat.shown.clear()

    def _take_back(self, flat: Flat, slot: Slot) -> None:
        p, shown = slot.parameter, flat.shown.get(slot.parameter)
        if p.grad is None:
            self._fill_grad(flat, slot, NOTHING)
            flat.came.discard(p)
            flat.shown.pop(p, None)
        elif isinstance(shown, GradientElsewhere) and p.grad is shown:
            self._fill_grad(flat, slot, 0.0)
            shown.zeroed = False
        elif not isinstance(shown, GradientElsewhere) and flat.grad is not None:
            view = slot.view(flat.new_grad()).copy_(p.grad)
            flat.came.add(p)
            if view.dtype == p.dtype:
                p.grad = flat.shown[p] = view
            else:
                p.grad = None
                flat.shown.pop(p, None)
        else:
            raise RuntimeError(
                f"the gradient of parameter {slot.name!r} was set, but it is spread "
                "over ranks; use minizero.deepspeed.utils.safe_set_full_grad"
            )

    def _fill_grad(self, flat: Flat, slot: Slot, value: float) -> None:
        """Fill all that there is of a parameter's gradient."""
        self.home.finish_adds()
        if flat.grad is not None:
            slot.view(flat.new_grad()).fill_(value)
        shard = [] if flat.grad_shard is None else self.owned_grads(flat)
        for parts in (shard, flat.total or []):
            for number, part in zip(self.numbers(parts), parts, strict=True):
                a, b = flat.cut(slot, number)
                values = slot.parameter.new_full([b - a], value, dtype=part.dtype)
                self.home.write_back(part, values, a)
