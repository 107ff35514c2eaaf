"""What the optimizer is given where parameters and states rest in different places."""

from __future__ import annotations

import torch
from torch import Tensor

from ..memory.labels import aligned, host_empty
from ..memory.plan import Plan
from ..zero.flat_buffer import Flat
from ..zero.interfaces import Home
from ..zero.owned import Owned


class Lending(Home):
    """Gives the optimizer tensors where it works, which is where its states rest.

    Where the parameters rest elsewhere and no master copies are kept, that is a
    stand-in: an empty tensor, which points at a copy while its shard is updated. `at`:
    "device" or "cpu", where the optimizer works.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.at = "device" if plan.optimizer.on == "device" else "cpu"
        self.moves_parameters = plan.parameters.on != self.at
        self.moves_gradients = plan.gradients.on != self.at
        self._lent: dict[Flat, list[Tensor]] = {}
        self._attached = False

    def attach(self) -> None:
        if self._attached:  # its blocks are of one net's size
            raise ValueError(
                f"this {type(self).__name__} belongs to another net already; "
                "make one for each call of parallelize"
            )
        self._attached = True

    def masters(
        self, flat: Flat, shards: list[Tensor], masters: list[Tensor]
    ) -> list[Tensor]:
        if masters[0] is not shards[0]:
            if self.at == "device":
                return masters
            return [self.store(master, "optimizer", flat) for master in masters]
        if not self.moves_parameters:
            return masters
        return self.lend(flat, masters)

    def resting(
        self, flat: Flat, masters: list[Tensor], shards: list[Tensor]
    ) -> list[Tensor]:
        return shards if self.lends(flat) else masters

    def lend(self, flat: Flat, masters: list[Tensor]) -> list[Tensor]:
        """Stand-ins where the optimizer works, so that its states are made there."""

        def stand_in(dtype: torch.dtype) -> Tensor:
            if self.at == "cpu":
                return host_empty((0,), dtype, "buffers")
            return torch.empty(0, dtype=dtype, device=flat.full.device)

        self._lent[flat] = [stand_in(master.dtype) for master in masters]
        return self._lent[flat]

    def lends(self, flat: Flat) -> bool:
        """Whether the optimizer has stand-ins for the shards of this buffer."""
        return flat in self._lent

    def crossing(self, every: list[Owned]) -> int:
        """Bytes of copies, each `aligned`, that the update of these shards needs."""
        values = sum(aligned(o.shard.nbytes) for o in every) * self.moves_parameters
        return values + sum(aligned(o.grad.nbytes) for o in every) * self.moves_gradients
