"""What a rank owns of each buffer: its shards, their masters, the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
    reduced gradient, and `alone` the elements a to b that got none on this rank,
    parameter by parameter, at an update only.
    """

    flat: Flat
    index: int
    shard: Tensor
    master: Tensor
    given: Tensor
    state: dict[str, Any] = field(default_factory=dict)
    grad: Tensor = NO_GRADIENT
    alone: list[tuple[int, int]] = field(default_factory=list)


class OwnedStates(Accumulation):
    """Tells what a rank owns, to what updates, saves and loads it."""

    _masters: dict[Flat, list[Tensor]]

    def owned_states(self, flat: Flat) -> list[Owned]:
        """The owned shards with their masters and optimizer states.

        Call `flush` first: an update may be under way.
        """
        shards = self.owned(flat)
        numbers = self.numbers(shards)
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
            every = self.owned_states(flat)
            for owned, grad in zip(every, self.owned_grads(flat), strict=True):
                owned.grad, owned.alone = grad, _alone(flat, owned.index)
            return every

        found = [
            (unit, [o for f in unit.trainable if _trains(f) for o in with_grads(f)])
            for unit in self.units
        ]
        return [(unit, every) for unit, every in found if every]


def _trains(flat: Flat) -> bool:
    """Whether a parameter may have a gradient: not all have been frozen."""
    return bool(flat.came) or any(s.parameter.requires_grad for s in flat.slots)


def _alone(flat: Flat, number: int) -> list[tuple[int, int]]:
    if len(flat.came) == len(flat.slots):
        return []
    cuts = (flat.cut(s, number) for s in flat.slots if s.parameter not in flat.came)
    return [(a, b) for a, b in cuts if a < b]
