"""The host's update of one step beside the next forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..memory.labels import host_empty
from ..memory.plan import Plan
from ..zero.build import twin_of
from ..zero.flat import Flat, Unit
from ..zero.seams import Precision
from .host import Offload


class Delayed(Offload):
    """One-step delayed parameter update (Ren et al. 2021, sec. 5.2).

    A thread makes the update of step t during the forward and backward of
    step t + 1; the new parameters arrive after these. So a gradient is
    computed from parameters that lack the last update. The first `start`
    updates are not delayed; pass 0 to resume a run after them.
    """

    def __init__(self, plan: Plan, start: int = 0) -> None:
        super().__init__(plan)
        if plan.optimizer.on != "cpu":
            raise ValueError(
                f"the optimizer is on {plan.optimizer.on!r}, but a delayed "
                "update is the host's: use offload_optimizer='cpu'"
            )
        self.start, self.steps = start, 0
        self._thread = ThreadPoolExecutor(1, "update")
        # the update under way: of each unit, the thread's result
        self._under_way: dict[Unit, Future[None]] = {}
        # on the host: gradients that the thread reads, shards that it makes
        self._taken_grads: dict[Flat, Tensor] = {}
        self._updated_shards: dict[Flat, Tensor] = {}

    def master(self, flat: Flat, copy: Tensor | None) -> Tensor:
        """Always a copy on the host: the shards are in use meanwhile."""
        master = self.store(flat.shard if copy is None else copy, "optimizer")
        self._updated_shards[flat] = master
        if copy is not None:  # mixed precision
            shape, dtype = flat.shard.shape, flat.shard.dtype
            self._updated_shards[flat] = host_empty(shape, dtype, "buffers")
        return master

    def update(
        self, units: list[Unit], optimizer: Optimizer, precision: Precision
    ) -> Iterator[list[Unit]]:
        """Take the gradients and start the thread's update; `flush` waits for it."""
        self._take_gradients(units)
        optimizer, precision = self._freeze_settings(optimizer, precision)
        for unit in [unit for unit in units if unit.trainable]:
            for flat in unit.trainable:
                flat.staged_grad = self._taken_grads[flat]
                flat.staged_shard = self._updated_shards[flat]
            self._under_way[unit] = self._thread.submit(
                self.step, unit.trainable, optimizer, precision
            )
        self.steps += 1
        if self.steps <= self.start:
            yield self.flush()

    def _take_gradients(self, units: list[Unit]) -> None:
        """Keep this step's gradients; the next backward writes to others."""
        taken = self._taken_grads
        # also after `flush`'s copies: the thread overwrites what they read
        self.down.follow()
        for flat in [flat for unit in units for flat in unit.trainable]:
            if flat not in taken:
                shape, dtype = flat.mean.shape, flat.mean.dtype
                taken[flat] = host_empty(shape, dtype, "gradients")
            if self.plan.gradients.on == "cpu":
                taken[flat], flat.mean_shard = flat.mean, taken[flat]
            else:
                self.down.copy(taken[flat], flat.mean)
        self.down.event().synchronize()

    def _freeze_settings(
        self, optimizer: Optimizer, precision: Precision
    ) -> tuple[Optimizer, Precision]:
        """Copies with this step's settings; they share the states."""
        # called only to copy the clip factor to the host before the thread reads it
        precision.cast_grad(torch.zeros((), device="cpu"))
        # a learning rate scheduler warns if it does not find this
        optimizer._opt_called = True  # type: ignore[attr-defined]
        own = [dict(group) for group in optimizer.param_groups]
        return twin_of(optimizer, own, optimizer.state), copy.copy(precision)

    def flush(self) -> list[Unit]:
        """Wait for the thread; copy the updated parameters to their place."""
        under_way = self._under_way.copy()
        for result in under_way.values():
            result.result()  # after an error the next flush raises it again
        self._under_way.clear()
        # the computation, or a gather, may still read the old parameters
        self.up.follow()
        if self.plan.parameters.on == "cpu":  # then the host copies, at once
            self.up.event().synchronize()
        for flat in [f for unit in under_way for f in unit.trainable]:
            self.up.copy(flat.shard, flat.staged_shard)
            del flat.staged_shard
        self.up.event().wait()
        return [*under_way]

    def refresh(self, flat: Flat, precision: Precision) -> None:
        if self._under_way:
            raise RuntimeError(
                "parameters were written to while an update was under way, "
                "which would undo that; call net.synchronize() first"
            )
        super().refresh(flat, precision)
