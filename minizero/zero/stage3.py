"""ZeRO-3: parameters that exist only while they are used (chapter 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .. import comm
from ..comm.collectives import Work
from ..memory.plan import Plan
from .flat import Flat, Named, Unit
from .seams import Storage
from .stage2 import ZeRO2


class ShardedFlat(Flat):
    """A flat buffer whose storage is empty, except between `gather` and `free`.

    While it is empty the parameters are views of one NaN, expanded to their shapes:
    shapes stay right, torch refuses most writes, and whoever reads them gets NaN.

    `users`: who needs it whole. `is_unsharded`: whether `full` has its storage.
    """

    storage: Storage

    def __init__(self, named: Named, group: int | None) -> None:
        super().__init__(named, group)
        self.users, self.is_unsharded = 0, True
        self._arriving: Work | None = None
        self._cut()

    def _cut(self) -> None:
        """Views are cut while the buffer is whole: an empty storage gives none."""
        self._whole, nan = self.views(), self.full.new_full((), torch.nan)
        self._absent = [nan.expand(slot.shape) for slot in self.slots]
        for slot in self.slots:
            slot.parameter.sharded_in = self

    def cast(self, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        super().cast(dtype, grad_dtype)
        self._cut()

    def gather(self) -> Work | None:
        """Launch the all-gather of the shards into `full`; None if it is whole."""
        if self.is_unsharded:
            return self._arriving
        self._check_unwritten()
        self.full.untyped_storage().resize_(self.padded * self.full.itemsize)
        self.is_unsharded = True
        with self.storage.on_copy_stream() as arrive:
            own = self.storage.load(self.shard, self.own(self.full))
            work = comm.all_gather(self.full, own, async_op=True)
        self._arriving = work.then(arrive).then(self._arrive)
        return self._arriving

    def _arrive(self) -> None:
        self._arriving = None
        self.point(self._whole)

    def free(self) -> None:
        """Empty the storage, unless somebody still needs it."""
        if self._arriving is not None:
            self._arriving.wait()  # nothing may land in freed memory
        if self.is_unsharded and not self.users:
            self.point(self._absent)
            self._note_versions()
            # not `p.data = empty`: the graph's views would keep the storage
            self.full.untyped_storage().resize_(0)
            self.is_unsharded = False

    def _note_versions(self) -> None:
        self._versions = [slot.parameter._version for slot in self.slots]

    def changed(self) -> None:
        super().changed()
        self._note_versions()

    def _check_unwritten(self) -> None:
        for slot, version in zip(self.slots, self._versions, strict=True):
            if slot.parameter._version != version:
                raise RuntimeError(
                    f"parameter {slot.name!r} was written to while it was absent; "
                    "write to it inside zero.GatheredParameters(..., modifier_rank=0)"
                )


class AfterBackward(torch.autograd.Function):
    """Identity on a unit's inputs; its backward ends the unit's backward."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: Tensor) -> Any:
        ctx.done = done
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.done()
        return None, *grads


def mark_inputs(done: Callable[[], None], args: Any, kwargs: Any) -> Any:
    """Inputs for whom `done` is called when they have all their gradients."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [
        i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad
    ]
    if places:
        marked = AfterBackward.apply(done, *(leaves[i] for i in places))
        for i, x in zip(places, marked, strict=True):
            leaves[i] = x
    return tree_unflatten(leaves, spec)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, and of objects in it, such as dataclasses."""
    leaves = tree_leaves(tree)
    objects = [
        vars(x) for x in leaves if hasattr(x, "__dict__") and not isinstance(x, Tensor)
    ]
    return [x for x in leaves + tree_leaves(objects) if isinstance(x, Tensor)]


