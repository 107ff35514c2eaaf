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
from ..zero.flat import Flat, Unit
from ..zero.seams import Precision
from .host import Offload


class Delayed(Offload):
    """One-step delayed parameter update (Ren et al. 2021, sec. 5.2).

    A thread makes the update of step t during the forward and backward of
    step t + 1; its parameters arrive at the end of that. A gradient is thus
    computed from parameters that lack the update before. The first `start`
    steps wait for their update; this object counts them (`steps`), so a run
    that is resumed after them passes 0.

    Host memory holds a second set of gradients, and of parameters in the
    optimizer's dtype (in mixed precision, of rounded shards). An error in
    the thread is raised by the next `step`, `synchronize` or `state_dict`.
    """

    def __init__(self, plan: Plan, start: int = 0) -> None:
        if plan.optimizer.on != "cpu":
            raise ValueError(
                "a delayed update runs on the host beside the device, but "
                f"the plan's optimizer is on {plan.optimizer.on!r}; use "
                "Plan.stage(..., offload_optimizer='cpu')"
            )
        if start < 0:
            raise ValueError(f"start must be at least 0, not {start!r}")
        super().__init__(plan)
        self.start, self.steps = start, 0
        self._thread = ThreadPoolExecutor(1, "update")
        # the update under way: its units and the thread's results
        self._units: list[Unit] = []
        self._results: list[Future[None]] = []
        # the second set: gradients, and rounded shards
        self._grads: dict[Flat, Tensor] = {}
        self._shards: dict[Flat, Tensor] = {}

    def master(self, flat: Flat, copy: Tensor | None) -> Tensor:
        """Always a copy on the host: the shards are in use meanwhile."""
        master = self.store(flat.shard if copy is None else copy, "optimizer")
        self._shards[flat] = master
        if copy is not None:
            shape, dtype = flat.shard.shape, flat.shard.dtype
            self._shards[flat] = host_empty(shape, dtype, "buffers")
        return master

    # ---- continued

    def update(
        self, units: list[Unit], optimizer: Optimizer, precision: Precision
    ) -> Iterator[list[Unit]]:
        """Take the gradients and let the thread begin; `flush` ends it."""
        self._units = [unit for unit in units if unit.trainable]
        self._take_gradients([f for unit in units for f in unit.trainable])
        # bring the gradients' factor to the host: the thread would wait for
        # all that the device computes meanwhile
        precision.cast_grad(torch.zeros(()))
        # learning rate schedulers look for this before they warn
        optimizer._opt_called = True  # type: ignore[attr-defined]
        # the same states, but options that no scheduler or loss scale changes
        # before the thread has read them
        optimizer, groups = copy.copy(optimizer), optimizer.param_groups
        optimizer.param_groups = [dict(group) for group in groups]
        precision = copy.copy(precision)
        for unit in self._units:
            for flat in unit.trainable:
                flat.staged_grad = self._grads[flat]
                flat.staged_shard = self._shards[flat]
            work = self.step, unit.trainable, optimizer, precision
            self._results.append(self._thread.submit(*work))
        self.steps += 1
        if self.steps <= self.start:
            yield self.flush()

    def _take_gradients(self, flats: list[Flat]) -> None:
        """Keep this step's gradients; the next backward writes to others."""
        self.down.follow()
        for flat in flats:
            if flat not in self._grads:
                shape, dtype = flat.mean.shape, flat.mean.dtype
                self._grads[flat] = host_empty(shape, dtype, "gradients")
            if self.plan.gradients.on == "cpu":
                self._grads[flat], flat.mean = flat.mean, self._grads[flat]
            else:
                self.down.copy(self._grads[flat], flat.mean)
        self.down.event().wait("cpu")
        # the thread may overwrite what `flush` sent when that has arrived
        sent = self.up.event()
        self._results.append(self._thread.submit(sent.wait, "cpu"))

    def flush(self) -> list[Unit]:
        """Wait for the thread; copy the updated parameters to their place."""
        units, results = self._units, self._results
        self._units, self._results = [], []
        for result in results:
            result.result()
        # the computation, or a gather, may still read the old parameters
        self.up.follow()
        if self.plan.parameters.on == "cpu":
            self.up.event().wait("cpu")
        for flat in (flat for unit in units for flat in unit.trainable):
            self.up.copy(flat.shard, flat.staged_shard)
            del flat.staged_shard
        self.up.event().wait("device")
        return units

    def refresh(self, flat: Flat, precision: Precision) -> None:
        if self._results:
            raise RuntimeError(
                "parameters were written to while an update was under way, "
                "which would undo that; call net.synchronize() first, or "
                "write inside zero.GatheredParameters(..., modifier_rank=0)"
            )
        super().refresh(flat, precision)
