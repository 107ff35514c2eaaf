"""What a rank owns of each buffer: its shards, their masters, the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..ranks.launch import rank
from .accumulation import Accumulation
from .flat_buffer import Flat, Unit


NO_GRADIENT = torch.empty(0)  # one for all: a step describes every shard anew


@dataclass
class Owned:
    """One owned shard between updates: what it is made of, where that rests.

    `index`: whose shard it would be if all were sharded. `shard`: the parameters.
    `master`: what the optimizer updates, `shard` itself if no precision keeps a copy.
    `state`: the optimizer's, by reference. `Home.fetch` reads the tensors. `given`: what
    the optimizer has in its groups; a home may lend it something else. `grad`: the
    reduced gradient, at an update only.
    """

    flat: Flat
    index: int
    shard: Tensor
    master: Tensor
    given: Tensor
    state: dict[str, Any] = field(default_factory=dict)
    grad: Tensor = NO_GRADIENT


class OwnedStates(Accumulation):
    """Tells what a rank owns, to what updates, saves and loads it."""

    optimizer: torch.optim.Optimizer
    _masters: dict[Flat, list[Tensor]]

    def owned_states(self, flat: Flat) -> list[Owned]:
        """The owned shards with their masters and optimizer states.

        Call `flush` first: an update may be under way.
        """
        shards = self.owned(flat)
        numbers = range(len(shards)) if len(shards) > 1 else [rank()]
        if not flat.trainable:
            return [
                Owned(flat, i, shard, shard, shard)
                for i, shard in zip(numbers, shards, strict=True)
            ]
        masters = self._masters[flat]
        resting = self.home.resting(flat, masters, shards)
        states = [self.optimizer.state[master] for master in masters]
        return [
            Owned(flat, *parts)
            for parts in zip(numbers, shards, resting, masters, states, strict=True)
        ]

    def _to_update(self) -> list[tuple[Unit, list[Owned]]]:
        """What the optimizer is to update, with its gradients, unit by unit."""

        def with_grads(flat: Flat) -> list[Owned]:
            pairs = zip(self.owned_states(flat), self.owned_grads(flat), strict=True)
            return [replace(owned, grad=grad) for owned, grad in pairs]

        return [
            (unit, [owned for flat in unit.trainable for owned in with_grads(flat)])
            for unit in self.units
            if unit.trainable
        ]
