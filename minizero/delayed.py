"""The host's update beside the next forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from . import tracker
from .ddp import Verbs
from .flat import Flat
from .memory import Plan
from .offload import Offload, place
from .seams import host_empty


class Delayed(Offload):
    """One-step delayed parameter update (Ren et al. 2021, sec. 5.2).

    The update of step t runs in a thread during the forward and backward of
    step t + 1, and its parameters arrive at the end of that. So they are one
    step late: what a gradient was computed from does not know the gradient
    before. Steps before `start` wait for their update.

    It takes more host memory than `Offload`: gradients a second time, and a
    copy of the parameters in the optimizer's dtype (in mixed precision that
    is there, and the updated rows are kept instead).

    An error in the thread is raised by the next `step`, `flush` or
    `state_dict`; these two let the update arrive at once.
    """

    def __init__(self, plan: Plan, start: int = 0) -> None:
        if plan.optimizer.on != "cpu":
            raise ValueError(
                "a delayed update runs on the host while the device computes, "
                f"but the plan's optimizer is on {plan.optimizer.on!r}; use "
                "Plan.stage(..., offload_optimizer='cpu')"
            )
        if start < 0:
            raise ValueError(f"start must be at least 0, not {start!r}")
        super().__init__(plan)
        self.start = start
        self._steps = 0
        self._thread = ThreadPoolExecutor(1, "update")
        self._work: Future[None] | None = None
        self._new: dict[Flat, list[Tensor]] = {}
        self._taken: dict[Flat, list[Tensor]] = {}

    def masters(
        self, flat: Flat, rows: list[Tensor], masters: list[Tensor]
    ) -> list[Tensor]:
        self._landing.reserve(rows[0].nbytes)
        given = [self.rest(master, "optimizer") for master in masters]
        self._new[flat] = given
        if masters[0] is not rows[0]:
            self._new[flat] = [
                host_empty(row.shape, row.dtype, "buffers") for row in rows
            ]
        return given

    def grads(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        return self._taken[flat]

    def rows(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        return self._new[flat]

    def update(self, net: Verbs) -> None:
        """Let the last update arrive, and start the next."""
        self.flush(net)
        for flat in (flat for unit in net.units for flat in unit.trainable):
            self._take_grads(net, flat)
        self.down.mark().wait("cpu")
        step = _frozen(net.optimizer)
        self._work = self._thread.submit(self._run, net, step)
        if self._steps < self.start:
            self.flush(net)
        self._steps += 1

    def _take_grads(self, net: Verbs, flat: Flat) -> None:
        """Keep this step's gradients; the next backward adds to others."""
        grads = net.owned_grads(flat)
        if flat not in self._taken:
            self._taken[flat] = [
                host_empty(grad.shape, grad.dtype, "gradients")
                for grad in grads
            ]
        if flat.grad_shard is not None and place(grads[0]) == "cpu":
            flat.grad_shard = self._taken[flat][0]
            self._taken[flat] = grads
            return
        self.down.follow()
        for taken, grad in zip(self._taken[flat], grads, strict=True):
            self.down.copy(taken, grad)

    def _run(self, net: Verbs, step: Callable[[], Any]) -> None:
        for unit in net.units:
            if unit.trainable:
                net.update([unit], step)

    def flush(self, net: Verbs) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        work.result()
        for unit in net.units:
            for flat in unit.trainable:
                rows = net.owned(flat)
                for row, new in zip(rows, self._new[flat], strict=True):
                    self.up.copy(row, new)
            self.up.mark().wait("device")
            net.publish(unit)
        tracker.label_states(net.optimizer)


def _frozen(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """A step with the options of now: a scheduler may change them."""
    # what schedulers look for before they warn
    optimizer._opt_called = True  # type: ignore[attr-defined]
    twin = copy.copy(optimizer)
    twin.param_groups = [dict(group) for group in optimizer.param_groups]
    # not `twin.step()`: a scheduler has bound that to the original
    return lambda: type(twin).step(twin)
