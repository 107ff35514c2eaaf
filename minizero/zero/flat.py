"""Units, and the flat buffers that their parameters are views of (chapter 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm.collectives import Work
from ..memory.labels import label
from ..ranks.launch import rank, world_size

Policy = Callable[[nn.Module], bool]
Named = list[tuple[str, nn.Parameter]]


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
        return buffer[self.offset : self.offset + self.numel].view(self.shape)


class Flat:
    """One contiguous buffer for parameters of one dtype, device and optimizer group.

    It is padded to N equal shards of `size` elements; shard r is rank r's.

    `full`: [padded], the parameters' values; they are views of it.
    `grad`: [padded] or None, this rank's gradient, in `grad_dtype`. `uninitialized`: the
    parameters whose part of it is void.
    `mean`: what was averaged over ranks in this step; [size] where a plan shards it.
    `shard`: what this rank updates. `master`: what the optimizer has of it, a copy or
    the shard. `staged_shard`, `staged_grad`: shard and mean where the optimizer works,
    during the update.
    """

    staged_shard: Tensor
    staged_grad: Tensor

    def __init__(self, named: Named, group: int | None) -> None:
        ends = list(accumulate((p.numel() for _, p in named), initial=0))
        self.slots = [
            Slot(name, p, p.shape, start)
            for (name, p), start in zip(named, ends, strict=False)
        ]
        self.size = max(1, -(-ends[-1] // world_size()))
        self.padded = self.size * world_size()
        like = named[0][1]
        self.group, self.trainable = group, like.requires_grad
        self.grad_dtype = like.dtype
        self.grad: Tensor | None = None
        self.uninitialized: set[nn.Parameter] = set()
        self.mean: Tensor | None = None
        self.shard = self.master = torch.empty(0)
        full = torch.zeros(self.padded, dtype=like.dtype, device=like.device)
        self.full = label(full, "parameters")
        for slot in self.slots:
            slot.view(full).copy_(slot.parameter.detach())
        self.point(self.views())

    def views(self) -> list[Tensor]:
        """The parts of `full` that are the parameters."""
        return [slot.view(self.full) for slot in self.slots]

    def point(self, tensors: list[Tensor]) -> None:
        """The parameters have these tensors' memory from now on.

        `.data`, not new parameters: modules, optimizers and hooks hold these, and the
        version counter stays the parameter's own when the buffer is refilled.
        """
        for slot, tensor in zip(self.slots, tensors, strict=True):
            slot.parameter.data = tensor

    def own(self, buffer: Tensor) -> Tensor:
        """This rank's shard of a buffer, [size]."""
        return buffer[rank() * self.size : (rank() + 1) * self.size]

    def pieces(self, bucket_size: int) -> Iterator[slice]:
        """Ranges of all N shards that hold at most `bucket_size` elements."""
        width = max(1, bucket_size // world_size())
        return (slice(a, min(a + width, self.size)) for a in range(0, self.size, width))

    def cast(self, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        """Hold the values in another dtype, and gradients in yet another."""
        self.full, self.grad_dtype = (
            label(self.full.to(dtype), "parameters"),
            grad_dtype,
        )
        self.point(self.views())

    def full_grad(self) -> Tensor:
        """The gradient buffer, zeros where nobody has brought one: [padded]."""
        grad = self.grad_buffer()
        for slot in self.slots if self.uninitialized else ():
            if slot.parameter in self.uninitialized:
                slot.view(grad).zero_()
        self.uninitialized.clear()
        return grad

    def grad_buffer(self) -> Tensor:
        """The gradient buffer, whatever is in it."""
        if self.grad is None:
            grad = torch.empty_like(self.full, dtype=self.grad_dtype)
            self.grad = label(grad, "gradients")
            self.mark_uninitialized()
        return self.grad

    def mark_uninitialized(self) -> None:
        """The next gradients replace what is in the buffer."""
        last = self.slots[-1]
        self.grad_buffer()[last.offset + last.numel :].zero_()
        self.uninitialized = {slot.parameter for slot in self.slots}

    def collect(self, slot: Slot) -> None:
        """Action the gradient that autograd has left in `.grad` to the buffer."""
        p, view = slot.parameter, slot.view(self.grad_buffer())
        view.copy_(p.grad) if p in self.uninitialized else view.add_(p.grad)
        self.uninitialized.discard(p)
        p.grad = None

    def changed(self) -> None:
        """An update has come: autograd must refuse graphs that saved the old values."""
        torch.autograd.graph.increment_version([slot.parameter for slot in self.slots])


@dataclass(eq=False)
class Unit:
    """What communicates together: a block's parameters, or the leftovers (the root).

    `missing`: parameters whose gradient is still to come. `works`: what is under way.
    """

    name: str
    module: nn.Module
    flats: list[Flat] = field(default_factory=list)
    missing: set[nn.Parameter] = field(default_factory=set)
    works: list[Work] = field(default_factory=list)

    @property
    def trainable(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trainable]

    def wait(self) -> None:
        """Wait for this unit's collectives."""
        works, self.works = self.works, []
        for work in works:
            work.wait()


def find_units(model: nn.Module, policy: Policy | None = None) -> dict[str, nn.Module]:
    """The outermost modules that `policy` accepts; the root under "".

    By default the children of `nn.ModuleList` and `nn.Sequential`, which is where
    models keep their blocks.
    """
    lists = (nn.ModuleList, nn.Sequential)
    found = {"": model}
    for name, module in model.named_modules():
        parent, _, _ = name.rpartition(".")
        listed = isinstance(model.get_submodule(parent), lists)
        inside = any(name.startswith(f"{unit}.") for unit in found if unit)
        chosen = policy(module) if policy else listed and not isinstance(module, lists)
        if name and chosen and not inside and any(True for _ in module.parameters()):
            found[name] = module
    return found


def assign(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, Named]:
    """The parameters of each unit, each once; those of two units are the root's."""
    owner: dict[nn.Parameter, str] = {}
    for full, p in model.named_parameters(remove_duplicate=False):
        unit = max(
            (u for u in units if u and full.startswith(f"{u}.")), key=len, default=""
        )
        owner[p] = "" if owner.get(p, unit) != unit else unit
    parts: dict[str, Named] = {unit: [] for unit in units}
    for name, p in model.named_parameters():
        parts[owner[p]].append((name, p))
    return parts


def split(
    named: Named, group_of: dict[nn.Parameter, int]
) -> list[tuple[int | None, Named]]:
    """Cut a unit's parameters into what can share one flat buffer."""
    parts: dict[object, Named] = {}
    for name, p in named:
        group = group_of.get(p)
        if p.requires_grad and group is None:
            raise ValueError(f"parameter {name!r} is in no group of the optimizer")
        key = p.dtype, p.device, p.requires_grad, group
        parts.setdefault(key, []).append((name, p))
    return [(key[3], part) for key, part in parts.items()]


def check_apart(model: nn.Module) -> None:
    """Refuse two parameters that share memory: one would take the other's values.

    Tied ones are one parameter under two names, and welcome.
    """
    spans = []
    for name, p in model.named_parameters():
        if p.numel() and not p.is_meta:
            last = sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
            spans.append((p.data_ptr(), p.data_ptr() + (last + 1) * p.itemsize, name))
    end, before = 0, ""
    for start, stop, name in sorted(spans):
        if start < end:
            raise ValueError(
                f"parameters {before!r} and {name!r} overlap in memory; tie them"
            )
        end, before = stop, name
