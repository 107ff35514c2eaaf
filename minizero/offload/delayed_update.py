"""The host's update beside the next forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from minizero.memory.plan import Plan
from minizero.offload.second_set import SecondSet
from minizero.zero.flat_buffer import Unit
from minizero.zero.interfaces import Near, NearShard, Precision
from minizero.zero.owned import Owned


class Delayed(SecondSet):
    """One-step delayed parameter update (Ren et al. 2021, sec. 5.2).

    The update of step t runs in a thread during the forward and backward of
    step t + 1, and its parameters arrive at the end of that. So they are one
    step late: what a gradient was computed from does not know the gradient
    before. Steps before `start` wait for their update; this object counts
    them, so a run that is resumed after them says 0.

    It takes more host memory than `Offload`: gradients a second time, and a
    copy of the parameters in the optimizer's dtype (in mixed precision that
    is there, and the updated shards are kept instead). An error in the thread
    is raised by the next `step`, `synchronize` or `state_dict`.
    """

    def __init__(self, plan: Plan, start: int = 0) -> None:
        if start < 0:
            raise ValueError(f"start must be at least 0, not {start!r}")
        super().__init__(plan)
        self.start, self._steps = start, 0
        self._thread = ThreadPoolExecutor(1, "update")
        self._work: list[Future[None]] = []
        self._units: list[tuple[Unit, list[Owned]]] = []

    def staged(
        self,
        units: list[tuple[Unit, list[Owned]]],
        optimizer: torch.optim.Optimizer,
    ) -> Generator[Near, None, None]:
        """Take all gradients; `update` and `flush` do the rest."""
        for _, every in units:
            self.take_gradients(every)
        self.down.event().wait("cpu")
        self._units, self.busy, self._steps = units, True, self._steps + 1
        # a scheduler changes its options before the next step
        self._optimizer = frozen(optimizer)
        for unit, every in units:
            shards = [
                NearShard(owned.flat, owned.given, taken, new)
                for owned, taken, new in self.beside(every)
            ]
            last = unit is units[-1][0]
            at_once = last and self._steps <= self.start
            yield Near(shards, self.flush if at_once else list)

    def update(
        self,
        near: Near,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
    ) -> None:
        """Let the thread update it, with the options of now."""
        # a loss scale changes before the next step, too
        options = near, self._optimizer, copy.copy(precision)
        self._work.append(self._thread.submit(super().update, *options))

    def flush(self) -> list[Unit]:
        """Let the update arrive: new parameters take the old ones' place."""
        work, self._work, self.busy = self._work, [], False
        for done in work:
            done.result()
        units, self._units = self._units, []
        for _, every in units:
            for owned, _, new in self.beside(every):
                self.up.copy(owned.shard, new)
        self.up.event().wait("device")
        return [unit for unit, _ in units]


def frozen(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer and states, with the options of now."""
    # what schedulers look for before they warn
    optimizer._opt_called = True  # type: ignore[attr-defined]
    frozen = copy.copy(optimizer)
    frozen.param_groups = [dict(group) for group in optimizer.param_groups]
    return frozen
