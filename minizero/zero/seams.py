"""A net's precision, schedule and storage, and `Net`, the base class of all plans.

Later chapters replace the first three (4, 8, 10). Here they are as chapter 3 needs them:
one dtype, at once, in place.

`DataParallel` and `Net` are one class in two halves: the step, which chapter 3 shows,
and here what no plan changes. So calls go back and forth, as when a gradient is ready:
hook (here) > `_on_grad`, `_reduce` > `run` > the stage's `reduce` > `averaged` > `reduced`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from .. import comm
from ..memory import labels
from ..memory.labels import host_empty, label
from ..memory.plan import Plan
from ..ranks import device
from .build import Policy, point_at_shards, build_units, check_elementwise
from .flat import Flat, Slot, Unit
from .guards import NET_OF, check_model, refuse_sharded_state


class Precision:
    """The dtype of each copy of a parameter: here, its own, everywhere.

    `skipped_steps`: updates that were left out, their gradients not finite.
    """

    skipped_steps, is_used = 0, False

    def attach(self, flat: Flat, shard: Tensor) -> Tensor | None:
        """Called once with each flat buffer, to cast it.

        Returns a copy of the shard for the optimizer to update, if it needs one.
        """
        return None

    def attach_buffer(self, buffer: Tensor, module: nn.Module) -> None:
        """Called once with each buffer of the model, and its module, to cast it."""

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the model's forward gets: every tensor on the device."""
        return tree_map_only(Tensor, lambda t: t.to(device()), (args, kwargs))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """What backward starts from."""
        return loss

    def unscale_norm(self, norm: Tensor) -> Tensor:
        """The norm that gradients have when the optimizer gets them."""
        return norm

    def clip(self, grads: list[Tensor], factor: Tensor) -> None:
        """Multiply all reduced gradients with a scalar."""
        for grad in grads:
            grad.mul_(factor)

    def can_step(self, grads: list[Tensor]) -> bool:
        """Whether to update, the same on every rank; False skips the step."""
        return True

    def cast_grad(self, grad: Tensor) -> Tensor:
        """What the optimizer gets as gradient."""
        return grad

    def shard_to_master(self, master: Tensor, shard: Tensor) -> None:
        """Copy to a master what a script has written to the shard."""
        if master is not shard:
            master.copy_(shard)

    def grads_cleared(self) -> None:
        """Called when all gradients have been cleared."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, without tensors: JSON can hold it."""
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.skipped_steps = state["skipped_steps"]


class Action(NamedTuple):
    """One thing to do to a unit: launch an operation, or wait for all."""

    operation: Literal["gather", "release", "reduce", "publish", "wait"]
    unit: Unit


class Schedule:
    """When an operation is launched and waited for: here, at once.

    The net reports what happens to a unit; the schedule answers with actions, which the
    net (or a simulator) carries out in order. Ranks must launch the same collectives in
    the same order, so a schedule may decide only by what is the same on all of them.
    """

    def attach(self, units: Sequence[Unit], plan: Plan) -> None:
        """Called once; the root is the first unit."""

    def pass_begins(self, which: Literal["forward", "backward"]) -> None:
        """Called before the first gather of a forward or backward."""

    def backward_ends(self) -> None:
        """Called when every reduction of a backward has been waited for."""

    def needed(self, unit: Unit) -> list[Action]:
        """The unit's parameters are used next."""
        return [Action("gather", unit), Action("wait", unit)]

    def done(self, unit: Unit) -> list[Action]:
        """Nothing uses the unit's parameters any more, for now."""
        return [Action("release", unit)]

    def grads_ready(self, unit: Unit) -> list[Action]:
        """The unit's gradients of this backward are complete."""
        return [Action("reduce", unit), Action("wait", unit)]

    def updated(self, unit: Unit) -> list[Action]:
        """The unit's shards have been updated."""
        return [Action("publish", unit), Action("wait", unit)]

    def upcoming(self) -> list[Unit]:
        """Units whose parameters are expected next, the next one first."""
        return []


