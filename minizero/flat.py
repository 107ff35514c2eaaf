"""Units, and the flat buffers that their parameters are views of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from minizero import tracker
from minizero.launch import rank, world_size


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


class Flat:
    """One contiguous buffer for parameters of one dtype and one optimizer group.

    `full`: [padded], the values; the parameters are views of it.
    `grad`: [padded], the gradients in the same layout, or None.
    `total`: earlier micro-batches' reduced gradients, set aside; None mostly.
    `grad_shard`: [size], reduced gradients of the own row, where a plan shards them.
    Row r of a buffer, `size` = padded / N elements, is rank r's.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], group: int | None
    ) -> None:
        self.group = group
        self.slots: list[Slot] = []
        offset = 0
        for name, p in named:
            self.slots.append(Slot(name, p, p.shape, offset))
            offset += p.numel()
        self.numel = offset
        self.size = -(-offset // world_size())
        self.padded = self.size * world_size()
        like = self.slots[0].parameter
        self.trainable = like.requires_grad
        self.full = tracker.label(
            torch.zeros(self.padded, dtype=like.dtype, device=like.device),
            "parameters",
        )
        self.grad: Tensor | None = None
        self.total: list[Tensor] | None = None
        self.grad_shard: Tensor | None = None
        self.reduced = False
        for slot in self.slots:
            self.fill(slot)

    def fill(self, slot: Slot) -> None:
        """Copy a parameter into the buffer, and make it a view of its place there."""
        slot.view(self.full).copy_(slot.parameter.detach())
        # `.data`, not a new Parameter: the version counter stays the parameter's
        # own when the buffer is refilled
        slot.parameter.data = slot.view(self.full)

    def rows(self, buffer: Tensor, a: int = 0, b: int | None = None) -> list[Tensor]:
        """Columns a to b of every rank's row."""
        b = self.size if b is None else b
        start = range(0, self.padded, self.size) if self.size else []
        return [buffer[s + a : s + b] for s in start]

    def row(self, buffer: Tensor) -> Tensor:
        """This rank's row, [size]."""
        return buffer[rank() * self.size : (rank() + 1) * self.size]

    def pieces(self, bucket_size: int) -> Iterator[tuple[int, int]]:
        """Column ranges whose N rows together hold at most `bucket_size` elements."""
        width = max(1, bucket_size // world_size())
        for a in range(0, self.size, width):
            yield a, min(a + width, self.size)

    def new_grad(self) -> Tensor:
        """The gradient buffer, made of zeros if there is none: [padded]."""
        if self.grad is None:
            self.grad = tracker.label(torch.zeros_like(self.full), "gradients")
        return self.grad

    def collect(self, slot: Slot) -> None:
        """Move a gradient that autograd has just left in `.grad` to the buffer.

        Once `.grad` is the buffer's view, autograd adds to it in place.
        """
        p, view = slot.parameter, slot.view(self.new_grad())
        assert p.grad is not None
        if p.grad.data_ptr() != view.data_ptr():
            view.add_(p.grad)
            p.grad = view

    def drop_grad(self) -> None:
        """Let go of the gradient buffer."""
        self.grad = None
        for slot in self.slots:
            slot.parameter.grad = None


@dataclass(eq=False)
class Unit:
    """What communicates together: a block's parameters, or the root's leftovers."""

    name: str
    module: nn.Module
    flats: list[Flat] = field(default_factory=list)

    @property
    def trainable(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trainable]

    def layout(self) -> list[dict[str, object]]:
        """Name, shape, dtype, flat and offset of every parameter of the unit."""
        return [
            {
                "name": slot.name,
                "shape": tuple(slot.shape),
                "dtype": str(flat.full.dtype).removeprefix("torch."),
                "flat": index,
                "offset": slot.offset,
            }
            for index, flat in enumerate(self.flats)
            for slot in flat.slots
        ]


Policy = Callable[[nn.Module], bool]


def find_units(model: nn.Module, policy: Policy | None = None) -> dict[str, nn.Module]:
    """The outermost modules that `policy` accepts, by name; the root under "".

    By default these are the children of `nn.ModuleList` and `nn.Sequential`, which
    is where models keep their blocks.
    """
    found: dict[str, nn.Module] = {"": model}

    def visit(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}".lstrip(".")
            listed = isinstance(module, nn.ModuleList | nn.Sequential)
            chosen = policy(child) if policy else listed
            is_list = isinstance(child, nn.ModuleList)
            if chosen and not is_list and any(True for _ in child.parameters()):
                found[full] = child
            else:
                visit(child, full)

    visit(model, "")
    return found


def assign(
    model: nn.Module, units: dict[str, nn.Module]
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """The parameters of each unit, each parameter once, under its first name.

    A parameter that the root shares with a unit (a tied head) is the root's.
    """
    owner: dict[nn.Parameter, str] = {}
    for unit_name, module in units.items():
        for p in module.parameters() if unit_name else ():
            if p in owner and owner[p] != unit_name:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is in unit "
                    f"{owner[p]!r} and in unit {unit_name!r}; make one unit of both, "
                    "or pass a `units` policy that leaves both to the root"
                )
            owner[p] = unit_name
    inside = tuple(f"{name}." for name in units if name)
    for name, p in model.named_parameters(remove_duplicate=False):
        if not name.startswith(inside):
            owner[p] = ""
    parts: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in units}
    for name, p in model.named_parameters():
        parts[owner[p]].append((name, p))
    return parts


def split(
    named: list[tuple[str, nn.Parameter]], group_of: dict[nn.Parameter, int]
) -> list[tuple[int | None, list[tuple[str, nn.Parameter]]]]:
    """Cut a unit's parameters into what can share one flat buffer.

    One buffer needs one dtype, one device, one answer to `requires_grad` and one
    optimizer group.
    """
    parts: dict[object, list[tuple[str, nn.Parameter]]] = {}
    for name, p in named:
        group = group_of.get(p) if p.requires_grad else None
        if p.requires_grad and group is None:
            raise ValueError(
                f"parameter {name!r} requires a gradient but is in no group of the "
                "optimizer; add it there, or set requires_grad to False"
            )
        key = (p.dtype, p.device, p.requires_grad, group)
        parts.setdefault(key, []).append((name, p))
    return [
        (group_of.get(part[0][1]) if part[0][1].requires_grad else None, part)
        for part in parts.values()
    ]