class ZeRO3(ZeRO2):
    """Plan 3: parameters are sharded too (Rajbhandari et al. 2020, sec. 5.3).

    A unit is gathered before its forward and before its backward, and freed after each.
    The optimizer updates the shard; nothing is sent afterwards.
    """

    plan = Plan.stage(3)
    flat_type = ShardedFlat

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._forwards: Counter[Unit] = Counter()  # under way, one inside another
        # under way; of a unit's passes autograd ends one, then begins the next
        self._backwards: set[Unit] = set()
        self._coming: Counter[Unit] = Counter()  # forwards whose backward is to come
        for unit in self.units:
            before, after = (
                partial(self._before_forward, unit),
                partial(self._after_forward, unit),
            )
            hooks = unit.module.register_forward_pre_hook(
                before, prepend=True, with_kwargs=True
            )
            self.handles += (
                hooks,
                unit.module.register_forward_hook(after, always_call=True),
            )
            unit.module.register_state_dict_pre_hook(_check_whole)
            unit.module.register_load_state_dict_pre_hook(_check_whole)

    # ---- the operations

    def place(self, flat: Flat) -> None:
        """Keep a shard of the parameters."""
        super().place(flat)
        assert isinstance(flat, ShardedFlat)
        flat.storage = self.storage
        flat.shard = self.storage.store(flat.own(flat.full), "parameters")
        flat.free()

    def gather(self, unit: Unit) -> None:
        for flat in unit.flats:
            flat.users |= 1
            work = flat.gather()
            if work:
                unit.works.append(work)

    def release(self, unit: Unit) -> None:
        for flat in unit.flats:
            flat.users &= ~1
            flat.free()

    def publish(self, unit: Unit) -> None:
        """Nothing: the others fetch the shard when they need it."""

    # ---- when: around a unit's forward, and around its backward

    def _before_forward(
        self, unit: Unit, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if self.in_backward and unit in self._backwards:
            return args, kwargs  # checkpointing recomputes: it is whole
        self._forwards[unit] += 1
        if self._forwards[unit] > 1:
            return args, kwargs
        if unit is self.units[0] and not self.in_backward:
            self.schedule.forward_begins()
        self.run(self.schedule.needed(unit))
        if not torch.is_grad_enabled():
            return args, kwargs
        self._coming[unit] += not self.in_backward  # what is recomputed has no backward
        return mark_inputs(partial(self._after_backward, unit), args, kwargs)

    def _after_forward(
        self, unit: Unit, module: nn.Module, args: Any, out: Any
    ) -> None:
        """Also called, with None as `out`, when the forward has failed."""
        self._forwards[unit] -= 1
        if self._forwards[unit] < 0:  # it was recomputed
            del self._forwards[unit]
        elif self._forwards[unit] == 0:
            memory = [f.full.untyped_storage().data_ptr() for f in unit.flats]
            views = False
            for x in tensors(out):
                views |= x.untyped_storage().data_ptr() in memory
                if x.grad_fn is not None:
                    x.register_hook(partial(self._before_backward, unit))
            self._leave(unit)
            if views:
                raise RuntimeError(
                    f"unit {unit.name!r} returns a view of its parameters, and their "
                    "memory is freed now; return a clone"
                )

    def _before_backward(self, unit: Unit, _: Tensor) -> None:
        if unit not in self._backwards:
            self._backwards.add(unit)
            self.run(self.schedule.needed(unit))

    def _after_backward(self, unit: Unit) -> None:
        self._backwards.discard(unit)
        self._leave(unit)
        if self.in_backward:
            self._coming[unit] -= 1
            # below 0 nobody has counted, as where a graph is used again: reduce it last
            if self._coming[unit] == 0 and unit not in self._reduced:
                self._reduce(unit)

    def _leave(self, unit: Unit) -> None:
        if not self._in_use(unit):
            self.run(self.schedule.done(unit))

    def _in_use(self, unit: Unit) -> bool:
        return self._forwards[unit] > 0 or unit in self._backwards

    def _sweep(self) -> None:
        """Leave what is still whole: no input wants a gradient, or something failed."""
        left = [unit for unit in self.units if self._in_use(unit)]
        self._forwards.clear()
        self._backwards.clear()
        for unit in left:
            self._leave(unit)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.in_backward:
            self._sweep()
        return super().__call__(*args, **kwargs)

    def _arrived(self, unit: Unit) -> None:
        """Do not count gradients: `_after_backward` says when a unit is complete."""

    def _on_grad(self, p: nn.Parameter) -> None:
        unit, flat, slot = self.where[p]
        if not flat.is_unsharded:
            raise RuntimeError(
                f"parameter {slot.name!r} was used outside the forward of unit "
                f"{unit.name!r}, where it is absent and reads as NaN; make one unit of "
                "all that use it, or hold it with zero.GatheredParameters"
            )
        super()._on_grad(p)

    def _begin_backward(self) -> None:
        self._sweep()
        super()._begin_backward()

    def _end_backward(self) -> None:
        self._sweep()
        self._coming.clear()
        super()._end_backward()

    @contextmanager
    def gathered(self, units: list[Unit]) -> Iterator[None]:
        """As `DataParallel.gathered`; what is in use is whole already."""
        with super().gathered([unit for unit in units if not self._in_use(unit)]):
            yield


def _check_whole(module: nn.Module, *_: Any) -> None:
    absent = [
        f
        for p in module.parameters()
        if (f := getattr(p, "sharded_in", None)) and not f.is_unsharded
    ]
    if absent:
        raise RuntimeError(
            "the parameters are sharded; do this inside zero.GatheredParameters("
            "model.parameters()), or call engine.module_state_dict() on every rank"
        )
