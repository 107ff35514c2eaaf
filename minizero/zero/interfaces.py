"""What later chapters pass in: a precision, a schedule, a home.

Each class here is the answer of chapter 3: the parameters' own dtype, at once, in place.
A later chapter subclasses the one that it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..memory import labels
from ..memory.bytes import host_empty
from ..memory.plan import Plan
from .elementwise import left_alone
from .flat_buffer import Flat, Unit

if TYPE_CHECKING:
    from .owned import Owned


def at_least_fp32(t: Tensor) -> torch.dtype:
    """The dtype to compute in with `t`: fp32, or its own if that is wider."""
    return torch.promote_types(t.dtype, torch.float32)


class Precision:
    """The dtype of each copy of a parameter: here, its own, everywhere.

    `skipped_steps`: updates that were left out, their gradients not finite.
    """

    skipped_steps = 0

    def attach(self, flat: Flat, owned: list[Tensor]) -> None:
        """Called once, when a buffer has rank 0's values.

        `owned`: the shards of them that this rank will update.
        """

    def attach_buffer(self, buffer: Tensor, module: nn.Module) -> None:
        """Called once with each buffer of the model, and whose it is, likewise."""

    def masters(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        """What the optimizer updates, for each owned shard."""
        return owned

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the model's forward gets."""
        return args, kwargs

    def scaled(self, loss: Tensor) -> Tensor:
        """What backward starts from."""
        return loss

    def unscaled(self, norm: Tensor) -> Tensor:
        """The norm that gradients will have when the optimizer gets them."""
        return norm

    def clip(self, owned: list[Tensor], factor: Tensor) -> None:
        """Multiply all reduced gradients with a scalar."""
        for grad in owned:
            grad.mul_(factor)

    def ready(self, owned: list[Tensor]) -> bool:
        """Whether to update; the same on every rank. False skips the step."""
        return True

    def gradients(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        """What the optimizer gets as gradients, for each owned shard."""
        return owned

    def written(self, masters: list[Tensor], shards: list[Tensor]) -> None:
        """Called after an update, to bring the masters' values to the shards.

        Master and shard are on one device; where no master was made they are one.
        """

    def read(self, masters: list[Tensor], shards: list[Tensor]) -> None:
        """The inverse, called when somebody else has written to the shards."""
        for master, shard in zip(masters, shards, strict=True):
            if master is not shard:
                master.copy_(shard)

    def near(self, device: torch.device) -> None:
        """Called before updates there: bring what `gradients` multiplies with, once."""

    def forget(self) -> None:
        """Called when the gradients are gone."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, without tensors: JSON can hold it."""
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.skipped_steps = state["skipped_steps"]


class Move(NamedTuple):
    """One thing to do to a unit: launch a verb, or wait for what is under way."""

    verb: Literal["gather", "release", "reduce", "publish", "wait"]
    unit: Unit


class Schedule:
    """When a verb is launched and when waited for: here, at once.

    It is told what happens to a unit, and answers with moves; the net carries them out
    in their order, and so does a simulator. Ranks must launch the same collectives in
    the same order, so a schedule may decide only by what is the same on all of them.
    """

    def attach(self, units: Sequence[Unit], plan: Plan) -> None:
        """Called once, when the units have been made; the root is the first."""

    def forward_begins(self) -> None:
        """Called before the first gather of a forward."""

    def backward_begins(self) -> None:
        """Called before a backward touches anything; nothing is being reduced."""

    def backward_ends(self) -> None:
        """Called when every reduction of a backward has been waited for."""

    def needed(self, unit: Unit) -> list[Move]:
        """The unit's parameters are used next."""
        return [Move("gather", unit), Move("wait", unit)]

    def done(self, unit: Unit) -> list[Move]:
        """Nothing uses the unit's parameters any more, for now."""
        return [Move("release", unit)]

    def grads_ready(self, unit: Unit) -> list[Move]:
        """The unit's gradients of this backward are complete."""
        return [Move("reduce", unit), Move("wait", unit)]

    def updated(self, unit: Unit) -> list[Move]:
        """The unit's owned shards have been updated."""
        return [Move("publish", unit), Move("wait", unit)]


@dataclass
class NearShard:
    """One owned shard at its update: all tensors are where the optimizer works.

    `master`: what the optimizer updates. `grad`: the reduced gradient. `values`: what
    becomes the parameters; `master` itself if there is no copy. All [size]. `alone`:
    elements a to b for which this rank has seen no gradient (see `left_alone`).
    """

    flat: Flat
    master: Tensor
    grad: Tensor
    values: Tensor
    alone: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Near:
    """What one call of the optimizer updates.

    `leave`: sends the results to where they rest; returns the units that are complete.
    """

    shards: list[NearShard]
    leave: Callable[[], list[Unit]]


def _nothing() -> None:
    """What there is to wait for where nothing moves."""


Updates = list[tuple[Unit, "list[Owned]"]]
COPIED = 1 << 22  # elements of gradients that may be there in another dtype at once


def in_parts(units: Updates) -> Iterator[Updates]:
    """All units in one part, unless their gradients are copied for the update.

    Then the copies of a part have at most an eighth of all elements, or `COPIED` if that
    is more, or one unit's: each part is a call of the optimizer, which looks at all of
    its parameters.
    """
    sizes = [
        sum(o.grad.numel() for o in every if o.grad.dtype != o.given.dtype)
        for _, every in units
    ]
    most, part, copied = max(COPIED, sum(sizes) // 8), Updates(), 0
    for one, size in zip(units, sizes, strict=True):
        if part and copied + size > most:
            yield part
            part, copied = [], 0
        part.append(one)
        copied += size
    yield part


class Home:
    """Where shards rest between steps, and how they come near: here, in place.

    `plan` says where each category rests. A home that brings things from one place to
    another for the update names those places in `places`; this one moves nothing.
    """

    places: tuple[str, ...] = ("device",)
    several = True
    """Whether it serves a rank that owns several shards of a buffer, but not all."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan or Plan()

    def check(self, plan: Plan) -> None:
        """Raise ValueError unless this home does what `plan` says."""
        for category, placement in vars(plan).items():
            if placement.on not in self.places:
                raise ValueError(
                    f"the plan places {category} on {placement.on!r}, but "
                    f"{type(self).__name__} serves {', '.join(self.places)} "
                    "only; pass home=minizero.Offload(plan) for 'cpu', "
                    "minizero.NVMe(plan) for 'nvme'"
                )

    def attach(self) -> None:
        """Called once by the net that it serves."""

    def store(
        self, values: Tensor, category: str, flat: Flat | None = None
    ) -> Tensor:
        """A copy of `values`, [size], where its category rests; a shard of `flat`."""
        on = getattr(self.plan, category).on
        if on == "device":
            return labels.label(values.clone(), category)
        if on == "cpu":
            host = host_empty(values.shape, values.dtype, category)
            return host.copy_(values)
        raise ValueError(
            f"{type(self).__name__} keeps nothing on {on!r}; give the home "
            f"that does to what places {category} there, as home=..."
        )

    def load(self, shard: Tensor, into: Tensor) -> Tensor:
        """What an all-gather into the buffer around `into` reads.

        A shard of parameters that rests elsewhere is copied into `into` first.
        """
        if self.plan.parameters.on == "device":
            return shard
        return into.copy_(shard, non_blocking=True)

    def in_host_memory(self, shard: Tensor) -> bool:
        """Whether a shard rests where the host can fill it, as from a file."""
        return shard.device.type == "cpu"

    def write_back(self, shard: Tensor, values: Tensor, a: int = 0) -> None:
        """Write values, from element a of the shard on, to where that rests."""
        shard.detach()[a : a + values.numel()].copy_(values)

    def fetch(self, shard: Tensor, a: int = 0, b: int | None = None) -> Tensor:
        """Elements a to b of a shard, in host memory; only to be read."""
        return shard.detach()[a:b].cpu()

    def on_copy_stream(self) -> AbstractContextManager[Callable[[], None]]:
        """Launch a load and its all-gather beside the computation.

        Yields what makes the computation wait for them.
        """
        return nullcontext(_nothing)

    def add(self, shard: Tensor, mean: Tensor) -> None:
        """Add a mean gradient, [size], to the shard, wherever that rests."""
        shard.add_(mean)

    def finish_adds(self) -> None:
        """Wait until what `add` has begun is in the shards."""

    def masters(
        self, flat: Flat, shards: list[Tensor], masters: list[Tensor]
    ) -> list[Tensor]:
        """What the optimizer is given, for each owned shard.

        `masters` come from the precision: the shards themselves, or copies.
        """
        return masters

    def resting(
        self, flat: Flat, masters: list[Tensor], shards: list[Tensor]
    ) -> list[Tensor]:
        """The masters as they are between updates, beside the owned shards."""
        return masters

    def refresh(
        self,
        flat: Flat,
        masters: list[Tensor],
        shards: list[Tensor],
        read: Callable[[list[Tensor], list[Tensor]], None],
    ) -> None:
        """Let `read`, a precision's, take over what is in the owned shards."""
        read(self.resting(flat, masters, shards), shards)

    def staged(
        self,
        units: list[tuple[Unit, list[Owned]]],
        optimizer: torch.optim.Optimizer,
    ) -> Generator[Near, None, None]:
        """Bring near what is to be updated, a part at a time: here, in place."""
        for part in in_parts(units):
            shards = [
                NearShard(owned.flat, owned.given, owned.grad, owned.shard, owned.alone)
                for _, every in part
                for owned in every
            ]
            yield Near(shards, lambda part=part: [unit for unit, _ in part])  # type: ignore[misc]

    def update(
        self,
        near: Near,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
    ) -> None:
        """Let the optimizer update what is near."""
        for shard in near.shards[:1]:
            precision.near(shard.grad.device)
        for shard in near.shards:
            [shard.master.grad] = precision.gradients(shard.flat, [shard.grad])
        with left_alone(optimizer, [(s.master, s.alone) for s in near.shards]):
            optimizer.step()
        for shard in near.shards:
            shard.master.grad = None
            precision.written([shard.master], [shard.values])

    def flush(self) -> list[Unit]:
        """Let an update that is still under way arrive; the units that it changed."""
        return []
