"""Data parallelism on flat buffers: every rank keeps everything."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import comm
from ..memory import labels
from ..memory.plan import Plan
from .elementwise import check_elementwise, groups_of, take_state
from .flat import (
    Flat,
    Policy,
    Slot,
    Unit,
    assign,
    find_units,
    in_order,
    materialise,
    split,
)
from .guards import (
    OWNERS,
    check_model,
    check_unchanged,
    note_writes,
    refuse_step,
    take_over_writes,
)
from .muon import Muon
from .seams import Action, Precision, Schedule, Storage


class DataParallel:
    """Plan 0: every rank keeps everything; gradients are averaged over ranks.

    The stages of ZeRO are subclasses. They change the four operations of a
    unit, `gather`, `release`, `reduce` and `publish`, and what stays
    allocated between steps.

    `optimizer`: an element-wise one of `torch.optim` over the model's
        parameters (or `zero.Muon`); from now on it updates shards.
    `units`: says which modules communicate as one (default: `find_units`).
    `bucket_size`: most elements in one reduction.
    `group`: the ranks that train the model together (default: all).

    `has_gradients`: whether a backward has run since the last step.
    `handles`: of the hooks on the model.
    """

    plan = Plan.stage(0)
    flat_type: Callable[..., Flat] = Flat

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        units: Policy | None = None,
        bucket_size: int = 500_000_000,
        precision: Precision | None = None,
        schedule: Schedule | None = None,
        storage: Storage | None = None,
        plan: Plan | None = None,
        group: comm.Group | None = None,
    ) -> None:
        self.plan, self.group = plan or self.plan, group or comm.everyone()
        check_model(model, self.plan)
        check_elementwise(optimizer)
        if bucket_size < 1:
            raise ValueError(
                f"bucket_size must be at least 1 element, not {bucket_size!r}"
            )
        self.model, self.optimizer = model, optimizer
        self.bucket_size = bucket_size
        self.precision = precision or Precision()
        self.schedule = schedule or Schedule()
        self.storage = storage or Storage(self.plan)
        self.storage.attach(self.plan, self.schedule, optimizer)
        self.syncing, self.in_backward = True, False
        self.has_gradients = self.unsynced = False
        self._reduced: set[Unit] = set()
        self._build(units)
        self._register_hooks()
        self._adopt_optimizer()
        self.schedule.attach(self.units, self.plan)

    def _build(self, policy: Policy | None) -> None:
        """Make units and buffers, with rank 0's values, as the plan says."""
        group_of = groups_of(self.model, self.optimizer)
        modules = find_units(self.model, policy)
        muon = self.optimizer if isinstance(self.optimizer, Muon) else None
        self.units: list[Unit] = []
        with comm.phase("init"):
            for name, params in assign(self.model, modules).items():
                materialise(self.model, [p for _, p in params])
                unit = Unit(name or "root", modules[name])
                for group, part in split(params, group_of):
                    layout = muon.layout(group) if muon else in_order
                    flat = self.flat_type(part, group, layout, self.group)
                    comm.broadcast(flat.full, group=self.group)
                    own = self.owned(flat.full, flat)
                    flat.start = int(own.storage_offset())
                    copy = self.precision.attach(flat, own)
                    self.place(flat)
                    flat.master = flat.shard
                    if flat.trainable:
                        flat.master = self.storage.master(flat, copy)
                    unit.flats.append(flat)
                self.units.append(unit)
            materialise(self.model, list(self.model.buffers()))
            every = {
                buffer: module
                for module in self.model.modules()
                for buffer in module.buffers(recurse=False)
            }
            for buffer, module in every.items():
                values = buffer.contiguous()
                comm.broadcast(values, group=self.group)
                if values is not buffer:  # expanded ones have no memory
                    buffer.data = torch.empty_like(buffer).copy_(values)
                labels.label(buffer, "buffers")
                self.precision.attach_buffer(buffer, module)
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.trained = [flat for flat in self.flats if flat.trainable]

    def place(self, flat: Flat) -> None:
        """Allocate what this plan keeps of a buffer between steps."""
        flat.shard = self.owned(flat.full, flat)
        if flat.trainable:
            flat.grad_buffer()

    def _register_hooks(self) -> None:
        """Let autograd report each parameter's gradient to `_on_grad`."""
        self.where: dict[nn.Parameter, tuple[Unit, Flat, Slot]] = {}
        # weak: a parameter must not keep its net alive
        hook = partial(_call, weakref.WeakMethod(self._on_grad))
        self.handles: list[Any] = []
        for unit in self.units:
            for flat in unit.flats:
                for slot in flat.slots:
                    p = slot.parameter
                    self.where[p] = unit, flat, slot
                    OWNERS[p] = weakref.ref(self)
                    if flat.trainable:
                        handle = p.register_post_accumulate_grad_hook(hook)
                        self.handles.append(handle)
        note_writes(self)

    def _adopt_optimizer(self) -> None:
        """Let the optimizer's groups hold what this rank updates.

        State that it has already is cut into the same shards.
        """
        for group in self.optimizer.param_groups:
            group["params"] = []
        for flat in self.trained:
            assert flat.group is not None
            master = flat.master
            self.optimizer.param_groups[flat.group]["params"].append(master)
            for key, value in take_state(self.optimizer, flat).items():
                if isinstance(value, Tensor) and value.ndim:
                    part = self.owned(value, flat)
                    if part.is_floating_point():
                        wide = torch.promote_types(part.dtype, master.dtype)
                        part = part.to(wide)
                    value = self.storage.store(part, "optimizer")
                self.optimizer.state[master][key] = value
            if isinstance(self.optimizer, Muon):
                self.optimizer.take(master, flat)
        self.handles.append(self.optimizer.register_step_pre_hook(refuse_step))

    # ---- operations of a unit: they launch collectives, `wait` waits for them

    def gather(self, unit: Unit) -> None:
        """Launch the all-gather of the unit's parameters: not needed here."""

    def release(self, unit: Unit) -> None:
        """Free what `gather` has allocated."""

    def reduce(self, unit: Unit) -> None:
        """Launch the averaging of the unit's gradients over ranks."""
        for flat in unit.trainable:
            shards = flat.full_grad().view(self.group.size, -1)
            for part in flat.pieces(self.bucket_size):
                work = comm.all_reduce(
                    shards[:, part], async_op=True, average=True,
                    group=self.group,
                )  # fmt: skip
                unit.works.append(work)
            work.then(partial(self.reduced, flat))

    def reduced(self, flat: Flat) -> None:
        """Called when the mean has arrived: add it to earlier ones."""
        mean = self.owned(flat.full_grad(), flat)
        if flat.mean is None:
            flat.mean = mean
        else:
            flat.mean.add_(mean)

    def publish(self, unit: Unit) -> None:
        """Launch what sends updated shards to other ranks: not needed here."""

    def owned(self, buffer: Tensor, flat: Flat) -> Tensor:
        """The part of a buffer that this rank updates: here, all of it."""
        return buffer

    def run(self, actions: Iterable[Action]) -> None:
        """Carry out what the schedule has answered."""
        for operation, unit in actions:
            if operation == "wait":
                unit.wait()
            else:
                with comm.phase(unit=unit.name):
                    labels.mark(operation, unit.name)
                    getattr(self, operation)(unit)

    def wait(self) -> None:
        """Wait for all collectives under way."""
        for unit in self.units:
            unit.wait()

    # ---- forward and backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        args, kwargs = self.precision.inputs(args, kwargs)
        with comm.phase("forward"):
            return self.model(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Compute gradients of `loss`, averaged over ranks.

        Gradients of several calls add up until `step`: divide the loss by
        the number of micro-batches if you want their mean.
        """
        with comm.phase("backward"):
            self._begin_backward()
            try:
                loss = self.precision.scale_loss(loss)
                loss.backward(retain_graph=retain_graph)
                self._end_backward()
            finally:
                self.in_backward = False

    def _begin_backward(self) -> None:
        self.wait()  # for what a backward that failed has left
        check_unchanged(self)
        self.in_backward = self.has_gradients = True
        self.schedule.backward_begins()
        self._left = list(self.units)  # the last unit's gradients come first
        self._reduced.clear()
        for unit in self.units:
            slots = [slot for flat in unit.trainable for slot in flat.slots]
            unit.missing = {slot.parameter for slot in slots}
            for flat in unit.trainable:
                self.set_aside(flat)

    def set_aside(self, flat: Flat) -> None:
        """Keep the mean of earlier micro-batches out of the buffer."""
        if flat.mean is not None and not self.unsynced:
            flat.mean = labels.label(flat.mean.clone(), "gradients")
            flat.mark_uninitialized()

    def _on_grad(self, p: nn.Parameter) -> None:
        """The hook: autograd has left a gradient in `p.grad`."""
        unit, flat, slot = self.where[p]
        if not self.in_backward:
            p.grad = None
            raise RuntimeError(
                f"a gradient of parameter {slot.name!r} came outside of "
                "backward(loss) of the wrapper; call that in place of "
                "loss.backward()"
            )
        if unit in self._reduced:
            raise RuntimeError(
                f"a gradient of parameter {slot.name!r} came after its unit "
                f"{unit.name!r} was reduced, as with reentrant checkpointing "
                "of a module that is called twice; use "
                "checkpoint(..., use_reentrant=False)"
            )
        flat.collect(slot)
        unit.missing.discard(p)
        self._reduce_complete()

    def _reduce_complete(self) -> None:
        """Reduce complete units, in one order on every rank.

        Without that order, ranks that use different parameters would reduce
        different units at the same moment.
        """
        while self.syncing and self._left and not self._left[-1].missing:
            self._reduce(self._left.pop())

    def _reduce(self, unit: Unit) -> None:
        self._reduced.add(unit)
        self.run(self.schedule.grads_ready(unit))

    def _end_backward(self) -> None:
        """Reduce the units that never became complete, with zeros."""
        self.unsynced = not self.syncing
        for unit in reversed(self.units) if self.syncing else ():
            if unit not in self._reduced:
                self._reduce(unit)
        self.wait()
        self.schedule.backward_ends()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds up; the next one outside reduces.

        RuntimeError where gradients are sharded: a sum has no place to stay.
        """
        if self.plan.gradients.sharded:
            raise RuntimeError(
                f"{type(self).__name__} shards gradients, so every "
                "micro-batch is reduced; call backward without no_sync, or "
                "use a plan with replicated gradients (stage 0 or 1)"
            )
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    # ---- the step

    def grad_norm(self) -> Tensor:
        """The 2-norm of all gradients, the same on every rank and plan.

        The norms of all N shards are added in one order, whoever has them.
        """
        with comm.phase("step", unit="gradient norm"):
            norms = [
                torch.linalg.vector_norm(
                    mean.view(-1, flat.size), dim=1,
                    dtype=torch.promote_types(mean.dtype, torch.float32),
                )  # fmt: skip
                for flat, mean in zip(self.trained, self._means(), strict=True)
            ]
            if not norms:
                return torch.zeros(())
            mine = comm.reachable(torch.stack(norms, dim=1))
            norm = self.all_rows(mine).square().sum().sqrt()
            return self.precision.unscale_norm(norm)

    def all_rows(self, mine: Tensor) -> Tensor:
        """A row for each of the N shards, from rows for those owned here."""
        if len(mine) == self.group.size:
            return mine
        every = mine.new_empty(self.group.size, mine.shape[1])
        comm.all_gather(every, mine, group=self.group)
        return every

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients to a norm of at most `max_norm`.

        Returns the norm before; it is not finite if a gradient is not.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, not {max_norm!r}")
        norm = self.grad_norm()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self.precision.clip(self._means(), factor)
        return norm

    def _means(self) -> list[Tensor]:
        """The mean gradients, when all reductions are done."""
        if self.unsynced:  # by `no_sync`
            self.unsynced = False
            for unit in reversed(self.units):
                self._reduce(unit)
            self.wait()
        self.storage.wait_for_copies()
        means = []
        for flat in self.trained:
            if flat.mean is None:  # there was no backward
                flat.mean = self.owned(flat.full_grad(), flat)
            means.append(flat.mean)
        return means

    def step(self) -> bool:
        """Update the parameters, and clear all gradients.

        False if the precision found gradients that are not finite, on any
        rank: then no rank has updated anything.
        """
        with comm.phase("step"):
            take_over_writes(self)
            means = self._means()
            comm.check_sequence()
            self.flush()
            ready = self.precision.can_step(means)
            update = self.storage.update(
                self.units if ready else [], self.optimizer, self.precision
            )
            with closing(update):  # type: ignore[type-var]
                for units in update:
                    self._updated(units)
            labels.label_states(self.optimizer)
        self.zero_grad()
        note_writes(self)
        labels.mark("step")
        return ready

    def _updated(self, units: list[Unit]) -> None:
        """Publish units whose shards have been updated."""
        for unit in units:
            unit.changed = unit.trainable
            for flat in unit.changed:
                flat.changed()
            self.run(self.schedule.updated(unit))

    def flush(self) -> None:
        """Wait for an update that the storage has left running."""
        arrived = self.storage.flush()
        self._updated(arrived)
        if arrived:
            labels.label_states(self.optimizer)
            self.wait()
            note_writes(self)

    def synchronize(self) -> None:
        """Wait for an update, reductions and publications under way."""
        self.flush()
        self.wait()

    def zero_grad(self) -> None:
        """Clear all gradients; `step` does it, an abandoned step needs it."""
        self.wait()
        self.storage.wait_for_copies()
        for flat in self.trained:
            self.clear_grads(flat)
        self.unsynced = self.has_gradients = False
        self.precision.grads_cleared()

    def clear_grads(self, flat: Flat) -> None:
        """Clear the gradients that stay allocated between steps."""
        flat.mark_uninitialized()
        flat.mean = None

    # ---- the parameters, read and written from outside

    def refresh(self) -> None:
        """Let masters take over what was written to parameters or shards.

        `step` calls it when it notices writes. All ranks must call it.
        RuntimeError while a delayed update runs, which would undo the writes.
        """
        for flat in self.trained:
            self.storage.refresh(flat, self.precision)
        note_writes(self)

    def shards_written(self) -> None:
        """Publish shards that were written directly, as by loading a run.

        Masters were written as well. All ranks must call it.
        """
        for unit in self.units:
            unit.changed = unit.flats
            for flat in unit.flats:
                flat.changed()
            release = Action("release", unit)
            self.run([release, *self.schedule.updated(unit)])
        self.zero_grad()
        note_writes(self)

    @contextmanager
    def gathered(self, units: list[Unit]) -> Iterator[None]:
        """The parameters of these units are unsharded inside the block."""
        for unit in units:
            self.run(self.schedule.needed(unit))
        try:
            yield
        finally:
            for unit in units:
                self.run(self.schedule.done(unit))

    def state_dict(self, frozen: bool = True) -> dict[str, Tensor]:
        """All weights and buffers in host memory, on rank 0; {} on others.

        Units are gathered one by one, so no rank holds more than one unit
        beside its shards. Tied parameters appear under each of their names.
        `frozen`: whether to include parameters that require no gradient.
        """
        self.synchronize()
        first = self.group.rank == 0
        values: dict[nn.Parameter, Tensor] = {}
        for unit in self.units:
            with self.gathered([unit]):
                for flat in unit.flats if first else ():
                    for slot in flat.slots if frozen or flat.trainable else ():
                        p = slot.parameter
                        values[p] = p.detach().cpu().clone()
        if not first:
            return {}
        named = self.model.named_parameters(remove_duplicate=False)
        weights = {name: values[p] for name, p in named if p in values}
        others = self.module_state().items()
        return weights | {k: v.detach().cpu().clone() for k, v in others}

    def module_state(self) -> dict[str, Any]:
        """Persistent buffers and extra state of all modules, by name."""
        state: dict[str, Any] = {}
        for name, module in self.model.named_modules(remove_duplicate=False):
            # one by one: `state_dict` refuses sharded parameters
            module._save_to_state_dict(state, f"{name}." if name else "", False)
        named = self.model.named_parameters(remove_duplicate=False)
        parameters = {name for name, _ in named}
        return {k: v for k, v in state.items() if k not in parameters}


def _call(method: weakref.WeakMethod[Callable[..., None]], p: Any) -> None:
    alive = method()
    # a parameter that was frozen since the forward is reported without one
    if alive is not None and p.grad is not None:
        alive(p)
