"""ZeRO-3: parameters that exist only while they are used."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .. import comm
from ..comm import Work
from ..memory.labels import label
from ..memory.plan import Plan
from .flat import Flat, Unit
from .seams import Storage
from .stage2 import ZeRO2


class ShardedFlat(Flat):
    """A flat buffer whose storage is empty, except from `gather` to `free`.

    While it is empty, the parameters are views of one NaN that is expanded
    to their shapes: shapes stay right, and values read as NaN.

    `stored`: what this rank stores of it between steps; `shard`, a part of
        that, is what it updates: here, all of it.
    `is_unsharded`: whether `full` has its storage.
    `used`: whether the unit needs it. `holders`: how many others do.
    """

    storage = Storage(Plan.stage(3))
    is_unsharded, used, holders = True, False, 0
    _arriving: Work | None = None

    def fill(self) -> None:
        """Take the parameters over, out of `zero.Init`'s buffers if need be.

        One of those at a time is unsharded.
        """
        before: ShardedFlat | None = None
        for slot, view in zip(self.slots, self.views(), strict=True):
            p: Any = slot.parameter
            source = getattr(p, "sharded_in", None)
            if source is not before:
                if before is not None:
                    before.free()
                if source is not None:
                    source.unshard()
                before = source
            view.copy_(p.detach())
            p.sharded_in = self
            p.__deepcopy__, p.__reduce_ex__ = partial(_copy, p), _refuse_pickle
        if before is not None:
            before.free()
        self.cut()
        self.point(self.whole)

    def cut(self) -> None:
        """Cut the views that parameters are: an empty storage gives none."""
        self.whole = self.views()
        is_float = self.full.is_floating_point() or self.full.is_complex()
        nan = self.full.new_full((), torch.nan if is_float else 0)
        self.freed = [nan.expand(slot.shape) for slot in self.slots]

    def point(self, tensors: list[Tensor]) -> None:
        for slot, tensor in zip(self.slots, tensors, strict=True):
            p: Any = slot.parameter
            if p.sharded_in is self:
                p.data = tensor
        self._noted = self._state()

    def cast(self, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        super().cast(dtype, grad_dtype)
        self.cut()
        self.point(self.whole)

    def keep(self, storage: Storage) -> None:
        """Store what this rank keeps, and free the rest."""
        self.storage, kept = storage, self.kept(self.full)
        self.stored = storage.store(kept, "parameters", self)
        first = self.own(self.full).storage_offset() - kept.storage_offset()
        own = self.own(self.full).numel()
        is_part = own < kept.numel()
        self.shard = self.stored[first : first + own] if is_part else self.stored
        self.free()

    def gather(self) -> Work | None:
        """Launch the all-gather of the shards into `full`.

        None if that has arrived already.
        """
        if self.is_unsharded:
            return self._arriving
        self._check_unwritten()
        self.full.untyped_storage().resize_(self.full.nbytes)
        self.is_unsharded = True
        with self.storage.on_copy_stream() as arrive:
            own = self.storage.load(self.stored, self.kept(self.full))
            work = self.launch_gather(own)
        self._arriving = work
        return work.then(arrive).then(self._arrived)

    def launch_gather(self, own: Tensor) -> Work:
        """Launch the all-gather of what each rank stores."""
        return comm.all_gather(
            self.full, own, async_op=True, group=self.ranks
        )

    def kept(self, buffer: Tensor) -> Tensor:
        """The part of a buffer that this rank stores: its shard."""
        return self.own(buffer)

    def _arrived(self) -> None:
        self._arriving = None
        self.point(self.whole)

    def unshard(self) -> None:
        """Gather, and wait for it."""
        work = self.gather()
        if work is not None:
            work.wait()

    def free(self, seen: bool = False) -> None:
        """Empty the storage, unless somebody still needs it.

        `seen`: a script may have kept views of it; they keep that storage.
        """
        if self._arriving is not None:
            self._arriving.wait()  # it must not write into freed memory
        if not self.is_unsharded or self.used or self.holders:
            return
        if seen:
            dtype, where = self.full.dtype, self.full.device
            self.point(self.freed)
            self.whole, self.full = [], self.full[:0].clone()  # frees it
            full = torch.empty(self.padded, dtype=dtype, device=where)
            self.full = label(full, "parameters")
            self.cut()
        self.point(self.freed)
        # not `p.data = empty`: the graph's views would keep the storage
        self.full.untyped_storage().resize_(0)
        self.is_unsharded = False

    def make_exact(self) -> None:
        """Bring what a quantized all-gather has rounded: here, nothing."""

    def take_over(self, modifier_rank: int) -> None:
        """Keep what that rank has written to the parameters, everywhere."""
        for slot, view in zip(self.slots, self.whole, strict=True):
            p = slot.parameter
            if p.data_ptr() != view.data_ptr() and p.sharded_in is self:  # type: ignore[attr-defined]
                view.copy_(p.data)  # after `p.data = values`
        comm.broadcast(self.full, modifier_rank, group=self.ranks)
        self.storage.write_shard(self.stored, self.kept(self.full))

    def changed(self) -> None:
        super().changed()
        self._noted = self._state()

    def _state(self) -> list[tuple[int, int]]:
        every = [slot.parameter for slot in self.slots]
        return [
            (0 if p.is_inference() else p._version, p.data_ptr())
            for p in every
        ]

    def _check_unwritten(self) -> None:
        """Raise RuntimeError for what was written to freed parameters."""
        now = self._state()
        for slot, a, b in zip(self.slots, self._noted, now, strict=True):
            if a != b and slot.parameter.sharded_in is self:  # type: ignore[attr-defined]
                self.point(self.freed)
                raise RuntimeError(
                    f"parameter {slot.name!r} was written to while it was "
                    "sharded, and what was written is lost; write to it "
                    "inside zero.GatheredParameters(..., modifier_rank=0)"
                )


def _copy(p: Any, memo: Any) -> nn.Parameter:
    """For `copy.deepcopy`: a parameter of its own."""
    values = p.detach().clone()  # inside `zero.Init` this gathers
    if not p.sharded_in.is_unsharded:
        raise RuntimeError(
            "a sharded parameter cannot be copied, since it has no values "
            "here; do it inside zero.GatheredParameters(model.parameters())"
        )
    return nn.Parameter(values, p.requires_grad)


def _refuse_pickle(protocol: Any) -> Any:
    raise RuntimeError(
        "a sharded parameter cannot be pickled or saved; save the weights "
        "of net.state_dict(), which every rank calls"
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


class Hook:
    """Calls a function; a copy of its module has none."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    """What a copied hook calls."""


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
        for flat in unit.flats:
            flat.used = True
            work = flat.gather()
            if work is not None:
                unit.works.append(work)

    def release(self, unit: Unit) -> None:
        """Free the unit's parameters."""
        for flat in unit.flats:
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
            refuse_views(unit, outputs)

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
        if not flat.is_unsharded:
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