class Storage:
    """Where shards are stored between steps, and how they are updated.

    Here: on the device, in place (`zero.Init` also stores parameters on the host by it).
    `plan` says where each category is stored; `places`: those that a net may use.
    """

    places: tuple[str, ...] = ("device",)
    schedule: Schedule | None = None
    is_used = False

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def attach(self, plan: Plan, schedule: Schedule, optimizer: Optimizer) -> None:
        """Called once, by the net that it serves; ValueError if it cannot."""
        if plan != self.plan:
            raise ValueError(f"the storage is for {self.plan}, not for {plan}")
        for category, placement in vars(plan).items():
            if placement.on not in self.places:
                raise ValueError(
                    f"the plan places {category} on {placement.on!r}, but "
                    f"{type(self).__name__} serves {', '.join(self.places)} only; pass "
                    "minizero.Offload(plan) for 'cpu', minizero.NVMe(plan) for 'nvme'"
                )
        self.schedule = schedule

    def store(self, values: Tensor, category: str) -> Tensor:
        """A copy of `values`, a shard's, where the plan stores `category`."""
        if getattr(self.plan, category).on == "device":
            return label(values.clone(), category)
        return host_empty(values.shape, values.dtype, category).copy_(values)

    def master(self, flat: Flat, copy: Tensor | None) -> Tensor:
        """What the optimizer updates: the precision's copy, or the shard."""
        return flat.shard if copy is None else copy

    def load(self, shard: Tensor, into: Tensor) -> Tensor:
        """What an all-gather reads; `into` is the shard's place in `full`."""
        return shard if self.plan.parameters.on == "device" else into.copy_(shard)

    def on_copy_stream(self) -> AbstractContextManager[Callable[[], None]]:
        """Inside, loads and gathers run beside computation; yields what waits for them."""
        return nullcontext(lambda: None)

    def accumulate(self, shard: Tensor, mean: Tensor, first: bool) -> None:
        """Store a step's first mean gradient in the shard, or add a later one to it."""
        shard.copy_(mean) if first else shard.add_(mean)

    def wait_for_copies(self) -> None:
        """Wait until what `accumulate` has begun is in the shards."""

    def update(
        self, units: list[Unit], optimizer: Optimizer, precision: Precision
    ) -> Iterator[list[Unit]]:
        """Update these units; yields units whose shards are complete.

        All in one call of the optimizer; or one by one where gradients are cast for it,
        so that few copies exist at a time. Meanwhile a buffer has `staged_shard` and
        `staged_grad`: its shard and mean gradient, where they are updated.
        """
        flats = [flat for unit in units for flat in unit.trainable]
        for flat in flats:
            flat.staged_shard, flat.staged_grad = flat.shard, flat.mean
        cast = any(f.staged_grad.dtype != f.master.dtype for f in flats)
        for batch in [[unit] for unit in units] if cast else [units]:
            staged = [flat for unit in batch for flat in unit.trainable]
            self.step(staged, optimizer, precision)
            yield batch

    def step(
        self, flats: list[Any], optimizer: Optimizer, precision: Precision
    ) -> None:
        """Let the optimizer update buffers that are staged."""
        for flat in flats:
            flat.master.grad = precision.cast_grad(flat.staged_grad)
        if flats:
            optimizer.step()
        for flat in flats:
            flat.master.grad = None
            if flat.master is not flat.staged_shard:
                flat.staged_shard.copy_(flat.master)
            # a reference would keep the gradient until the next step
            del flat.staged_grad

    def flush(self) -> list[Unit]:
        """Wait for an update that is still running; the units it changed."""
        return []

    def refresh(self, flat: Flat, precision: Precision) -> None:
        """Copy to the master what a script has written to the shard."""
        precision.shard_to_master(flat.master, flat.shard)

    def read_shard(self, shard: Tensor, a: int = 0, b: int | None = None) -> Tensor:
        """Elements a to b of a shard, in host memory; only to be read."""
        return shard.detach()[a:b].cpu()

    def write_shard(self, shard: Tensor, values: Tensor, a: int = 0) -> None:
        """Write values into a shard, from element a on."""
        shard.detach()[a : a + values.numel()].copy_(values)

    def close(self) -> None:
        """Free what would outlive the net, such as a file on disk."""


