"""What later chapters pass in: a precision, a schedule, a home."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..memory import labels
from .flat_buffer import Flat, Unit
from ..memory.bytes import host_empty
from ..memory.plan import Plan

if TYPE_CHECKING:
    from minizero.zero.verbs import Verbs


class Precision:
    """The dtype of each copy of a parameter: here, its own, everywhere.

    `skipped_steps`: updates that were left out, their gradients not finite.
    """

    skipped_steps = 0

    def attach(self, flat: Flat, owned: list[Tensor]) -> None:
        """Called once, when a buffer has rank 0's values.

        `owned`: the rows of them that this rank will update.
        """

    def attach_buffer(self, buffer: Tensor) -> None:
        """Called once with each buffer of the model, likewise."""

    def masters(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        """What the optimizer updates, for each owned row."""
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
            grad.mul_(factor.to(grad.device))

    def ready(self, owned: list[Tensor]) -> bool:
        """Whether to update; the same on every rank. False skips the step."""
        return True

    def gradients(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        """What the optimizer gets as gradients, for each owned row."""
        return owned

    def written(self, masters: list[Tensor], rows: list[Tensor]) -> None:
        """Called after an update, to bring the masters' values to the rows.

        Master and row are on one device; where no master was made they are
        one.
        """

    def read(self, masters: list[Tensor], rows: list[Tensor]) -> None:
        """The inverse, called when somebody else has written to the rows."""
        for master, row in zip(masters, rows, strict=True):
            if master is not row:
                master.copy_(row)

    def forget(self) -> None:
        """Called when the gradients are gone."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, without tensors: JSON can hold it."""
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.skipped_steps = state["skipped_steps"]


class Schedule:
    """When a collective is launched and when waited for: here, at once.

    Ranks must launch the same collectives in the same order, so a schedule
    may decide only by what is the same on all of them.
    """

    def attach(self, net: Verbs) -> None:
        """Called once, when the units have been made."""

    def begin_forward(self, net: Verbs) -> None:
        """Called before the first gather of a forward."""

    def begin_backward(self, net: Verbs) -> None:
        """Called before a backward touches anything."""

    def gather(self, net: Verbs, unit: Unit) -> None:
        for work in net.gather(unit):
            work.wait()

    def release(self, net: Verbs, unit: Unit) -> None:
        net.release(unit)

    def reduce(self, net: Verbs, unit: Unit) -> None:
        for work in net.reduce(unit):
            work.wait()
        net.reduced(unit)

    def settle(self, net: Verbs, unit: Unit) -> None:
        """Called before a gradient is added to the unit's buffer."""

    def drain(self, net: Verbs) -> None:
        """Wait for what a backward or an update has left under way."""

    def publish(self, net: Verbs, unit: Unit) -> None:
        """Called when the own rows of the unit have been updated."""
        for work in net.send(unit):
            work.wait()


class Home:
    """Where shards rest between steps, and how they meet: here, in place.

    `plan` says where each category rests. A home that brings things from one
    place to another for the update names those places in `places`; this one
    moves nothing.
    """

    places: tuple[str, ...] = ("device",)

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

    def attach(self, net: Verbs) -> None:
        """Called once, when the units have been made."""

    def rest(self, row: Tensor, category: str) -> Tensor:
        """A copy of `row`, [size], where its category rests."""
        on = getattr(self.plan, category).on
        if on == "device":
            return labels.label(row.clone(), category)
        if on == "cpu":
            host = host_empty(row.shape, row.dtype, category)
            return host.copy_(row)
        raise ValueError(
            f"{type(self).__name__} keeps nothing on {on!r}; give the home "
            f"that does to what places {category} there, as home=..."
        )

    def lift(self, shard: Tensor, row: Tensor) -> Tensor:
        """What an all-gather into the buffer around `row` reads.

        A shard that rests elsewhere is copied into `row` first.
        """
        if not labels.on_host(shard):
            return shard
        return row.copy_(shard, non_blocking=True)

    def lower(self, shard: Tensor, row: Tensor, a: int = 0) -> None:
        """Write a row, or part of it from element a, to where it rests."""
        shard.detach()[a : a + row.numel()].copy_(row)

    def fetch(self, shard: Tensor, a: int = 0, b: int | None = None) -> Tensor:
        """Elements a to b of what rests, in host memory; only to be read."""
        return shard.detach()[a:b].cpu()

    @contextmanager
    def aside(self) -> Iterator[Callable[[], None]]:
        """Launch a lift and its all-gather beside the computation.

        Yields what makes the computation wait for them.
        """
        yield lambda: None

    def add(self, shard: Tensor, mean: Tensor) -> None:
        """Add a mean gradient, [size], to the shard, wherever that rests."""
        shard.add_(mean)

    def settle(self) -> None:
        """Finish what `add` has begun."""

    def flush(self, net: Verbs) -> None:
        """Let an update that is still under way arrive."""

    def masters(
        self, flat: Flat, rows: list[Tensor], masters: list[Tensor]
    ) -> list[Tensor]:
        """What the optimizer is given, for each owned row.

        `masters` come from the precision: the rows themselves, or copies.
        """
        return masters

    def resting(
        self, flat: Flat, masters: list[Tensor], rows: list[Tensor]
    ) -> list[Tensor]:
        """The masters as they are between updates, beside the owned rows."""
        return masters

    def refresh(
        self,
        flat: Flat,
        masters: list[Tensor],
        rows: list[Tensor],
        read: Callable[[list[Tensor], list[Tensor]], None],
    ) -> None:
        """Let `read`, a precision's, take over what is in the owned rows."""
        read(self.resting(flat, masters, rows), rows)

    def grads(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        """The owned gradients, brought to where the masters are."""
        return owned

    def rows(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        """Where the masters are, what becomes the owned parameters."""
        return owned

    def update(self, net: Verbs) -> None:
        """Update and publish every unit."""
        net.update(net.units)
        for unit in net.units:
            net.publish(unit)
        labels.label_states(net.optimizer)
