"""Units, and the flat buffers that their parameters are views of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from ..memory import labels
from ..ranks.launch import rank, world_size


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its flat buffer; offset in elements."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def view(self, buffer: Tensor) -> Tensor:
        """The part of `buffer` that is this parameter, in its shape."""
        return buffer[self.offset : self.offset + self.numel].view(self.shape)


class Layout:
    """Which parameters lie where in a buffer, and which shard is whose.

    The buffer is padded to N equal shards of `size` elements; shard r is
    rank r's.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.slots: list[Slot] = []
        self.numel = 0
        for name, p in named:
            self.slots.append(Slot(name, p, p.shape, self.numel))
            self.numel += p.numel()
        self.size = -(-self.numel // world_size())
        self.padded = self.size * world_size()

    def shards(
        self, buffer: Tensor, a: int = 0, b: int | None = None
    ) -> list[Tensor]:
        """Elements a to b of every rank's shard."""
        b = self.size if b is None else b
        starts = [r * self.size for r in range(world_size())]
        return [buffer[start + a : start + b] for start in starts]

    def own(self, buffer: Tensor) -> Tensor:
        """This rank's shard, [size]."""
        return buffer[rank() * self.size : (rank() + 1) * self.size]

    def pieces(self, bucket_size: int) -> Iterator[tuple[int, int]]:
        """Ranges of all N shards that hold at most `bucket_size` elements."""
        width = max(1, bucket_size // world_size())
        for a in range(0, self.size, width):
            yield a, min(a + width, self.size)


class Gradients(Layout):
    """The gradients of a flat buffer, in the layout of its values.

    `grad`: [padded], or None; in `grad_dtype` it is kept, added up, reduced.
    `total`: earlier micro-batches' reduced gradients, set aside; None mostly.
    `grad_shard`: [size], the own reduced gradients, where a plan shards them.
    """

    full: Tensor
    grad_dtype: torch.dtype
    grad: Tensor | None = None
    total: list[Tensor] | None = None
    grad_shard: Tensor | None = None
    reduced = False

    def new_grad(self) -> Tensor:
        """The gradient buffer, made of zeros if there is none: [padded]."""
        if self.grad is None:
            zeros = torch.zeros_like(self.full, dtype=self.grad_dtype)
            self.grad = labels.label(zeros, "gradients")
        return self.grad

    def collect(self, slot: Slot) -> None:
        """Move a gradient that autograd has left in `.grad` to the buffer.

        Once `.grad` is the buffer's view, autograd adds to it in place; in
        another dtype than the parameter's it cannot be.
        """
        p, view = slot.parameter, slot.view(self.new_grad())
        assert p.grad is not None
        if p.grad.data_ptr() != view.data_ptr():
            view.add_(p.grad)
            p.grad = view if view.dtype == p.dtype else None

    def detach_grads(self) -> None:
        """Keep what autograd brings from now on out of the buffer."""
        for slot in self.slots:
            slot.parameter.grad = None

    def attach_grads(self) -> None:
        """The inverse, for gradients of the parameters' dtype."""
        if self.grad is not None and self.grad_dtype == self.full.dtype:
            for slot in self.slots:
                slot.parameter.grad = slot.view(self.grad)


class Flat(Gradients):
    """One contiguous buffer for parameters of one dtype and optimizer group.

    `full`: [padded], the values; the parameters are views of it.
    `trainable`: whether the parameters require gradients.
    `group`: the number of their optimizer group, or None.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], group: int | None
    ) -> None:
        super().__init__(named)
        self.group = group
        like = self.slots[0].parameter
        self.trainable, self.grad_dtype = like.requires_grad, like.dtype
        self.full = labels.label(
            torch.zeros(self.padded, dtype=like.dtype, device=like.device),
            "parameters",
        )
        for slot in self.slots:
            self.fill(slot)

    def fill(self, slot: Slot) -> None:
        """Copy a parameter into its place, and make it a view of that."""
        slot.view(self.full).copy_(slot.parameter.detach())
        # `.data`, not a new Parameter: the version counter stays the
        # parameter's own when the buffer is refilled
        slot.parameter.data = slot.view(self.full)

    def cast(self, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        """Hold the values in another dtype, and gradients in yet another."""
        self.grad_dtype = grad_dtype
        self.full = labels.label(self.full.to(dtype), "parameters")
        for slot in self.slots:
            slot.parameter.data = slot.view(self.full)


@dataclass(eq=False)
class Unit:
    """What communicates together: a block's parameters, or the leftovers."""

    name: str
    module: nn.Module
    flats: list[Flat] = field(default_factory=list)

    @property
    def trainable(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trainable]
