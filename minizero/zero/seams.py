"""What later chapters pass in: a precision (4), a schedule (8), a storage (10).

Each class here is chapter 3's answer: the parameters' own dtype, at once, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ..memory.labels import host_empty
from ..memory.labels import label
from ..memory.plan import Plan
from .flat import Flat, Unit


class Precision:
    """The dtype of each copy of a parameter: here, its own, everywhere."""

    skipped_steps = 0

    def attach(self, flat: Flat, shard: Tensor) -> Tensor | None:
        """Cast a new buffer, which has rank 0's values.

        Returns a copy of the shard for the optimizer; None: it updates the shard.
        """
        return None

    def attach_buffer(self, buffer: Tensor, module: nn.Module) -> None:
        """Cast a buffer of `module`, in place."""

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the model's forward gets."""
        return args, kwargs

    def scale_loss(self, loss: Tensor) -> Tensor:
        """What backward starts from."""
        return loss

    def unscale_norm(self, norm: Tensor) -> Tensor:
        """The norm that gradients will have when the optimizer gets them."""
        return norm

    def clip(self, grads: list[Tensor], factor: Tensor) -> None:
        """Multiply all reduced gradients with a scalar."""
        for grad in grads:
            grad.mul_(factor)

    def can_step(self, grads: list[Tensor]) -> bool:
        """Whether to update; the same on every rank. False skips the step."""
        return True

    def cast_grad(self, grad: Tensor) -> Tensor:
        """What the optimizer gets as gradient."""
        return grad

    def master_to_shard(self, master: Tensor, shard: Tensor) -> None:
        """Bring an updated master's values to the shard."""
        if master is not shard:
            shard.copy_(master)

    def shard_to_master(self, master: Tensor, shard: Tensor) -> None:
        """The inverse, when somebody else has written to the shard."""
        if master is not shard:
            master.copy_(shard)

    def grads_cleared(self) -> None:
        """Called when the gradients are gone."""

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_steps = state["skipped_steps"]


class Action(NamedTuple):
    """One thing to do to a unit: launch a operation, or wait for what is under way."""

    operation: Literal["gather", "release", "reduce", "publish", "wait"]
    unit: Unit


class Schedule:
    """When a operation is launched and when waited for: here, at once.

    It is told what happens to a unit, and answers with actions; the net carries them out
    in order, and so does the simulator. Ranks must launch the same collectives in the
    same order, so a schedule may decide only by what is the same on all of them.
    """

    def attach(self, units: Sequence[Unit], plan: Plan) -> None:
        """Called once; the root is the first unit."""

    def forward_begins(self) -> None: ...

    def backward_begins(self) -> None: ...

    def backward_ends(self) -> None: ...

    def needed(self, unit: Unit) -> list[Action]:
        """The unit's parameters are used next."""
        return [Action("gather", unit), Action("wait", unit)]

    def done(self, unit: Unit) -> list[Action]:
        """Nothing uses the unit's parameters any more, for now."""
        return [Action("release", unit)]

    def grads_ready(self, unit: Unit) -> list[Action]:
        """The unit's gradients of this backward are complete."""
        return [Action("reduce", unit), Action("wait", unit)]

    def updated(self, unit: Unit) -> list[Action]:
        """The unit's shards have been updated."""
        return [Action("publish", unit), Action("wait", unit)]


class Storage:
    """Where shards rest between steps, and how they come near: here, in place."""

    places: tuple[str, ...] = ("device",)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def store(self, values: Tensor, category: str) -> Tensor:
        """A copy of `values`, [size], where its category rests."""
        if getattr(self.plan, category).on == "device":
            return label(values.clone(), category)
        return host_empty(values.shape, values.dtype, category).copy_(values)

    def master(self, shard: Tensor, copy: Tensor | None) -> Tensor:
        """What the optimizer updates: the precision's copy, or the shard itself."""
        return shard if copy is None else copy

    def load(self, shard: Tensor, into: Tensor) -> Tensor:
        """What an all-gather into the buffer around `into` reads."""
        return shard

    def on_copy_stream(self) -> AbstractContextManager[Callable[[], None]]:
        """Launch a load beside the computation; yields what makes that wait for it."""
        return nullcontext(lambda: None)

    def accumulate(self, shard: Tensor, mean: Tensor) -> None:
        """Add a mean gradient, [size], to the shard, wherever that rests."""
        shard.add_(mean)

    def wait_for_copies(self) -> None:
        """Wait until what `add` has begun is in the shards."""

    def staged(self, units: list[Unit]) -> Iterator[list[Unit]]:
        """Yield units whose shards are near: one call of the optimizer updates them.

        All at once; one by one where gradients are cast, so that few copies are there.
        """
        for unit in units:
            for flat in unit.trainable:
                flat.staged_shard, flat.staged_grad = flat.shard, flat.mean
        flats = [flat for unit in units for flat in unit.trainable]
        cast = any(flat.mean.dtype != flat.master.dtype for flat in flats)
        yield from ([unit] for unit in units) if cast else [units]

    def read_shard(self, shard: Tensor, a: int = 0, b: int | None = None) -> Tensor:
        """Elements a to b of a shard, in host memory; only to be read."""
        return shard.detach()[a:b].cpu()

    def write_shard(self, shard: Tensor, values: Tensor, a: int = 0) -> None:
        """Write values, from element a of the shard on, to where that rests."""
        shard.detach()[a : a + values.numel()].copy_(values)
