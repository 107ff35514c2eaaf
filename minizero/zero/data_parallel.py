"""Data parallelism on flat buffers: every rank keeps everything (chapter 3)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils.weak import WeakIdKeyDictionary

from .. import comm
from ..memory import labels
from ..memory.plan import Plan
from ..ranks.launch import device, rank, world_size
from .elementwise import check_elementwise, groups_of, take_state
from .flat import Flat, Policy, Slot, Unit, assign, check_apart, find_units, split
from .seams import Storage, Action, Precision, Schedule

OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of each parameter, weakly


class DataParallel:
    """Plan 0: every rank keeps everything; gradients are averaged over ranks.

    The stages of ZeRO are subclasses: each changes what `gather`, `release`, `reduce`
    and `publish` do, and what stays allocated in between.

    `optimizer`: an element-wise one of `torch.optim` over the model's parameters; its
        groups are re-pointed at what this rank updates.
    `units`: says which modules communicate as one (default: `find_units`).
    `bucket_size`: most elements in one reduction.
    """

    plan = Plan.stage(0)
    flat_type: type[Flat] = Flat

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
    ) -> None:
        check_elementwise(optimizer)
        self.plan = plan or self.plan
        self.model, self.optimizer, self.bucket_size = model, optimizer, bucket_size
        self.precision = precision or Precision()
        self.schedule = schedule or Schedule()
        self.storage = storage or Storage(self.plan)
        self.syncing, self.in_backward, self.unsynced = True, False, False
        self._reduced: set[Unit] = set()
        check_apart(model)
        self._build(units)
        self._register_hooks()
        self._adopt_optimizer()
        self.schedule.attach(self.units, self.plan)

    # ---- construction

    def _build(self, policy: Policy | None) -> None:
        """Units and their buffers, with rank 0's values, placed as the plan says."""
        group_of, modules = (
            groups_of(self.model, self.optimizer),
            find_units(self.model, policy),
        )
        self.units: list[Unit] = []
        with comm.phase("init"):
            for name, params in assign(self.model, modules).items():
                materialise(p for _, p in params)
                unit = Unit(name or "root", modules[name])
                for group, part in split(params, group_of):
                    flat = self.flat_type(part, group)
                    comm.broadcast(flat.full)
                    master = self.precision.attach(flat, self.owned(flat.full, flat))
                    self.place(flat)
                    flat.master = self.storage.master(flat.shard, master)
                    unit.flats.append(flat)
                self.units.append(unit)
            materialise(self.model.buffers())
            seen: set[Tensor] = set()
            for module in self.model.modules():
                for buffer in module.buffers(recurse=False):
                    if buffer in seen:
                        continue
                    seen.add(buffer)
                    comm.broadcast(buffer)
                    self.precision.attach_buffer(
                        labels.label(buffer, "buffers"), module
                    )
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.trained = [flat for flat in self.flats if flat.trainable]

    def place(self, flat: Flat) -> None:
        """Allocate what this plan keeps between steps."""
        flat.shard = self.owned(flat.full, flat)
        if flat.trainable:
            flat.grad_buffer()

    def _register_hooks(self) -> None:
        """Autograd reports each parameter's gradient to `_on_grad`."""
        self.where: dict[nn.Parameter, tuple[Unit, Flat, Slot]] = {}
        # weak: a parameter must not keep its net alive
        this = weakref.WeakMethod(self._on_grad)
        self.handles: list[Any] = []
        for unit in self.units:
            for flat in unit.flats:
                for slot in flat.slots:
                    p = slot.parameter
                    self.where[p], OWNERS[p] = (unit, flat, slot), weakref.ref(self)
                    if flat.trainable:
                        hook = partial(_call, this)
                        self.handles.append(p.register_post_accumulate_grad_hook(hook))
        self._versions = self._now()

    def _adopt_optimizer(self) -> None:
        """Point the optimizer's groups, and its state, at what this rank updates."""
        for group in self.optimizer.param_groups:
            group["params"] = []
        for flat in self.trained:
            assert flat.group is not None
            self.optimizer.param_groups[flat.group]["params"].append(flat.master)
            for key, value in take_state(self.optimizer, flat).items():
                if isinstance(value, Tensor) and value.ndim:
                    value = self.owned(value, flat).to(flat.master, copy=True)
                self.optimizer.state[flat.master][key] = value
        self._guard = self.optimizer.register_step_pre_hook(self._only_from_step)
        self._stepping = False

    def _only_from_step(self, *_: Any) -> None:
        if not self._stepping:
            raise RuntimeError("call step() of the net: the optimizer has only shards")

    # ---- the operations: what a plan does to a unit. A operation launches, `Unit.wait` waits.

    def gather(self, unit: Unit) -> None:
        """Launch what makes the unit's parameters whole."""

    def release(self, unit: Unit) -> None:
        """Free what `gather` allocated."""

    def reduce(self, unit: Unit) -> None:
        """Launch what averages the unit's gradients over ranks."""
        for flat in unit.trainable:
            grad = flat.full_grad().view(world_size(), -1)
            for part in flat.pieces(self.bucket_size):
                work = comm.all_reduce(grad[:, part], async_op=True, average=True)
                unit.works.append(work)
            work.then(partial(self.reduced, flat))

    def reduced(self, flat: Flat) -> None:
        """The mean has arrived: add it to that of earlier micro-batches."""
        mean = self.owned(flat.full_grad(), flat)
        if flat.mean is None:
            flat.mean = mean
        else:
            flat.mean.add_(mean)

    def publish(self, unit: Unit) -> None:
        """Launch what sends updated shards to the ranks that keep them."""

    def owned(self, buffer: Tensor, flat: Flat) -> Tensor:
        """The part of a buffer that this rank updates: here, all."""
        return buffer

    def run(self, actions: Iterable[Action]) -> None:
        """Do what the schedule answered."""
        for operation, unit in actions:
            if operation == "wait":
                unit.wait()
            else:
                with comm.phase(unit=unit.name):
                    labels.mark(operation, unit.name)
                    getattr(self, operation)(unit)

    # ---- forward and backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        args, kwargs = self.precision.inputs(args, kwargs)
        with comm.phase("forward"):
            return self.model(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Gradients of `loss`, averaged over ranks (not inside `no_sync`).

        Gradients of several calls add up until `step`: divide the loss by the number of
        micro-batches yourself, if you want their mean.
        """
        with comm.phase("backward"):
            self._begin_backward()
            try:
                self.precision.scale_loss(loss).backward(retain_graph=retain_graph)
                self._end_backward()
            finally:
                self.in_backward = False

    def _begin_backward(self) -> None:
        self.wait()
        self._check_unchanged()
        self.in_backward = True
        self.schedule.backward_begins()
        self._left = list(self.units)  # the last unit's gradients come first
        self._reduced.clear()
        for unit in self.units:
            unit.missing = {s.parameter for f in unit.trainable for s in f.slots}
            for flat in unit.trainable if not self.unsynced else ():
                self._set_aside(flat)

    def _set_aside(self, flat: Flat) -> None:
        """Keep the mean of earlier micro-batches: the buffer gets new gradients."""
        if flat.mean is not None and flat.grad is not None:
            flat.mean = labels.label(flat.mean.clone(), "gradients")
            flat.mark_uninitialized()

    def _on_grad(self, p: nn.Parameter) -> None:
        """The hook: autograd has left a gradient in `p.grad`."""
        if not self.in_backward:
            p.grad = None
            raise RuntimeError("call backward(loss) of the net, not loss.backward()")
        unit, flat, slot = self.where[p]
        if unit in self._reduced:
            raise RuntimeError(
                f"a gradient of {slot.name!r} came after its unit was reduced, as with "
                "reentrant checkpointing of a module called twice; use "
                "checkpoint(..., use_reentrant=False)"
            )
        flat.collect(slot)
        unit.missing.discard(p)
        self._arrived(unit)

    def _arrived(self, unit: Unit) -> None:
        """Reduce complete units, in one order on every rank.

        Without the order, ranks that use different parameters would reduce different
        units at the same moment.
        """
        while self.syncing and self._left and not self._left[-1].missing:
            self._reduce(self._left.pop())

    def _reduce(self, unit: Unit) -> None:
        self._reduced.add(unit)
        self.run(self.schedule.grads_ready(unit))

    def _end_backward(self) -> None:
        """Units that never reported go last, with zeros."""
        self.unsynced = not self.syncing
        for unit in reversed(self.units) if self.syncing else ():
            if unit not in self._reduced:
                self._reduce(unit)
        self.wait()
        self.schedule.backward_ends()

    def wait(self) -> None:
        """Wait for everything under way."""
        for unit in self.units:
            unit.wait()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds up; the next one outside reduces."""
        if self.plan.gradients.sharded:
            raise RuntimeError("this plan shards gradients: every backward reduces")
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    # ---- the step

    def grad_norm(self) -> Tensor:
        """The 2-norm of all gradients, the same on every rank and for every plan.

        Shards' norms are summed in one order, whoever has them.
        """
        with comm.phase("step", unit="gradient norm"):
            self._finish_gradients()
            rows = [flat.mean.view(-1, flat.size) for flat in self.trained]
            norms = [
                torch.linalg.vector_norm(r, dim=1, dtype=torch.float32) for r in rows
            ]
            mine = torch.stack(norms, dim=1)
            if len(mine) < world_size():
                every = mine.new_empty(world_size(), mine.shape[1])
                comm.all_gather(every, mine)
                mine = every
            return self.precision.unscale_norm(mine.square().sum().sqrt())

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients to a norm of at most `max_norm`; returns that before."""
        norm = self.grad_norm()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self.precision.clip([f.mean for f in self.trained], factor)
        return norm

    def _finish_gradients(self) -> None:
        """Reduce what `no_sync` has left behind."""
        if self.unsynced:
            self.unsynced = False
            for unit in reversed(self.units):
                self._reduce(unit)
            self.wait()
        self.storage.wait_for_copies()
        for flat in self.trained:
            if flat.mean is None:  # no backward has come
                flat.mean = self.owned(flat.full_grad(), flat)

    def step(self) -> bool:
        """Update the parameters; gradients are zero afterwards.

        False if the precision found gradients that are not finite, on any rank: then no
        rank has updated anything.
        """
        with comm.phase("step"):
            self._take_over_writes()
            self._finish_gradients()
            ready = self.precision.can_step([f.mean for f in self.trained])
            for units in self.storage.staged(self.units) if ready else ():
                self._update([flat for unit in units for flat in unit.trainable])
                for unit in units:
                    self.run(self.schedule.updated(unit))
            self._versions = self._now()
        self.zero_grad()
        labels.mark("step")
        return ready

    def _update(self, flats: list[Flat]) -> None:
        """Let the optimizer update buffers whose shards are where it works."""
        for flat in flats:
            flat.master.grad = self.precision.cast_grad(flat.staged_grad)
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
        for flat in flats:
            flat.master.grad = None
            self.precision.master_to_shard(flat.master, flat.staged_shard)
            del flat.staged_shard, flat.staged_grad  # they would keep the gradient alive
            flat.changed()
        labels.label_states(self.optimizer)

    def zero_grad(self) -> None:
        """Forget all gradients; `step` does, an abandoned step needs it."""
        self.wait()
        for flat in self.trained:
            self.clear_grads(flat)
        self.unsynced = False
        self.precision.grads_cleared()

    def clear_grads(self, flat: Flat) -> None:
        """Forget the gradients that stay allocated between steps."""
        flat.mark_uninitialized()
        flat.mean = None

    # ---- the parameters, whole

    def _take_over_writes(self) -> None:
        """Masters take over what a script has written to parameters between steps."""
        if self._now() != self._versions:
            self.refresh()

    def _now(self) -> list[int]:
        return [p._version for p in self.where]

    def _check_unchanged(self) -> None:
        """Buffers are made for parameters that train, or for those that do not."""
        for p, (_, flat, slot) in self.where.items():
            if p.requires_grad != flat.trainable:
                raise RuntimeError(
                    f"requires_grad of {slot.name!r} has changed since the model was "
                    "wrapped; set it before"
                )

    def refresh(self) -> None:
        """Let masters take over what is in the shards. Call it on every rank."""
        for flat in self.trained:
            self.precision.shard_to_master(flat.master, flat.shard)

    @contextmanager
    def gathered(self, units: list[Unit]) -> Iterator[None]:
        """The parameters of these units are whole inside the block."""
        for unit in units:
            self.run(self.schedule.needed(unit))
        try:
            yield
        finally:
            for unit in units:
                self.run(self.schedule.done(unit))

    def state_dict(self) -> dict[str, Tensor]:
        """Whole weights and buffers in host memory, on rank 0; {} on others.

        Gathered unit by unit: no rank holds more than one unit beside its shards.
        """
        self.wait()
        found: dict[str, Tensor] = {}
        names = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        for unit in self.units:
            with self.gathered([unit]):
                for flat in unit.flats if rank() == 0 else ():
                    for slot in flat.slots:
                        value = slot.parameter.detach().cpu().clone()
                        found |= dict.fromkeys(names[slot.parameter], value)
        if rank() == 0:
            found |= {k: b.cpu().clone() for k, b in self.model.named_buffers()}
        return found


def _call(method: weakref.WeakMethod[Callable[..., None]], p: Tensor) -> None:
    alive = method()
    if alive is not None:
        alive(p)


def materialise(tensors: Iterable[Tensor]) -> None:
    """Put what is elsewhere, or on the meta device, on this rank's device."""
    for t in list(tensors):
        if t.is_meta:
            new = torch.empty_like(t, device=device())
            is_parameter = isinstance(t, nn.Parameter)
            # in place: the optimizer and other modules hold the same object
            swap_tensors(t, nn.Parameter(new, t.requires_grad) if is_parameter else new)
        elif t.device.type != device().type:
            t.data = t.data.to(device())