def refuse_views(unit: Unit, outputs: Iterable[Tensor]) -> None:
    """Raise RuntimeError if the unit returns memory that has been freed."""
    memory = {flat.full.untyped_storage()._cdata for flat in unit.flats}
    if any(x.untyped_storage()._cdata in memory for x in outputs):
        raise RuntimeError(
            f"unit {unit.name!r} returns a view of its parameters, and their "
            "memory is freed now; return a clone"
        )


def refuse_sharded_state(module: nn.Module) -> None:
    """Let the module's `state_dict` and `load_state_dict` raise RuntimeError
    while its parameters are sharded."""
    if not hasattr(module, "_refuses_sharded_state"):
        module._refuses_sharded_state = True  # type: ignore[assignment]
        module.register_state_dict_pre_hook(_check_unsharded)
        module.register_load_state_dict_pre_hook(_check_unsharded)


def _check_unsharded(module: nn.Module, *_: Any) -> None:
    for p in module.parameters():
        flat = getattr(p, "sharded_in", None)
        if flat is not None and not flat.is_unsharded:
            raise RuntimeError(
                "the parameters are sharded; do this inside "
                "zero.GatheredParameters(model.parameters()), with "
                "modifier_rank=0 to load, or call net.state_dict() "
                "(engine.module_state_dict()) on every rank"
            )
