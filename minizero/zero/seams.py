"""What later chapters pass in: a precision (4), a schedule (8), a storage (10).

Each class here is chapter 3's answer: one dtype, at once, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..memory.labels import host_empty, label
from ..memory.plan import Plan
from .flat import Flat, Unit


class Precision:
    """The dtype of each copy of a parameter: here, its own, everywhere.

    `skipped_steps`: updates that were left out, their gradients not finite.
    """

    skipped_steps = 0

    def attach(self, flat: Flat, shard: Tensor) -> Tensor | None:
        """Called once with each flat buffer, to cast it.

        Returns a copy of the shard for the optimizer to update; None if it updates the
        shard itself.
        """
        return None

    def attach_buffer(self, buffer: Tensor, module: nn.Module) -> None:
        """Called once with each buffer of the model, and its module, to cast it."""

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the model's forward gets."""
        return args, kwargs

    def scale_loss(self, loss: Tensor) -> Tensor:
        """What backward starts from."""
        return loss

    def unscale_norm(self, norm: Tensor) -> Tensor:
        """The norm that gradients have when the optimizer gets them."""
        return norm

    def clip(self, grads: list[Tensor], factor: Tensor) -> None:
        """Multiply all reduced gradients with a scalar."""
        for grad in grads:
            grad.mul_(factor)

    def can_step(self, grads: list[Tensor]) -> bool:
        """Whether to update, the same on every rank; False skips the step."""
        return True

    def cast_grad(self, grad: Tensor) -> Tensor:
        """What the optimizer gets as gradient."""
        return grad

    def shard_to_master(self, master: Tensor, shard: Tensor) -> None:
        """Let a master take over what a script has written to the shard."""
        if master is not shard:
            master.copy_(shard)

    def grads_cleared(self) -> None:
        """Called when all gradients have been cleared."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, without tensors: JSON can hold it."""
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.skipped_steps = state["skipped_steps"]


class Action(NamedTuple):
    """One thing to do to a unit: launch an operation, or wait for all."""

    operation: Literal["gather", "release", "reduce", "publish", "wait"]
    unit: Unit


class Schedule:
    """When an operation is launched and waited for: here, at once.

    The net reports what happens to a unit; the schedule answers with actions, which the
    net (or a simulator) carries out in order. Ranks must launch the same collectives in
    the same order, so a schedule may decide only by what is the same on all of them.
    """

    def attach(self, units: Sequence[Unit], plan: Plan) -> None:
        """Called once; the root is the first unit."""

    def pass_begins(self, which: Literal["forward", "backward"]) -> None:
        """Called before the first gather of a forward or backward."""

    def backward_ends(self) -> None:
        """Called when every reduction of a backward has been waited for."""

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

    def upcoming(self) -> list[Unit]:
        """Units whose parameters are expected next, the next one first."""
        return []


class Storage:
    """Where shards are stored between steps, and how they are updated.

    Here: on the device, in place. `plan` says where each category is stored;
    `places` are those that this class can store something in.
    """

    places: tuple[str, ...] = ("device",)
    schedule: Schedule | None = None

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def attach(self, plan: Plan, schedule: Schedule, optimizer: Optimizer) -> None:
        """Called once, by the net that it serves; ValueError if it cannot."""
        if self.schedule is not None:
            raise ValueError(
                f"this {type(self).__name__} belongs to another net already; "
                "make one for each call of parallelize"
            )
        if plan != self.plan:
            raise ValueError(f"the storage is for {self.plan}, not for {plan}")
        for category, placement in vars(plan).items():
            if placement.on not in self.places:
                raise ValueError(
                    f"the plan places {category} on {placement.on!r}, but "
                    f"{type(self).__name__} serves {', '.join(self.places)} only; pass "
                    "minizero.Offload(plan) for 'cpu', minizero.NVMe(plan) for 'nvme'"
                )
        self.schedule = schedule

    def store(self, values: Tensor, category: str) -> Tensor:
        """A copy of `values`, a shard's, where the plan stores `category`."""
        if getattr(self.plan, category).on == "device":
            return label(values.clone(), category)
        return host_empty(values.shape, values.dtype, category).copy_(values)

    def master(self, flat: Flat, copy: Tensor | None) -> Tensor:
        """What the optimizer updates: the precision's copy, or the shard."""
        return flat.shard if copy is None else copy

    def load(self, shard: Tensor, into: Tensor) -> Tensor:
        """What an all-gather reads; `into` is the shard's place in `full`."""
        if self.plan.parameters.on == "device":
            return shard
        return into.copy_(shard)

    def on_copy_stream(self) -> AbstractContextManager[Callable[[], None]]:
        """Inside, loads and gathers run beside the computation.

        Yields what makes the computation wait for them.
        """
        return nullcontext(lambda: None)

    def accumulate(self, shard: Tensor, mean: Tensor) -> None:
        """Add a mean gradient to the shard, wherever that is stored."""
        shard.add_(mean)

    def wait_for_copies(self) -> None:
        """Wait until what `accumulate` has begun is in the shards."""

    def update(
        self, units: list[Unit], optimizer: Optimizer, precision: Precision
    ) -> Iterator[list[Unit]]:
        """Update these units; yields units whose shards are complete.

        All in one call of the optimizer; or one by one where gradients are cast for it,
        so that few copies exist at a time.
        """
        flats = [flat for unit in units for flat in unit.trainable]
        for flat in flats:
            assert flat.mean is not None
            flat.staged_shard, flat.staged_grad = flat.shard, flat.mean
        cast = any(f.staged_grad.dtype != f.master.dtype for f in flats)
        for part in [[unit] for unit in units] if cast else [units]:
            step = [flat for unit in part for flat in unit.trainable]
            self.step(step, optimizer, precision)
            yield part

    def step(
        self, flats: list[Flat], optimizer: Optimizer, precision: Precision
    ) -> None:
        """Let the optimizer update buffers that are staged."""
        for flat in flats:
            flat.master.grad = precision.cast_grad(flat.staged_grad)
        if flats:
            optimizer.step()
        for flat in flats:
            flat.master.grad = None
            if flat.master is not flat.staged_shard:
                flat.staged_shard.copy_(flat.master)
            # a reference would keep the gradient until the next step
            del flat.staged_grad

    def flush(self) -> list[Unit]:
        """Wait for an update that is still running; the units it changed."""
        return []

    def refresh(self, flat: Flat, precision: Precision) -> None:
        """Let the master take over what was written to the shard."""
        precision.shard_to_master(flat.master, flat.shard)

    def read_shard(self, shard: Tensor, a: int = 0, b: int | None = None) -> Tensor:
        """Elements a to b of a shard, in host memory; only to be read."""
        return shard.detach()[a:b].cpu()

    def write_shard(self, shard: Tensor, values: Tensor, a: int = 0) -> None:
        """Write values into a shard, from element a on."""
        shard.detach()[a : a + values.numel()].copy_(values)
