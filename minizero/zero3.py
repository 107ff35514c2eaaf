"""ZeRO-3: parameters that exist only while they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from minizero import comm, tracker
from minizero.comm import Work
from minizero.ddp import DataParallel
from minizero.flat import Flat, Slot, Unit
from minizero.memory import Plan
from minizero.zero1 import ZeRO1
from minizero.zero2 import ZeRO2


class ShardedFlat(Flat):
    """A flat buffer that is empty, except between `gather` and `free`.

    `shard`: [size], this rank's row, always there.
    While the storage is empty the parameters are views of a single NaN: they
    keep their shapes, read as NaN, and refuse to be written to.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], group: int | None
    ) -> None:
        super().__init__(named, group)
        nan = self.full.new_full((), torch.nan)
        # made now: a view cannot be cut from an empty storage
        self.views = [slot.view(self.full) for slot in self.slots]
        self.absent = [nan.expand(slot.shape) for slot in self.slots]
        self.shard = self.full.new_empty(0)
        self.pinned = 0

    def fill(self, slot: Slot) -> None:
        """Take a parameter over, from another sharded buffer if it is in one."""
        before = owners([slot.parameter])
        for old in before:
            if not old.whole:
                old.gather().wait()
        super().fill(slot)
        # on the parameter: a table of owners would keep them alive
        slot.parameter.sharded_in = self  # type: ignore[attr-defined]
        for old in before:
            old.free()

    @property
    def whole(self) -> bool:
        return self.full.untyped_storage().nbytes() > 0

    def split(self) -> None:
        """Keep the own row of `full`, and free the rest."""
        row = self.row(self.full)
        if self.shard.numel() != self.size:
            self.shard = tracker.label(row.clone(), "parameters")
        else:
            self.shard.copy_(row)
        self.free()

    def gather(self) -> Work:
        """Launch the all-gather of the shards into `full`."""
        self.full.untyped_storage().resize_(self.padded * self.full.itemsize)
        work = comm.all_gather(self.full, self.shard, async_op=True)
        return work.then(lambda: self._point(self.views))

    def free(self) -> None:
        """Empty the storage, unless somebody looks at it (`pinned`)."""
        if self.whole and not self.pinned:
            self._point(self.absent)
            # not `p.data = empty`: the graph's views would keep the storage
            self.full.untyped_storage().resize_(0)

    def _point(self, tensors: list[Tensor]) -> None:
        for slot, tensor in zip(self.slots, tensors, strict=True):
            if owners([slot.parameter]) == [self]:  # not taken over by another
                slot.parameter.data = tensor


def owners(params: Iterable[nn.Parameter]) -> list[ShardedFlat]:
    """The sharded buffers that hold these parameters, each once."""
    found = (getattr(p, "sharded_in", None) for p in params)
    return list(dict.fromkeys(flat for flat in found if flat is not None))


def is_sharded(p: nn.Parameter) -> bool:
    """Whether a parameter lives in a sharded buffer."""
    return hasattr(p, "sharded_in")


