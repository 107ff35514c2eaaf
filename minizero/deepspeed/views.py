"""A parameter, found in the rows that ranks update, wherever they rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import comm
from ..zero.construction import nets_of
from ..ranks.launch import world_size
from ..zero.owned import Owned


class View:
    """A trained parameter in the rows that this rank updates.

    A part is what a row has of it: 1-D, and empty in most rows.
    """

    def __init__(self, p: nn.Parameter) -> None:
        nets = nets_of([p]) if isinstance(p, nn.Parameter) else []
        if not nets:
            raise ValueError(
                f"{_named(p)} belongs to no model that minizero trains; pass "
                "one of engine.module.parameters(), as it is now"
            )
        self.net = nets[0]
        self.unit, self.flat, self.slot = self.net._owner[p]
        self.net.flush()

    @property
    def device(self) -> torch.device:
        return self.flat.full.device

    def owned(self) -> list[Owned]:
        return self.net.owned_states(self.flat)

    def cut(self, number: int) -> tuple[int, int]:
        """Elements a to b of a row are the parameter's; a = b if none is."""
        start = number * self.flat.size
        a = min(max(self.slot.offset - start, 0), self.flat.size)
        end = self.slot.offset + self.slot.numel - start
        return a, min(max(end, a), self.flat.size)

    def states(self, key: str) -> list[Tensor]:
        """One of the optimizer's states, by owned row, where it rests."""
        found = [owned.state.get(key) for owned in self.owned()]
        states = [
            state
            for state in found
            if isinstance(state, Tensor) and state.shape == (self.flat.size,)
        ]
        if len(states) < len(found):
            raise ValueError(
                f"the optimizer keeps no {key!r} for the elements of "
                f"{self.slot.name!r}; {self._known()}"
            )
        return states

    def _known(self) -> str:
        names = [
            key
            for key, state in self.owned()[0].state.items()
            if isinstance(state, Tensor) and state.ndim
        ]
        if not names:
            return "it has no states before the first update"
        return f"it keeps {', '.join(names)}"

    def gradients(self) -> list[Tensor]:
        """The mean gradient so far, by owned row: parts, fp32."""
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
                f"the gradient of {self.slot.name!r} is not reduced before "
                "the last micro-batch of a step; do it then, or use the "
                'function with "full" in its name, on every rank'
            )

    def read(self, rests: list[Tensor]) -> list[Tensor]:
        """The parts of what rests by owned row, in fp32; only to be read."""
        return [
            self.net.home.fetch(rest, *self.cut(owned.index)).to(
                self.device, torch.float32
            )
            for owned, rest in zip(self.owned(), rests, strict=True)
        ]

    def write(self, rests: list[Tensor], parts: list[Tensor]) -> None:
        """The inverse."""
        triples = zip(self.owned(), rests, parts, strict=True)
        for owned, rest, part in triples:
            a, b = self.cut(owned.index)
            if a < b:
                self.net.home.write_back(rest, part.to(rest.dtype), a)

    def whole(self, parts: list[Tensor]) -> Tensor:
        """All ranks' parts, put together: in the parameter's shape."""
        if len(parts) < world_size():
            cuts = map(self.cut, range(world_size()))
            lengths = [b - a for a, b in cuts]
            width = max(lengths)
            own = parts[0].new_zeros(width)
            own[: parts[0].numel()] = parts[0]
            rows = own.new_empty(world_size() * width)
            with comm.phase("view", self.unit.name):
                comm.all_gather(rows, own)
            each = rows.view(world_size(), width)
            parts = [row[:n] for row, n in zip(each, lengths, strict=True)]
        return torch.cat(parts).view(self.slot.shape)

    def split(self, value: Tensor, local: bool) -> list[Tensor]:
        """A whole value, or this rank's part of one, by owned row."""
        numbers = [owned.index for owned in self.owned()]
        sizes = [b - a for a, b in map(self.cut, numbers)]
        wanted = (sum(sizes),) if local else tuple(self.slot.shape)
        if value.shape != wanted:
            raise ValueError(
                f"the value for {self.slot.name!r} has shape "
                f"{tuple(value.shape)}, and {wanted} is needed"
            )
        flat = value.detach().to(self.device).flatten()
        if not local:
            cuts = map(self.cut, range(world_size()))
            every = flat.split([b - a for a, b in cuts])
            return [every[number] for number in numbers]
        return list(flat.split(sizes))


def _named(p: Any) -> str:
    if isinstance(p, nn.Parameter):
        return f"a parameter of shape {tuple(p.shape)}"
    return f"a {type(p).__name__}, which is no parameter,"


def trained(p: nn.Parameter) -> View:
    """The view of a parameter that may be set; ValueError if frozen."""
    view = View(p)
    if not view.flat.trainable:
        raise ValueError(
            f"parameter {view.slot.name!r} is frozen: the optimizer has "
            "nothing of it; write to it inside "
            "zero.GatheredParameters([p], modifier_rank=0)"
        )
    return view


def seen(p: nn.Parameter) -> View | None:
    """The view of a parameter that is looked at; None if frozen."""
    view = View(p)
    return view if view.flat.trainable else None
