"""What an update needs that runs beside the next forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from ..memory.labels import host_empty
from ..memory.plan import Plan
from ..zero.flat_buffer import Flat, Unit
from ..zero.owned import Owned
from .host import Offload


class SecondSet(Offload):
    """Gradients and new parameters in host memory, beside those that are in use.

    `units`, `work`: what a thread is updating, and its results. `steps`: how many
    updates there were; the first `start` are waited for.
    """

    several = False

    def __init__(self, plan: Plan, start: int = 0) -> None:
        if plan.optimizer.on != "cpu":
            raise ValueError(
                "a delayed update runs on the host while the device computes, but the "
                f"plan's optimizer is on {plan.optimizer.on!r}; use "
                "Plan.stage(..., offload_optimizer='cpu')"
            )
        if start < 0:
            raise ValueError(f"start must be at least 0, not {start!r}")
        super().__init__(plan)
        self.start, self.steps = start, 0
        self.thread = ThreadPoolExecutor(1, "update")
        self.work: list[Future[None]] = []
        self.units: list[tuple[Unit, list[Owned]]] = []
        self._new: dict[Flat, list[Tensor]] = {}
        self._taken: dict[Flat, list[Tensor]] = {}

    def masters(
        self, flat: Flat, shards: list[Tensor], masters: list[Tensor]
    ) -> list[Tensor]:
        given = [self.store(master, "optimizer", flat) for master in masters]
        self._new[flat] = given
        if masters[0] is not shards[0]:
            self._new[flat] = [
                host_empty(shard.shape, shard.dtype, "buffers") for shard in shards
            ]
        return given

    def resting(
        self, flat: Flat, masters: list[Tensor], shards: list[Tensor]
    ) -> list[Tensor]:
        if self.work:
            raise RuntimeError(
                "parameters were written to while an update was under way, "
                "which would undo that; call net.synchronize() first, or "
                "write inside zero.GatheredParameters(..., modifier_rank=0)"
            )
        return masters

    def beside(self, every: list[Owned]) -> Iterator[tuple[Owned, Tensor, Tensor]]:
        """Owned shards with their taken gradients and new parameters."""
        flats = dict.fromkeys(owned.flat for owned in every)
        taken = [t for flat in flats for t in self._taken[flat]]
        new = [t for flat in flats for t in self._new[flat]]
        return zip(every, taken, new, strict=True)

    def take_all(self, units: list[tuple[Unit, list[Owned]]]) -> None:
        """Take every gradient, and let the thread wait for what it may not change."""
        for _, every in units:
            self.take_gradients(every)
        self.down.event().wait("cpu")
        # what the last flush has sent may not have left the host
        sent = self.up.event()
        self.work.append(self.thread.submit(sent.wait, "cpu"))

    def take_gradients(self, every: list[Owned]) -> None:
        """Keep this step's gradients; the next backward adds to others."""
        for flat in dict.fromkeys(owned.flat for owned in every):
            grads = [owned.grad for owned in every if owned.flat is flat]
            if flat not in self._taken:
                self._taken[flat] = [
                    host_empty(grad.shape, grad.dtype, "gradients") for grad in grads
                ]
            if self.plan.gradients.on == "cpu":
                flat.grad_shard = self._taken[flat][0]
                self._taken[flat] = grads
                continue
            self.down.follow()
            for taken, grad in zip(self._taken[flat], grads, strict=True):
                self.down.copy(taken, grad)
