"""Clipping and the update."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import Tensor

from .. import comm
from ..memory import labels
from ..ranks.launch import world_size
from .backward import Backward
from .flat_buffer import Unit
from .owned import OwnedStates


class Clipping(Backward, OwnedStates):
    """The norm of all gradients, and their clipping by it."""

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients to a global 2-norm of at most `max_norm`.

        Returns the norm before clipping, a scalar, the same on every rank and
        for every plan: the shards' norms are summed in one order, whoever has
        them. It is not finite if a gradient is not; `step` says what then
        happens.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, not {max_norm!r}")
        norm = self.grad_norm()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self.precision.clip(self._all_grads(), factor)
        return norm

    def grad_norm(self) -> Tensor:
        """The norm that `clip_grad_norm` returns; nothing is clipped."""
        with comm.phase("step"):
            self._finish_gradients()
            norms = self._shard_norms()
            return self.precision.unscaled(norms.square().sum().sqrt())

    def _all_grads(self) -> list[Tensor]:
        flats = self._trainable()
        return [grad for flat in flats for grad in self.owned_grads(flat)]

    def _shard_norms(self) -> Tensor:
        """Norm of every rank's shard of every buffer, fp32, [ranks, flats]."""
        flats = self._trainable()
        norms = [
            torch.linalg.vector_norm(grad, dtype=torch.float32)
            for grad in self._all_grads()
        ]
        # gradients in host memory, and a backend that moves device memory
        mine = torch.stack(norms).to(flats[0].full.device)
        mine = mine.view(len(flats), -1).t().contiguous()
        if len(mine) == world_size():
            return mine
        every = mine.new_empty(world_size(), len(flats))
        with comm.phase(unit="gradient norm"):
            comm.all_gather(every, mine)
        return every


class Step(Clipping):
    """The update, after the last backward of a step."""

    def step(self) -> bool:
        """Update the parameters; gradients are zero afterwards.

        False if the precision found gradients that are not finite, on any
        rank: then no rank has updated anything (and a learning rate
        scheduler should not step either).
        """
        with comm.phase("step"):
            self._finish_gradients()
            self.flush()  # an update that is under way is due, ready or not
            ready = self.precision.ready(self._all_grads())
            if ready:
                self._update()
        self.zero_grad()
        labels.mark("step")
        return ready

    def _update(self) -> None:
        updated: list[Unit] = []
        staged = self.home.staged(self._to_update(), self.optimizer)
        with closing(staged):
            for near in staged:
                self.home.update(near, self.optimizer, self.precision)
                complete = near.leave()
                self._publish(complete)
                updated += complete
        if updated:
            labels.label_states(self.optimizer)

    def flush(self) -> None:
        """Let an update that a home has left under way arrive."""
        arrived = self.home.flush()
        self._publish(arrived)
        if arrived:
            labels.label_states(self.optimizer)

    def _publish(self, units: list[Unit]) -> None:
        for unit in units:
            self.carry_out(self.schedule.updated(unit), unit)

    def synchronize(self) -> None:
        """Wait for all that is under way: an update, reductions, publications."""
        self.flush()
        self.finish()
