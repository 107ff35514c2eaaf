"""A parameter, found in the shards that ranks update, wherever they rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import comm
from ..ranks.launch import world_size
from ..zero.construction import nets_of
from ..zero.owned import Owned


class View:
    """A trained parameter in the shards that this rank updates.

    A part is what a shard has of it: 1-D, and empty in most shards.
    """

    def __init__(self, p: nn.Parameter) -> None:
        nets = nets_of([p]) if isinstance(p, nn.Parameter) else []
        if not nets:
            raise ValueError(
                f"{_named(p)} belongs to no model that minizero trains; pass one of "
                "engine.module.parameters(), as it is now"
            )
        self.net = nets[0]
        self.unit, self.flat, self.slot = self.net._owner[p]
        self.net.flush()

    def owned(self) -> list[Owned]:
        return self.net.owned_states(self.flat)

    def cut(self, number: int) -> tuple[int, int]:
        """Elements a to b of a shard are the parameter's; a = b if none is."""
        return self.flat.cut(self.slot, number)

    def lengths(self) -> list[int]:
        """Elements of the parameter in each rank's shard."""
        return [b - a for a, b in map(self.cut, range(world_size()))]

    def masters(self) -> list[Tensor]:
        """What the optimizer updates, by owned shard, where it rests."""
        return [owned.master for owned in self.owned()]

    def states(self, key: str) -> list[Tensor]:
        """One of the optimizer's states, likewise."""
        found = [owned.state.get(key) for owned in self.owned()]
        states = [
            state
            for state in found
            if isinstance(state, Tensor) and state.shape == (self.flat.size,)
        ]
        if len(states) == len(found):
            return states
        first = self.owned()[0].state
        names = [k for k, v in first.items() if isinstance(v, Tensor) and v.ndim]
        known = f"it keeps {', '.join(names)}"
        raise ValueError(
            f"the optimizer keeps no {key!r} for the elements of {self.slot.name!r}; "
            f"{known if names else 'it has no states before the first update'}"
        )

    def gradients(self) -> list[Tensor]:
        """The mean gradient so far, by owned shard: parts, fp32."""
        self.net.finish(self.unit)
        self.net.home.finish_adds()
        parts = self.read(self.net.owned_grads(self.flat))
        if self.flat.total is not None:
            totals = self.read(self.flat.total)
            parts = [a + b for a, b in zip(parts, totals, strict=True)]
        return parts

    def need_reduced(self) -> None:
        """RuntimeError while gradients are only this rank's."""
        if self.net._unsynced:
            raise RuntimeError(
                f"the gradient of {self.slot.name!r} is not reduced before the last "
                "micro-batch of a step; do it then, or use the function with "
                '"full" in its name, on every rank'
            )

    def read(self, rests: list[Tensor]) -> list[Tensor]:
        """The parts of what rests by owned shard, in fp32; only to be read."""
        return [
            self.net.home.fetch(rest, *self.cut(owned.index)).to(
                self.flat.full.device, torch.float32
            )
            for owned, rest in zip(self.owned(), rests, strict=True)
        ]

    def write(self, rests: list[Tensor], parts: list[Tensor]) -> None:
        """The inverse."""
        for owned, rest, part in zip(self.owned(), rests, parts, strict=True):
            a, b = self.cut(owned.index)
            if a < b:
                self.net.home.write_back(rest, part.to(rest.dtype), a)

    def whole(self, parts: list[Tensor]) -> Tensor:
        """All ranks' parts, put together: in the parameter's shape."""
        if len(parts) < world_size():
            lengths = self.lengths()
            own = parts[0].new_zeros(len(parts), max(lengths))
            for row, part in zip(own, parts, strict=True):
                row[: part.numel()] = part
            with comm.phase("view", self.unit.name):
                each = self.net.of_all(own)
            parts = [part[:n] for part, n in zip(each, lengths, strict=True)]
        return torch.cat(parts).view(self.slot.shape)

    def split(self, value: Tensor, local: bool) -> list[Tensor]:
        """A whole value, or this rank's part of one, by owned shard."""
        lengths, numbers = self.lengths(), [owned.index for owned in self.owned()]
        sizes = [lengths[number] for number in numbers]
        wanted = (sum(sizes),) if local else tuple(self.slot.shape)
        if value.shape != wanted:
            raise ValueError(
                f"the value for {self.slot.name!r} has shape {tuple(value.shape)}, and "
                f"{wanted} is needed"
            )
        flat = value.detach().to(self.flat.full.device).flatten()
        if local:
            return list(flat.split(sizes))
        every = flat.split(lengths)
        return [every[number] for number in numbers]


def _named(p: Any) -> str:
    if isinstance(p, nn.Parameter):
        return f"a parameter of shape {tuple(p.shape)}"
    return f"a {type(p).__name__}, which is no parameter,"


def trained(p: nn.Parameter) -> View:
    """The view of a parameter that may be set; ValueError if frozen."""
    view = View(p)
    if not view.flat.trainable:
        raise ValueError(
            f"parameter {view.slot.name!r} is frozen: the optimizer has nothing of it; "
            "write to it inside zero.GatheredParameters([p], modifier_rank=0)"
        )
    return view


def seen(p: nn.Parameter) -> View | None:
    """The view of a parameter that is looked at; None if frozen."""
    view = View(p)
    return view if view.flat.trainable else None
