"""Data parallelism on flat buffers: every rank keeps everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import comm
from ..memory import labels
from .flat import Flat, Unit
from .guards import check_unchanged
from .net import Net


class DataParallel(Net):
    """Plan 0: every rank keeps everything; gradients are averaged over ranks.

    The stages of ZeRO are subclasses. They change the four operations of a
    unit, and what stays allocated between steps. An operation launches
    collectives; `Unit.wait` waits for them.
    """

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
            self.take_over_writes()
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
        self.note_writes()
        labels.mark("step")
        return ready

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
