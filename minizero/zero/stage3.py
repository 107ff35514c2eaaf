"""ZeRO-3: parameters that exist only while they are used."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..memory.plan import Plan
from .flat import Flat, Unit
from .guards import Hook, refuse_sharded_state
from .sharded import ShardedFlat
from .stage2 import ZeRO2


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
    """Call `done` when all these inputs have got their gradients."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, Tensor) and x.requires_grad
    ]
    if places:
        marked = AfterBackward.apply(done, *(leaves[i] for i in places))
        for i, x in zip(places, marked, strict=True):
            leaves[i] = x
    return tree_unflatten(leaves, spec)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree, and of objects in it, such as dataclasses."""
    if isinstance(tree, Tensor):
        return [tree]
    leaves = tree_leaves(tree)
    objects = [vars(x) for x in leaves if hasattr(x, "__dict__")]
    every = leaves + tree_leaves(objects)
    return [x for x in every if isinstance(x, Tensor)]


class ZeRO3(ZeRO2):
    """Plan 3: parameters are sharded too (Rajbhandari et al. 2020, sec. 5.3).

    A unit is gathered before its forward and before its backward, and freed
    after each. The optimizer updates the shard; nothing is sent afterwards.
    """

    plan = Plan.stage(3)
    flat_type = ShardedFlat

    def place(self, flat: Flat) -> None:
        """Keep a shard of the parameters."""
        super().place(flat)
        assert isinstance(flat, ShardedFlat)
        flat.keep(self.storage)

    def gather(self, unit: Unit) -> None:
        """Launch the all-gather of the unit's parameters."""
        flats: list[Any] = unit.flats
        for flat in flats:
            flat.used = True
            work = flat.gather()
            if work is not None:
                unit.works.append(work)

    def release(self, unit: Unit) -> None:
        """Free the unit's parameters."""
        flats: list[Any] = unit.flats
        for flat in flats:
            flat.used = False
            flat.free()

    def publish(self, unit: Unit) -> None:
        """Nothing: other ranks gather the shard when they need it."""

    # ---- when: around a unit's forward and around its backward

    def _register_hooks(self) -> None:
        """Also call `_before_forward` and `_after_forward` around units.

        The root's are also called around its own modules, such as an output
        layer, so that these may be called from outside of its forward.
        """
        super()._register_hooks()
        self._forwards: Counter[Unit] = Counter()  # depth of forwards running
        self._backwards: set[Unit] = set()  # whose backward is running
        # forwards whose backward has not come yet
        self._expected: Counter[Unit] = Counter()
        self._loss_is_nan: Tensor | None = None
        for unit in self.units:
            before = Hook(partial(self._before_forward, unit))
            after = Hook(partial(self._after_forward, unit))
            for module in self._users(unit):
                self.handles += [
                    module.register_forward_pre_hook(
                        before, prepend=True, with_kwargs=True
                    ),
                    module.register_forward_hook(after, always_call=True),
                ]
        for module in self.model.modules():
            if module._parameters or module is self.model:
                refuse_sharded_state(module)

    def _users(self, unit: Unit) -> list[nn.Module]:
        """The modules around whose forward a unit is gathered."""
        found = {unit.module: None}
        if unit is self.units[0]:
            own = {slot.parameter for f in unit.flats for slot in f.slots}
            for module in self.model.modules():
                if any(p in own for p in module.parameters(recurse=False)):
                    found[module] = None
        return list(found)

    def _before_forward(
        self, unit: Unit, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if self.in_backward and unit in self._backwards:
            return args, kwargs  # checkpointing computes it again: unsharded
        self._forwards[unit] += 1
        if self._forwards[unit] > 1:
            return args, kwargs
        if module is self.model and not self.in_backward:
            self.schedule.forward_begins()
        self.run(self.schedule.needed(unit))
        if not torch.is_grad_enabled():
            return args, kwargs
        # what checkpointing computes again has no backward of its own
        self._expected[unit] += not self.in_backward
        return mark_inputs(partial(self._after_backward, unit), args, kwargs)

    def _after_forward(
        self, unit: Unit, module: nn.Module, args: Any, out: Any
    ) -> None:
        """Also called, with None as `out`, when the forward has failed."""
        self._forwards[unit] -= 1
        if self._forwards[unit] < 0:  # computed again; see above
            del self._forwards[unit]
        elif self._forwards[unit] == 0:
            begin = partial(self._before_backward, unit)
            outputs = tensors_in(out)
            for x in outputs:
                if x.grad_fn is not None:
                    x.register_hook(begin)
            self._leave(unit)
            memory = {f.full.untyped_storage()._cdata for f in unit.flats}
            for x in outputs:
                if x.untyped_storage()._cdata in memory:
                    raise RuntimeError(
                        f"unit {unit.name!r} returns a view of its "
                        "parameters, and their memory is freed now; return "
                        "a clone"
                    )

    def _before_backward(self, unit: Unit, _: Tensor) -> None:
        if unit not in self._backwards:
            self._backwards.add(unit)
            self.run(self.schedule.needed(unit))

    def _after_backward(self, unit: Unit) -> None:
        self._backwards.discard(unit)
        self._leave(unit)
        if self.in_backward:
            self._expected[unit] -= 1
            # below 0, as where a graph is used again, more may come: reduce
            # it at the end
            if self._expected[unit] == 0 and unit not in self._reduced:
                self._reduce(unit)

    def _leave(self, unit: Unit) -> None:
        if not self._in_use(unit):
            self.run(self.schedule.done(unit))

    def _in_use(self, unit: Unit) -> bool:
        return self._forwards[unit] > 0 or unit in self._backwards

    # ---- at the ends of a whole forward or backward

    def _leave_all(self) -> None:
        """Release what is in use: units none of whose inputs has a gradient,
        such as the root, and what a failure has left."""
        left = [unit for unit in self.units if self._in_use(unit)]
        self._forwards.clear()
        self._backwards.clear()
        for unit in left:
            self._leave(unit)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if not self.in_backward:
            self._leave_all()
        return super().__call__(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """As `DataParallel.backward`; warns after a loss that was NaN."""
        if self._loss_is_nan is not None and self._loss_is_nan.item():
            warnings.warn(
                "the last loss was NaN. At stage 3 parameters read as NaN "
                "outside of their unit's forward, as in a penalty that is "
                "added to the loss: compute it inside the model's forward, "
                "or from outputs",
                stacklevel=2,
            )
        self._loss_is_nan = loss.detach().isnan().any()
        super().backward(loss, retain_graph)

    def _begin_backward(self) -> None:
        self._leave_all()
        super()._begin_backward()

    def _end_backward(self) -> None:
        self._leave_all()
        self._expected.clear()
        super()._end_backward()

    def _reduce_complete(self) -> None:
        """Nothing: `_after_backward` reduces a unit.

        Ranks that use different parameters of a unit count differently, but
        all of them leave the unit at the same place among the gathers.
        """

    def _on_grad(self, p: nn.Parameter) -> None:
        unit, flat, slot = self.where[p]
        if isinstance(flat, ShardedFlat) and not flat.is_unsharded:
            raise RuntimeError(
                f"parameter {slot.name!r} was used outside of the forward of "
                f"unit {unit.name!r}, where it reads as NaN; make one unit of "
                "all modules that use it"
            )
        super()._on_grad(p)

    @contextmanager
    def gathered(self, units: list[Unit]) -> Iterator[None]:
        """As `DataParallel.gathered`; what is in use is unsharded already."""
        idle = [unit for unit in units if not self._in_use(unit)]
        with super().gathered(idle):
            yield