class _AfterBackward(torch.autograd.Function):
    """Identity on a unit's inputs; its backward ends the unit's backward."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: Tensor) -> Any:
        ctx.done = done
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.done()
        return None, *grads


class _Verbs(ZeRO2):
    """What the verbs do under plan 3; `ZeRO3` says when they are called."""

    plan = Plan.stage(3)
    flat_type = ShardedFlat

    def place(self, flat: Flat) -> None:
        super().place(flat)
        assert isinstance(flat, ShardedFlat)
        flat.split()

    def gather(self, unit: Unit) -> Iterator[Work]:
        for flat in unit.flats:
            assert isinstance(flat, ShardedFlat)
            if not flat.whole:
                yield flat.gather()

    def release(self, unit: Unit) -> None:
        for flat in unit.flats:
            assert isinstance(flat, ShardedFlat)
            flat.free()

    def owned(self, flat: Flat) -> list[Tensor]:
        assert isinstance(flat, ShardedFlat)
        return [flat.shard]

    def publish(self, unit: Unit) -> None:
        """Nothing: the others fetch the row when they need it."""


class ZeRO3(_Verbs):
    """Plan 3: parameters are sharded too (Rajbhandari et al. 2020, sec. 5.3).

    A unit is gathered before its forward and before its backward, and freed
    after each. The optimizer updates the shard; nothing is sent afterwards.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, **options)
        # calls whose backward is to come; calls whose backward is under way
        self._pending = dict.fromkeys((u.name for u in self.units), 0)
        self._active = dict(self._pending)
        self._recomputing: list[bool] = []  # one entry a forward under way
        for unit in self.units:
            before = partial(self._before_forward, unit)
            unit.module.register_forward_pre_hook(
                before, prepend=True, with_kwargs=True
            )
            after = partial(self._after_forward, unit)
            unit.module.register_forward_hook(after)

    def _gather(self, unit: Unit) -> None:
        with comm.phase(unit=unit.name):
            tracker.mark("gather", unit.name)
            self.schedule.gather(self, unit)

    def _release(self, unit: Unit) -> None:
        flats = (f for f in unit.flats if isinstance(f, ShardedFlat))
        whole = any(flat.whole for flat in flats)
        self.schedule.release(self, unit)
        if whole:
            tracker.mark("release", unit.name)

    def _before_forward(
        self, unit: Unit, _: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        if unit.module is self.model and not self._in_backward:
            self._release_all()  # what a forward that failed has left
        self._gather(unit)
        # A forward inside backward repeats a call that has its hooks already.
        # (With reentrant checkpointing it has none: that call made no graph.)
        again = self._in_backward and self._pending[unit.name] > 0
        self._recomputing.append(again)
        if again or not torch.is_grad_enabled():
            return args, kwargs
        self._pending[unit.name] += 1
        return self._mark_inputs(unit, args, kwargs)

    def _mark_inputs(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Pass the inputs through `_AfterBackward`."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = {i: x for i, x in enumerate(leaves) if _needs_grad(x)}
        if tensors:
            done = partial(self._after_backward, unit)
            marked = _AfterBackward.apply(done, *tensors.values())
            for i, x in zip(tensors, marked, strict=True):
                leaves[i] = x
        args, kwargs = tree_unflatten(leaves, spec)
        return args, kwargs

    def _after_forward(self, unit: Unit, _: nn.Module, args: Any, out: Any) -> None:
        again = self._recomputing.pop()
        if again and self._active[unit.name]:
            return  # the backward that made it recompute is about to use it
        tensors = [x for x in tree_leaves(out) if _needs_grad(x)]
        if tensors and not again:
            hook = partial(self._before_backward, unit)
            register_multi_grad_hook(tensors, hook, mode="any")
        self._release(unit)

    def _before_backward(self, unit: Unit, _: Tensor) -> None:
        self._active[unit.name] += 1
        self._gather(unit)

    def _after_backward(self, unit: Unit) -> None:
        self._pending[unit.name] -= 1
        self._active[unit.name] -= 1
        if self._active[unit.name] == 0:
            self._release(unit)
        if self._pending[unit.name] == 0 and unit in self._queue:
            self._queue.remove(unit)
            self._reduce(unit)

    def _arrived(self, unit: Unit) -> None:
        """Do not count: `_after_backward` says when a unit is complete.

        Ranks that use different parameters of one unit count differently, but
        they all leave the unit at the same place among the gathers.
        """

    def _end_backward(self) -> None:
        self._release_all()
        super()._end_backward()
        for unit in self.units:
            # gradients that came after their unit's reduction
            if any(flat.grad is not None for flat in unit.trainable):
                self._reduce(unit)
        self.schedule.drain(self)
        self._pending = dict.fromkeys(self._pending, 0)

    def _release_all(self) -> None:
        for unit in self.units:
            self._release(unit)
        self._active = dict.fromkeys(self._active, 0)
        self._recomputing.clear()


def _needs_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


_PLANS: tuple[type[DataParallel], ...] = (DataParallel, ZeRO1, ZeRO2, ZeRO3)


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | None = None,
    **options: Any,
) -> DataParallel:
    """Train `model` as `plan` says (default: stage 3).

    The options are those of `DataParallel`.
    """
    plan = Plan.stage(3) if plan is None else plan

    def sharded(plan: Plan) -> tuple[bool, ...]:
        return tuple(
            placement.sharded
            for placement in (plan.parameters, plan.gradients, plan.optimizer)
        )

    for kind in _PLANS:
        if sharded(kind.plan) == sharded(plan):
            break
    else:
        raise ValueError(
            f"{plan} is no stage of ZeRO; shard the optimizer state, then "
            "gradients, then parameters, as Plan.stage(1), (2) and (3) do"
        )
    if not plan.parameters.sharded and owners(model.parameters()):
        raise ValueError(
            "the model was built inside zero.Init, so its parameters are "
            "sharded; use a plan that shards parameters (stage 3), or build "
            "it outside"
        )
    return kind(model, optimizer, **options)
