"""Units, and the flat buffers that their parameters are views of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm import Group, Work, everyone
from ..memory.labels import label

Named = list[tuple[str, nn.Parameter]]
Layout = Callable[[list[nn.Parameter], int], tuple[list[int], int]]


class Slot(NamedTuple):
    """Where one parameter lies in its flat buffer; offset in elements."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def view(self, buffer: Tensor) -> Tensor:
        """The part of `buffer` that is this parameter, in its shape."""
        part = buffer[self.offset : self.offset + self.numel]
        return part.view(self.shape)


def in_order(params: list[nn.Parameter], n: int) -> tuple[list[int], int]:
    """Lay parameters one after the other, in a buffer of n shards.

    Returns each one's offset, and the size of a shard.
    """
    ends = list(accumulate((p.numel() for p in params), initial=0))
    return ends[:-1], max(1, -(-ends[-1] // n))


class Flat:
    """One buffer for parameters of one dtype, device and optimizer group.

    It is padded to N equal shards of `size` elements, one for each of the
    N `ranks`; `place` is this one's among them.

    `full`: [padded], the values; the parameters are views of it.
    `grad`: [padded] or None, this rank's gradient, in `grad_dtype`.
    `uninitialized`: parameters whose part of `grad` has no values yet.
    `mean`: the gradient averaged over ranks; [size] where a plan shards it.
    `shard`: the values that this rank updates, stored between steps.
    `master`: what the optimizer updates, a copy of the shard or itself.
    `staged_shard`, `staged_grad`: shard and mean on the device where the
        optimizer works, during the update.
    `start`: the first element in `full` of what this rank updates.
    `group`: index of the optimizer group; None for frozen parameters.
    """

    mean: Tensor | None = None
    grad: Tensor | None = None
    staged_shard: Tensor
    staged_grad: Tensor
    start = 0

    def __init__(
        self,
        named: Named,
        group: int | None,
        layout: Layout = in_order,
        ranks: Group | None = None,
    ) -> None:
        self.ranks = ranks or everyone()
        n, self.place = self.ranks.size, self.ranks.rank
        offsets, self.size = layout([p for _, p in named], n)
        self.slots = [
            Slot(name, p, p.shape, offset)
            for (name, p), offset in zip(named, offsets, strict=True)
        ]
        self.padded = self.size * n
        like = named[0][1]
        self.group, self.trainable = group, like.requires_grad
        self.grad_dtype = like.dtype
        self.uninitialized: set[nn.Parameter] = set()
        full = torch.zeros(self.padded, dtype=like.dtype, device=like.device)
        self.full = label(full, "parameters")
        self.shard = self.master = self.full[:0]
        self.fill()

    def fill(self) -> None:
        """Copy the parameters into the buffer, and make them views of it."""
        for slot, view in zip(self.slots, self.views(), strict=True):
            view.copy_(slot.parameter.detach())
        self.point(self.views())

    def views(self) -> list[Tensor]:
        """The parts of `full` that are the parameters."""
        return [slot.view(self.full) for slot in self.slots]

    def point(self, tensors: list[Tensor]) -> None:
        """Let the parameters use these tensors' memory from now on.

        By `.data`, since modules, optimizers and hooks hold the parameters.
        """
        for slot, tensor in zip(self.slots, tensors, strict=True):
            slot.parameter.data = tensor

    def cast(self, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        """Hold the values in another dtype, and gradients in yet another."""
        self.grad_dtype = grad_dtype
        self.full = label(self.full.to(dtype), "parameters")
        self.point(self.views())

    def own(self, buffer: Tensor) -> Tensor:
        """This rank's shard of a buffer, [size]."""
        return buffer[self.place * self.size : (self.place + 1) * self.size]

    def pieces(self, bucket_size: int) -> Iterator[slice]:
        """Cut all shards alike: pieces of at most `bucket_size` elements."""
        width = max(1, bucket_size // self.ranks.size)
        for start in range(0, self.size, width):
            yield slice(start, min(start + width, self.size))

    def grad_buffer(self) -> Tensor:
        """The gradient buffer; allocates it, without values, if need be."""
        if self.grad is None:
            grad = torch.empty_like(self.full, dtype=self.grad_dtype)
            self.grad = label(grad, "gradients")
            self.mark_uninitialized()
        return self.grad

    def mark_uninitialized(self) -> None:
        """Let the next gradients replace what is in the buffer."""
        grad, end = self.grad_buffer(), 0
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            grad[end : slot.offset].zero_()  # padding between parameters
            end = slot.offset + slot.numel
        grad[end:].zero_()
        self.uninitialized = {slot.parameter for slot in self.slots}

    def collect(self, slot: Slot) -> None:
        """Move the gradient that autograd has left in `.grad` to the buffer.

        The first one is copied: zeroing and adding would read it twice.
        """
        p, view = slot.parameter, slot.view(self.grad_buffer())
        assert p.grad is not None
        grad, p.grad = p.grad.to_dense(), None
        if p in self.uninitialized:
            self.uninitialized.remove(p)
            view.copy_(grad)
        else:
            view.add_(grad)

    def full_grad(self) -> Tensor:
        """The gradient buffer, with zeros for unused parameters: [padded]."""
        grad = self.grad_buffer()
        for slot in self.slots if self.uninitialized else ():
            if slot.parameter in self.uninitialized:
                slot.view(grad).zero_()
        self.uninitialized.clear()
        return grad

    def changed(self) -> None:
        """Call it after an update: then autograd refuses older graphs."""
        every = [slot.parameter for slot in self.slots]
        torch.autograd.graph.increment_version(every)


@dataclass(eq=False)
class Unit:
    """Parameters that communicate together: a block's, or the rest (the root).

    `missing`: parameters whose gradient is still to come in this backward.
    `works`: handles of its collectives under way.
    `changed`: buffers whose shards have been updated, to be published.
    """

    name: str
    module: nn.Module
    flats: list[Flat] = field(default_factory=list)
    missing: set[nn.Parameter] = field(default_factory=set)
    works: list[Work] = field(default_factory=list)
    changed: list[Flat] = field(default_factory=list)

    @property
    def trainable(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trainable]

    def wait(self) -> None:
        """Wait for this unit's collectives."""
        works, self.works = self.works, []
        for work in works:
            work.wait()
