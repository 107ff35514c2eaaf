"""Data parallelism on flat buffers, and the four verbs that ZeRO changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minizero import comm, tracker
from minizero.comm import Work
from minizero.flat import Flat, Policy, Slot, Unit, assign, find_units, split
from minizero.launch import rank, world_size
from minizero.memory import Plan
from minizero.optim import check_elementwise, groups_of, take_state
from minizero.seams import Home, Precision, Schedule


def _call_if_alive(method: weakref.WeakMethod[Any], p: Tensor) -> None:
    alive = method()
    if alive is not None:
        alive(p)


class DataParallel:
    """Plan 0: every rank keeps everything; gradients are averaged over ranks.

    The stages of ZeRO are subclasses: each changes what one of the verbs `gather`,
    `release`, `reduce` and `update` does, and what stays allocated in between.

    `optimizer`: an element-wise `torch.optim` optimizer over the model's
    parameters; its groups are re-pointed at rows of the flat buffers.
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
        home: Home | None = None,
    ) -> None:
        if bucket_size < 1:
            raise ValueError(f"bucket_size must be at least 1, not {bucket_size!r}")
        check_elementwise(optimizer)
        self.model, self.optimizer, self.bucket_size = model, optimizer, bucket_size
        self.precision = precision or Precision()
        self.schedule = schedule or Schedule()
        self.home = home or Home()
        self.syncing = True
        self._in_backward = self._unsynced = False
        self.units = self._build(groups_of(model, optimizer), units)
        self._owner: dict[nn.Parameter, tuple[Unit, Flat, Slot]] = {
            slot.parameter: (unit, flat, slot)
            for unit in self.units
            for flat in unit.flats
            for slot in flat.slots
        }
        # weak: these hooks are out of the garbage collector's sight, and a strong
        # reference from the parameter to its owner would keep both forever
        on_grad = weakref.WeakMethod(self._on_grad)
        for p in self._owner:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(partial(_call_if_alive, on_grad))
        self._adopt_optimizer()

    # ---- making the flat buffers

    def _build(
        self, group_of: dict[nn.Parameter, int], policy: Policy | None
    ) -> list[Unit]:
        modules = find_units(self.model, policy)
        units = []
        with comm.phase("init"):
            for name, named in assign(self.model, modules).items():
                unit = Unit(name or "root", modules[name])
                for group, part in split(named, group_of):
                    unit.flats.append(self._build_flat(part, group))
                units.append(unit)
            for buffer in self.model.buffers():
                comm.broadcast(tracker.label(buffer, "buffers"))
        return units

    def _build_flat(
        self, named: list[tuple[str, nn.Parameter]], group: int | None
    ) -> Flat:
        """Flatten, take rank 0's values, and place the result as the plan says."""
        flat = self.flat_type(named, group)
        comm.broadcast(flat.full)
        self.place(flat)
        self.precision.attach(flat)
        return flat

    def _adopt_optimizer(self) -> None:
        """Point the optimizer's groups at flat rows instead of parameters."""
        self._masters: dict[Flat, list[Tensor]] = {}
        for group in self.optimizer.param_groups:
            group["params"] = []
        for flat in self._trainable():
            masters = self.precision.masters(flat, self.owned(flat))
            self._masters[flat] = masters
            for key, value in take_state(self.optimizer, flat).items():
                whole = isinstance(value, Tensor) and value.ndim == 1
                rows = self.owned_rows(flat, value) if whole else [value] * len(masters)
                for master, row in zip(masters, rows, strict=True):
                    row = row.clone() if isinstance(row, Tensor) else row
                    self.optimizer.state[master][key] = row
            assert flat.group is not None
            self.optimizer.param_groups[flat.group]["params"] += masters
        tracker.label_states(self.optimizer)
        self.optimizer.register_step_post_hook(tracker.label_states)

    def _trainable(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.trainable]

    # ---- what a plan changes

    def place(self, flat: Flat) -> None:
        """Allocate what this plan keeps between steps."""
        if flat.trainable:
            flat.new_grad()

    def gather(self, unit: Unit) -> Iterator[Work]:
        """Launch what makes the unit's parameters whole."""
        yield from ()

    def release(self, unit: Unit) -> None:
        """Free what `gather` allocated."""

    def reduce(self, unit: Unit) -> Iterator[Work]:
        """Launch what sums the unit's gradients over the ranks, piece by piece."""
        for flat in unit.trainable:
            grad = flat.new_grad()
            for a, b in flat.pieces(self.bucket_size):
                yield comm.all_reduce(flat.rows(grad, a, b), async_op=True)

    def reduced(self, unit: Unit) -> None:
        """Called when the sums are there: make them means."""
        for flat in unit.trainable:
            for grad in self.owned_grads(flat):
                grad.div_(world_size())
            flat.reduced = True

    def owned_rows(self, flat: Flat, buffer: Tensor) -> list[Tensor]:
        """The rows of a buffer in the layout of `flat` that this rank updates."""
        return flat.rows(buffer)

    def owned(self, flat: Flat) -> list[Tensor]:
        """The owned rows of the parameters."""
        return self.owned_rows(flat, flat.full)

    def owned_grads(self, flat: Flat) -> list[Tensor]:
        """The owned rows of the reduced gradient."""
        return self.owned_rows(flat, flat.new_grad())

    def update(self, units: list[Unit]) -> None:
        """Let the optimizer update the owned rows of these units."""
        flats = [flat for unit in units for flat in unit.trainable]
        for flat in flats:
            grads = self.precision.gradients(flat, self.owned_grads(flat))
            for master, grad in zip(self._masters[flat], grads, strict=True):
                master.grad = grad
        self.optimizer.step()
        for flat in flats:
            for master in self._masters[flat]:
                master.grad = None
            self.precision.written(flat)

    def clear_grads(self, flat: Flat) -> None:
        """Zero the gradients that stay allocated between steps."""
        flat.new_grad().zero_()
        flat.total = None

    # ---- forward and backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        with comm.phase("forward"):
            return self.model(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Gradients of `loss`, averaged over ranks (unless inside `no_sync`).

        Divide the loss by the number of micro-batches yourself, if you want their
        mean: gradients of several calls add up until `step`.
        """
        self._begin_backward()
        try:
            with comm.phase("backward"):
                loss.backward()
                self._end_backward()
        finally:
            self._in_backward = False

    def _begin_backward(self) -> None:
        self._in_backward = True
        # the last unit's gradients come first; the root's are complete at the end
        self._queue = list(reversed(self.units))
        self._missing = {
            unit.name: {s.parameter for f in unit.trainable for s in f.slots}
            for unit in self.units
        }
        for flat in self._trainable():
            if flat.reduced:
                self.stash(flat)
                flat.reduced = False

    def stash(self, flat: Flat) -> None:
        """Set an already reduced gradient aside: autograd adds to the buffer."""
        grads = self.owned_grads(flat)
        if flat.total is None:
            flat.total = [tracker.label(g.clone(), "gradients") for g in grads]
        else:
            for total, grad in zip(flat.total, grads, strict=True):
                total.add_(grad)
        flat.new_grad().zero_()

    def _on_grad(self, p: Tensor) -> None:
        if not self._in_backward:
            raise RuntimeError(
                "a gradient came outside of backward(loss) of the wrapper; call "
                "net.backward(loss), not loss.backward()"
            )
        assert isinstance(p, nn.Parameter)
        unit, flat, slot = self._owner[p]
        flat.collect(slot)
        self._missing[unit.name].discard(p)
        self._arrived(unit)

    def _arrived(self, unit: Unit) -> None:
        """Reduce complete units, in one order on every rank.

        Without the order, ranks that use different parameters would reduce
        different units at the same moment.
        """
        while self.syncing and self._queue and not self._missing[self._queue[0].name]:
            self._reduce(self._queue.pop(0))

    def _reduce(self, unit: Unit) -> None:
        with comm.phase(unit=unit.name):
            tracker.mark("reduce", unit.name)
            self.schedule.reduce(self, unit)

    def _end_backward(self) -> None:
        """Unused parameters never report: their units go last, with zeros."""
        self._unsynced = not self.syncing
        while self.syncing and self._queue:
            self._reduce(self._queue.pop(0))
        self.schedule.drain(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside the block only adds up; the next one outside reduces."""
        self.syncing, before = False, self.syncing
        try:
            yield
        finally:
            self.syncing = before

    # ---- the step

    def _finish_gradients(self) -> None:
        """Reduce what `no_sync` left behind, and join what was set aside."""
        if self._unsynced:
            for unit in reversed(self.units):
                self._reduce(unit)
            self.schedule.drain(self)
            self._unsynced = False
        self.join()

    def join(self) -> None:
        """Add what `stash` set aside to the gradients."""
        for flat in self._trainable():
            for total, grad in zip(
                flat.total or [], self.owned_grads(flat), strict=bool(flat.total)
            ):
                grad.add_(total)
            flat.total = None

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`.

        Returns the norm before clipping, a scalar, the same on every rank and for
        every plan: row norms are summed in one order, whoever computes them.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, not {max_norm!r}")
        with comm.phase("step"):
            self._finish_gradients()
            flats = self._trainable()
            grads = [self.owned_grads(flat) for flat in flats]
            norms = self._row_norms(grads)
            norm = norms.square().sum().sqrt()
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for grad in (g for rows in grads for g in rows):
                grad.mul_(scale.to(grad.device))
        return norm

    def _row_norms(self, grads: list[list[Tensor]]) -> Tensor:
        """Norm of every row of every flat buffer, fp32, [ranks, flats]."""
        mine = torch.stack(
            [
                torch.stack(
                    [torch.linalg.vector_norm(g, dtype=torch.float32) for g in rows]
                )
                for rows in grads
            ],
            dim=1,
        )
        if len(mine) == world_size():
            return mine
        norms = mine.new_empty(world_size(), mine.shape[1])
        with comm.phase(unit="gradient norm"):
            comm.all_gather(norms, mine)
        return norms

    def step(self) -> None:
        """Update the parameters; gradients are zero afterwards."""
        with comm.phase("step"):
            self._finish_gradients()
            for units in self.home.rounds(self.units):
                self.home.fetch(units)
                self.update(units)
                self.home.store(units)
        self.zero_grad()
        tracker.mark("step")

    def zero_grad(self) -> None:
        """Forget all gradients; `step` does it, an abandoned step needs it."""
        for flat in self._trainable():
            self.clear_grads(flat)
            flat.reduced = False
        self._unsynced = False

    # ---- looking inside

    @contextmanager
    def gathered(self, units: list[Unit]) -> Iterator[None]:
        """The parameters of these units are whole inside the block."""
        for unit in units:
            self.schedule.gather(self, unit)
        try:
            yield
        finally:
            for unit in units:
                self.schedule.release(self, unit)

    def state_dict(self) -> dict[str, Tensor]:
        """Whole weights and buffers in host memory, on rank 0; {} on other ranks.

        Gathered unit by unit: no rank holds more than one unit beside its shards.
        Tied parameters appear under each of their names and share memory.
        """
        values: dict[nn.Parameter, Tensor] = {}
        for unit in self.units:
            with self.gathered([unit]):
                for flat in unit.flats if rank() == 0 else ():
                    for slot in flat.slots:
                        values[slot.parameter] = slot.view(flat.full).cpu().clone()
        if rank() != 0:
            return {}
        weights = {
            name: values[p]
            for name, p in self.model.named_parameters(remove_duplicate=False)
        }
        parameters = set(weights)
        others = {
            name: value.detach().cpu().clone()
            for name, value in self.model.state_dict().items()
            if name not in parameters
        }
        return weights | others
