"""What every plan does around training: build buffers, and hand out weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import comm
from ..memory import labels
from ..memory.plan import Plan
from ..ranks import device
from .elementwise import check_elementwise, groups_of, initial_state, layout_of
from .flat import Flat, Slot, Unit
from .guards import OWNERS, check_model
from .muon import Muon
from .seams import Action, Precision, Schedule, Storage
from .units import Policy, assign, find_units, split


def refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook on the optimizer: RuntimeError if no net has called its `step`."""
    groups = optimizer.param_groups
    if not any(p.grad is not None for group in groups for p in group["params"]):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() would change nothing: its parameters are "
            "shards, which get their gradients from the net; call net.step() "
            "(engine.step())"
        )


class Net:
    """A model in flat buffers, its optimizer, and what else takes part in a step.

    `DataParallel` and the stages of ZeRO are subclasses, which say what is sharded, and
    when collectives run.

    `optimizer`: an element-wise one of `torch.optim` over the model's parameters (or
        `zero.Muon`); from now on it updates shards.
    `units`: says which modules communicate as one (default: `find_units`).
    `bucket_size`: most elements in one reduction.
    `group`: the ranks that train the model together (default: all).
    `weight_bits`, `gradient_bits`: 8 or 4 sends these quantized to so many bits (qwZ and
        qgZ, Wang et al. 2023); None as they are.

    `has_gradients`: whether a backward has run since the last step.
    `where`: of each parameter, its unit, flat buffer and slot.
    `grid`: the groups of ranks that have a copy each of what is sharded: one, of all
        ranks, if the plan has no groups.
    `levels`: between which ranks shards are divided, the innermost group last.
    """

    running = 0  # how many backwards are, of any net
    plan = Plan.stage(0)
    flat_type: type[Flat] = Flat
    copied_type: type[Flat]  # of stage 3, where groups have copies
    # `DataParallel` has these
    _on_grad: Callable[[nn.Parameter], None]
    zero_grad: Callable[[], None]
    reduced: Callable[[Flat], None]

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
        weight_bits: int | None = None,
        gradient_bits: int | None = None,
    ) -> None:
        self.plan, self.group = plan or self.plan, group or comm.everyone()
        self.grid = comm.Groups(self.plan.group or self.group.size, self.group)
        self.levels = [self.grid.within]
        copied = self.plan.parameters.group and not self.plan.optimizer.group
        if copied and self.grid.copies > 1:
            self.levels.insert(0, self.grid.across)
            self.flat_type = self.copied_type
        self.weight_bits = weight_bits
        self.quantized = comm.Quantized(gradient_bits) if gradient_bits else None
        check_model(model, self.plan)
        check_elementwise(optimizer)
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
        self.units: list[Unit] = []
        with comm.phase("init"):
            for name, params in assign(self.model, modules).items():
                for _, p in params:
                    p.data = p.data.to(device())
                unit = Unit(name or "root", modules[name])
                for group, part in split(params, group_of):
                    layout = layout_of(self.optimizer, group)
                    flat: Any = self.flat_type(part, group, layout, self.grid)
                    if self.weight_bits:
                        flat.quantized = comm.Quantized(self.weight_bits, flat.piece)
                    comm.broadcast(flat.full, group=self.group)
                    own = self.owned(flat.full, flat)
                    flat.start = int(own.storage_offset())
                    copy = self.precision.attach(flat, own)
                    flat.shard = self.owned(flat.full, flat)
                    self.place(flat)
                    flat.master = flat.shard
                    if flat.trainable:
                        flat.master = self.storage.master(flat, copy)
                    if isinstance(self.optimizer, Muon):
                        self.optimizer.take(flat)
                    unit.flats.append(flat)
                self.units.append(unit)
            for module in self.model.modules():
                for buffer in module.buffers(recurse=False):
                    buffer.data = buffer.data.to(device()).contiguous()
                    comm.broadcast(buffer, group=self.group)
                    labels.label(buffer, "buffers")
                    self.precision.attach_buffer(buffer, module)
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.trained = [flat for flat in self.flats if flat.trainable]

    def place(self, flat: Flat) -> None:
        """Allocate what this plan keeps of a buffer between steps."""
        if flat.trainable:
            flat.grad_buffer()

    def owned(self, buffer: Tensor, flat: Flat) -> Tensor:
        """The part of a buffer that this rank updates: here, all of it."""
        return buffer

    def _register_hooks(self) -> None:
        """Let autograd report each parameter's gradient to `_on_grad`."""
        self.where: dict[nn.Parameter, tuple[Unit, Flat, Slot]] = {}
        on_grad = weakref.WeakMethod(self._on_grad)  # hooks keep no net alive

        def hook(p: Any) -> None:
            if (alive := on_grad()) is not None:
                alive(p)

        for unit in self.units:
            for flat in unit.flats:
                for slot in flat.slots:
                    p = slot.parameter
                    self.where[p] = unit, flat, slot
                    OWNERS[p] = weakref.ref(self)
                    if flat.trainable:
                        p.register_post_accumulate_grad_hook(hook)
        self.note_writes()

    def _adopt_optimizer(self) -> None:
        """Let the optimizer's groups hold what this rank updates."""
        for group in self.optimizer.param_groups:
            group["params"] = []
        for flat in self.trained:
            assert flat.group is not None
            master = flat.master
            self.optimizer.param_groups[flat.group]["params"].append(master)
            for key, value in initial_state(self.optimizer, flat).items():
                if value.ndim:
                    value = self.storage.store(value, "optimizer")
                self.optimizer.state[master][key] = value
        self.optimizer.register_step_pre_hook(refuse_step)

    def run(self, actions: Iterable[Action]) -> None:
        """Carry out what the schedule has answered."""
        for operation, unit in actions:
            if operation == "wait":
                unit.wait()
            else:
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
            shard = flat.full_grad()[flat.place * flat.size :][: flat.size]
            rows, across = shard.view(self.grid.copies, -1), self.grid.across
            how: Any = {"average": True, "group": across, "quantized": self.quantized}
            width = max(1, self.bucket_size // len(rows))
            works = []
            with comm.phase(unit=unit.name):
                for part in rows.split(width, dim=1):
                    if len(self.levels) == 1:  # every group updates all of it
                        work = comm.all_reduce(part, async_op=True, **how)
                    else:
                        own = part[across.rank]
                        work = comm.reduce_scatter(own, part, async_op=True, **how)
                    works.append(work)
            for work in works:
                work.wait()
        self.reduced(flat)

    def _updated(self, units: list[Unit], frozen: bool = False) -> None:
        """Publish units whose shards, maybe the frozen ones too, have new values."""
        for unit in units:
            unit.changed = unit.flats if frozen else unit.trainable
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
            self.note_writes()

    def synchronize(self) -> None:
        """Wait for an update, reductions and publications under way."""
        self.flush()
        self.wait()

    # ---- the parameters, read and written from outside

    def check_unchanged(self) -> None:
        """RuntimeError if the script froze or unfroze parameters, or set a `.grad`."""
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

    def note_writes(self) -> None:
        """Remember the values as they are now, to notice what is written later."""
        self._sums = self._checksums()

    def take_over_writes(self) -> None:
        """Let masters take over what the script has written since the last update.

        Writes to sharded parameters are noticed when these are gathered.
        """
        self.check_unchanged()
        for flat in () if self.plan.parameters.sharded else self.flats:
            if flat.writes() != flat.known_writes:
                flat.fill()  # maybe from other memory, after `p.data = values`
        if len(self._sums) and not self._checksums().equal(self._sums):
            self.refresh()

    def _checksums(self) -> Tensor:
        """Of each buffer of which the optimizer updates a copy; on the device.

        A count of writes would not do: `p.data.clamp_()` is not counted.
        """
        sums = []
        for flat in () if self.plan.parameters.sharded else self.trained:
            if flat.master is not flat.shard:
                raw = flat.full.view(torch.uint8)
                words = len(raw) // 8 * 8
                tail = raw[words:].sum(dtype=torch.int64)
                sums.append(raw[:words].view(torch.int64).sum() + tail)
        return torch.stack(sums) if sums else torch.empty(0)

    def refresh(self) -> None:
        """Let masters take over what was written to parameters or shards.

        All ranks must call it.
        """
        for flat in self.trained:
            self.storage.refresh(flat, self.precision)
        self.note_writes()

    def shards_written(self) -> None:
        """Publish shards that were written directly, as by loading a run.

        Masters were written as well. All ranks must call it.
        """
        self._updated(self.units, frozen=True)
        self.zero_grad()
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
                with flat.gathered():
                    for slot in flat.slots if first else ():
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