class Net:
    """A model in flat buffers, its optimizer, and what else takes part in a step.

    `DataParallel` and the stages of ZeRO are subclasses, which say what is sharded, and
    when collectives run.

    `optimizer`: an element-wise one of `torch.optim` over the model's parameters (or
        `zero.Muon`); from now on it updates shards.
    `units`: says which modules communicate as one (default: `find_units`).
    `bucket_size`: most elements in one reduction.
    `group`: the ranks that train the model together (default: all).
    `gradient_bits`: 8 or 4 sends gradients quantized to so many bits (qgZ, Wang et al.
        2023); None as they are. `flat_type`: makes the flat buffers.

    `syncing`: whether a backward reduces gradients; not inside `no_sync`. `unsynced`:
        the last has not. `has_gradients`, `has_failed`: one ran or failed since `step`.
    `in_backward`: one of this net is running; `running` counts those of all nets.
    `where`: of each parameter, its unit, flat buffer and slot.
    `grid`: the groups of ranks, maybe one, that have a copy each of what is sharded.
    """

    plan = Plan.stage(0)
    flat_type: Callable[..., Flat] = Flat
    running = 0
    # `DataParallel` has these
    _reduce: Callable[[Unit], None]
    reduced: Callable[[Flat], None]

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        units: Policy | None = None,
        bucket_size: int = 500_000_000,
        precision: Precision | None = None,
        schedule: Schedule | None = None,
        storage: Storage | None = None,
        plan: Plan | None = None,
        group: comm.Group | None = None,
        gradient_bits: int | None = None,
        flat_type: Callable[..., Flat] | None = None,
    ) -> None:
        self.plan, self.group = plan or self.plan, group or comm.everyone()
        check_model(model, self.plan)
        check_elementwise(optimizer)
        self.model, self.optimizer = model, optimizer
        self.bucket_size = bucket_size
        self.quantized = comm.Quantized(gradient_bits) if gradient_bits else None
        self.flat_type = flat_type or self.flat_type
        self.grid = comm.Groups(self.plan.group or self.group.size, self.group)
        self.precision = precision or Precision()
        self.schedule = schedule or Schedule()
        self.storage = storage or Storage(self.plan)
        for part in (self.precision, self.storage):
            if part.is_used:
                kind = type(part).__name__
                raise ValueError(f"another net has this {kind}; make one for each net")
        self.storage.attach(self.plan, self.schedule, optimizer)
        self.syncing, self.in_backward = True, False
        self.has_gradients = self.unsynced = self.has_failed = False
        self._unreduced: dict[Unit, None] = {}  # by this backward, in order
        self.units = build_units(self, units)
        self.precision.is_used = self.storage.is_used = True
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.trained = [flat for flat in self.flats if flat.trainable]
        self._register_hooks()
        point_at_shards(optimizer, self.trained, self.storage)
        optimizer.register_step_pre_hook(refuse_step)
        self.schedule.attach(self.units, self.plan)
        self.note_writes()

    def allocate(self, flat: Flat) -> None:
        """Allocate what this plan keeps of a buffer between steps."""
        if flat.trainable:
            flat.grad_buffer()

    def clear_grads(self, flat: Flat) -> None:
        """Clear the gradients that stay allocated between steps."""
        flat.mark_uninitialized()
        flat.mean = None

    def owned(self, buffer: Tensor, flat: Flat) -> Tensor:
        """The part of a buffer that this rank updates: here, all of it."""
        return buffer

    def _register_hooks(self) -> None:
        """Let autograd report each parameter's gradient to `_on_grad`."""
        self.where: dict[nn.Parameter, tuple[Unit, Any, Slot]] = {}
        this: Any = weakref.ref(self)  # hooks keep no net alive

        def hook(p: Any) -> None:
            if (net := this()) is not None and net.expects_gradient(p):
                net._on_grad(p)

        for unit, flat in [(u, flat) for u in self.units for flat in u.flats]:
            for slot in flat.slots:
                p = slot.parameter
                self.where[p], NET_OF[p] = (unit, flat, slot), this
                if flat.trainable:
                    p.register_post_accumulate_grad_hook(hook)
        for module in self.model.modules() if self.plan.parameters.sharded else ():
            if module._parameters or module is self.model:
                refuse_sharded_state(module)

    def run(self, actions: Iterable[Action]) -> None:
        """Carry out what the schedule has answered."""
        for operation, unit in actions:
            if operation == "wait":
                unit.wait()
                continue
            if operation != "publish":
                labels.mark(operation, unit.name)
            with comm.phase(unit=unit.name):
                getattr(self, operation)(unit)

    def wait(self) -> None:
        """Wait for all collectives under way."""
        for unit in self.units:
            unit.wait()

    def averaged(self, unit: Unit, flat: Flat) -> None:
        """Called when the mean of the group has arrived: average it over the groups."""
        if self.grid.copies > 1:
            shard = Flat.own(flat, flat.full_grad())
            rows, across = shard.view(self.grid.copies, -1), self.grid.across
            how: Any = {"average": True, "group": across, "quantized": self.quantized}
            with comm.phase(unit=unit.name):
                if flat.master.numel() == flat.size:  # not hpZ: each group updates all
                    comm.all_reduce(shard, **how)
                else:
                    comm.reduce_scatter(rows[across.rank], rows, **how)
        self.reduced(flat)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds up; the next one outside reduces.

        RuntimeError where gradients are sharded: no buffer could take a sum.
        """
        self.check_postponable()
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def _means(self) -> list[Tensor]:
        """The mean gradients, when all reductions are done."""
        self.check_unchanged()
        if self.unsynced:  # by `no_sync`
            self.unsynced = False
            for unit in [*self._unreduced]:
                self._reduce(unit)
            self.wait()
        for flat in self.trained:
            if flat.mean is None:  # there was no backward
                self.reduced(flat)
        self.storage.wait_for_copies()  # of means that are offloaded
        return [f.mean for f in self.trained if f.mean is not None]

    def _set_aside(self) -> None:
        """Move means of earlier micro-batches out of the gradient buffers."""
        for flat in self.trained:
            if flat.mean is not None and flat.grad is not None:
                flat.mean = labels.label(flat.mean.clone(), "gradients")
                flat.mark_uninitialized()

    def zero_grad(self) -> None:
        """Clear all gradients; `step` does it, an abandoned step needs it."""
        self.wait()
        self.storage.wait_for_copies()
        for flat in self.trained:
            self.clear_grads(flat)
        self.unsynced = self.has_gradients = self.has_failed = False
        self.precision.grads_cleared()

    def all_rows(self, mine: Tensor) -> Tensor:
        """Gather `mine`, a row for each piece this rank updates, to all N rows."""
        across, within = self.grid.across, self.grid.within
        mine = comm.reachable(mine)
        for ranks, n in (across, across.size), (within, self.group.size):
            if len(mine) < n:
                every = mine.new_empty(n, mine.shape[1])
                comm.all_gather(every, mine, group=ranks)
                mine = every
        return mine

    def _update(self, units: list[Unit]) -> None:
        """Let the optimizer update these units; publish each when it is ready."""
        update: Any = self.storage.update(units, self.optimizer, self.precision)
        with closing(update):  # it ends at once if publishing fails
            for arrived in update:
                self._updated(arrived)
        labels.label_states(self.optimizer)
        self.wait()
        self.note_writes()

    def _updated(self, units: list[Unit], frozen: bool = False) -> None:
        """Publish units whose shards, maybe the frozen ones too, have new values."""
        for unit in units:
            unit.updated = unit.flats if frozen else unit.trainable
            with comm.phase(unit=unit.name):
                for flat in unit.updated:
                    flat.shard_updated()
            self.run(self.schedule.updated(unit))

    def shards_written(self, *units: Unit) -> None:
        """Publish shards that were written directly, as their masters were.

        Without units all, frozen ones too, as after loading a run; gradients are then
        cleared. All ranks must call it.
        """
        self._updated([*units] or self.units, frozen=not units)
        if not units:
            self.zero_grad()
        self.wait()
        self.note_writes()

    def synchronize(self) -> None:
        """Wait for an update, reductions and publications under way."""
        if arrived := self.storage.flush():
            labels.label_states(self.optimizer)
            self.shards_written(*arrived)
        self.wait()

    # ---- what the script does to parameters and gradients, or may not do

    @contextmanager
    def expecting_gradients(self) -> Iterator[None]:
        """Inside, a backward may bring gradients to this net's parameters."""
        self.wait()  # for what a backward that failed has left
        self.check_unchanged()
        self.in_backward, Net.running = True, Net.running + 1
        self.has_failed = True
        try:
            yield
            self.has_failed = False
        finally:
            self.in_backward, Net.running = False, Net.running - 1

    def expects_gradient(self, p: Any) -> bool:
        """Whether a gradient is this net's; RuntimeError if it must not come now."""
        unit, flat, slot = self.where[p]
        if not self.in_backward:
            p.grad = None
            if Net.running:
                return False  # another net's, as of a generator's loss
            raise RuntimeError(
                f"a gradient of parameter {slot.name!r} came outside of backward(loss) of "
                "the wrapper; call that in place of loss.backward()"
            )
        if not flat.is_unsharded:
            raise RuntimeError(
                f"parameter {slot.name!r} was used outside of the forward of unit "
                f"{unit.name!r}, where it is NaN; make one unit of all modules that use it"
            )
        if unit not in self._unreduced:
            raise RuntimeError(
                f"a gradient of parameter {slot.name!r} came after its unit "
                f"{unit.name!r} was reduced, as with reentrant checkpointing of a module "
                "that is called twice; use checkpoint(..., use_reentrant=False)"
            )
        return True

    def check_unchanged(self) -> None:
        """RuntimeError if a backward failed, or the script set a `requires_grad` or `.grad`."""
        if self.has_failed:
            what = "a backward has failed, so gradients are incomplete"
            raise RuntimeError(f"{what}; call zero_grad() before you go on")
        for p, (_, flat, slot) in self.where.items():
            if p.requires_grad != flat.trainable:
                raise RuntimeError(
                    f"requires_grad of parameter {slot.name!r} has changed since the "
                    "model was wrapped; set it before"
                )
            if p.grad is not None:
                raise RuntimeError(
                    f"the script has set the gradient of parameter {slot.name!r}; the "
                    "net keeps gradients itself: scale the loss instead, or use "
                    "minizero.utils.safe_set_full_grad after backward"
                )

    def check_postponable(self) -> None:
        """RuntimeError if a reduction cannot be postponed, as in `no_sync`."""
        if self.plan.gradients.sharded:
            raise RuntimeError(
                f"{type(self).__name__} shards gradients, so every micro-batch is "
                "reduced; leave no_sync out, or use stage 0 or 1"
            )

    def before_update(self) -> None:
        """Copy to masters what the script has written; end an update under way."""
        comm.check_sequence()
        # writes to sharded parameters are noticed when these are gathered
        copies = () if self.plan.parameters.sharded else self.flats
        written = any(writes_to(flat) != flat.known_writes for flat in copies)
        if written or (len(self._sums) and not self._checksums().equal(self._sums)):
            self.refresh()
        self.synchronize()

    def note_writes(self) -> None:
        """Remember the values as they are now, to notice what is written later."""
        for flat in self.flats:
            flat.known_writes = writes_to(flat)
        self._sums = self._checksums()

    def _checksums(self) -> Tensor:
        """A checksum of each buffer of which the optimizer updates a copy, as a tensor.

        Computed twice a step, since `p.data.clamp_()` leaves `p._version` as it is.
        """
        sums = []
        for flat in () if self.plan.parameters.sharded else self.trained:
            if flat.master is not flat.shard:
                raw = flat.full.view(torch.uint8)
                eights, tail = raw.split([len(raw) // 8 * 8, len(raw) % 8])
                sums.append(eights.view(torch.int64).sum() + tail.sum())
        return torch.stack(sums) if sums else torch.empty(0)

    def refresh(self) -> None:
        """Copy to the masters what a script has written; all ranks must call it."""
        for flat in () if self.plan.parameters.sharded else self.flats:
            flat.fill()  # maybe from other memory, after `p.data = values`
        for flat in self.trained:
            self.storage.refresh(flat, self.precision)
        self.note_writes()

    def state_dict(self, frozen: bool = True) -> dict[str, Tensor]:
        """All weights and buffers in host memory, on rank 0; {} on others.

        Flat buffers are gathered one by one, so that no rank holds more than one
        beside its shards. Tied parameters appear under each of their names.
        `frozen`: whether to include parameters that require no gradient.
        """
        self.synchronize()
        first = self.group.rank == 0
        values: dict[nn.Parameter, Tensor] = {}
        for flat in self.flats:
            if frozen or flat.trainable:
                with flat.gathered() if self.plan.parameters.sharded else nullcontext():
                    for p in flat.parameters if first else ():
                        values[p] = p.detach().to("cpu", copy=True)
        named = self.model.named_parameters(remove_duplicate=False)
        weights = {name: values[p] for name, p in named if p in values}
        for name, v in self.module_state().items() if first else ():
            weights[name] = v.detach().to("cpu", copy=True) if torch.is_tensor(v) else v
        return weights

    def module_state(self) -> dict[str, Any]:
        """Persistent buffers and extra state of all modules, by name."""
        state: dict[str, Any] = {}
        for name, module in self.model.named_modules(remove_duplicate=False):
            # one by one: `state_dict` refuses sharded parameters
            module._save_to_state_dict(state, f"{name}." if name else "", False)
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return {k: v for k, v in state.items() if k not in parameters}


def writes_to(flat: Flat) -> list[tuple[int, int]]:
    """How often each parameter was written to, and where it lies."""
    with torch._C.DisableTorchFunction():  # inside `zero.Init` this would gather
        return [(p._version, p.data_ptr()) for p in flat.parameters]


def check_unwritten(flat: Any) -> None:
    """RuntimeError if the script has written to parameters of a freed buffer."""
    if (found := writes_to(flat)) != flat.known_writes:
        every = zip(flat.slots, flat.known_writes, found, strict=True)
        name = next(slot.name for slot, a, b in every if a != b)
        flat.placeholders[0].fill_(flat.no_value)  # all of them show this element
        flat.show_placeholders()
        raise RuntimeError(
            f"parameter {name!r} was written to while it was sharded, and what was "
            "written is lost; write to it inside zero.GatheredParameters(..., "
            "modifier_rank=0)"
        )


def check_outputs(unit: Unit, outputs: list[Tensor]) -> None:
    """RuntimeError if a unit's forward returned a view of its parameters."""
    memory = {flat.full.untyped_storage()._cdata for flat in unit.flats}
    if any(x.untyped_storage()._cdata in memory for x in outputs):
        raise RuntimeError(
            f"unit {unit.name!r} returns a view of its parameters, and their memory is "
            "freed now; return a clone"
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
    leaves, tree = tree_flatten((args, kwargs))
    inputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    marked: Any = iter(AfterBackward.apply(done, *inputs) if inputs else ())
    found = {id(x) for x in inputs}
    leaves = [next(marked) if id(x) in found else x for x in leaves]
    return tree_unflatten(leaves, tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree, and of objects in it, such as dataclasses."""
    leaves = tree_leaves(tree)
    objects = [vars(x) for x in leaves if hasattr(x, "__dict__")]
    return [x for x in leaves + tree_leaves(objects) if isinstance(x, Tensor)]


def refuse_step(optimizer: Optimizer, *_: Any) -> None:
    """A hook on the optimizer: RuntimeError if no net has called its `step`."""
    groups = optimizer.param_groups
    if not any(p.grad is not None for group in groups for p in group["params"]):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() would change nothing: its parameters are "
            "shards, which get their gradients from the net; call net.step() "
            "(engine.step())"
        )
