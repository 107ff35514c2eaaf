"""ZeRO-3: parameters that exist only while they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..comm.collectives import Work
from ..memory import labels
from ..memory.plan import Plan
from .absent_use import TellsAbsentUse, refuse_create_graph
from .autograd_hooks import hook_outputs, mark_inputs
from .flat_buffer import Flat, Unit
from .sharded_buffer import ShardedFlat


class ShardedVerbs(TellsAbsentUse):
    """What the verbs do under plan 3; the subclasses say when."""

    plan = Plan.stage(3)
    flat_type = ShardedFlat

    def place(self, flat: Flat) -> None:
        super().place(flat)
        assert isinstance(flat, ShardedFlat)
        flat.home = self.home
        flat.split()

    def gather(self, unit: Unit) -> Iterator[Work]:
        for flat in unit.flats:
            assert isinstance(flat, ShardedFlat)
            flat.used = True
            if not flat.whole:
                yield flat.gather()

    def release(self, unit: Unit) -> None:
        for flat in unit.flats:
            assert isinstance(flat, ShardedFlat)
            flat.used = False
            flat.free()

    def owned(self, flat: Flat) -> list[Tensor]:
        assert isinstance(flat, ShardedFlat)
        return [flat.shard]

    def publish(self, unit: Unit) -> Iterator[Work]:
        """Nothing: the others fetch the shard when they need it."""
        yield from ()


@dataclass(eq=False)
class Pass:
    """One forward of a unit, and the backward that goes through it."""

    unit: Unit


class Regather(ShardedVerbs):
    """Gathers and releases a unit around each of its uses."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._forwards: list[Pass] = []  # under way, the innermost last
        self._active: set[Pass] = set()  # whose backward is under way
        # whose backward may come; weak, as a graph may be dropped
        self._pending: dict[Unit, WeakSet[Pass]] = {}
        super().__init__(*args, **options)

    def _gather(self, unit: Unit) -> None:
        labels.mark("gather", unit.name)
        self.carry_out(self.schedule.needed(unit), unit)

    def _release(self, unit: Unit) -> None:
        if self._uses(unit):
            return
        before = _whole(unit)
        self.carry_out(self.schedule.done(unit), unit)
        if _whole(unit) < before:
            labels.mark("release", unit.name)

    def _uses(self, unit: Unit) -> bool:
        """Whether a forward or a backward of the unit is under way."""
        return any(p.unit is unit for p in (*self._forwards, *self._active))

    def _before_backward(self, this: Pass, _: Tensor) -> None:
        refuse_create_graph(this.unit.name)
        self._active.add(this)
        self._gather(this.unit)

    def _after_backward(self, this: Pass) -> None:
        unit = this.unit
        pending = self._pending.get(unit, WeakSet())
        pending.discard(this)
        self._active.discard(this)
        self._release(unit)
        due = self._in_backward and unit not in self._reduced
        if due and not pending:
            self._reduce(unit)

    def _arrived(self, unit: Unit) -> None:
        """Do not count: `_after_backward` says when a unit is complete.

        Ranks that use different parameters of one unit count differently, but
        they all leave the unit at the same place among the gathers.
        """

    def _end_backward(self) -> None:
        self._release_all()
        super()._end_backward()
        self._pending.clear()

    def _release_all(self) -> None:
        self._active.clear()
        for unit in self.units:
            self._release(unit)


def _whole(unit: Unit) -> int:
    return sum(isinstance(f, ShardedFlat) and f.whole for f in unit.flats)


class ZeRO3(Regather):
    """Plan 3: parameters are sharded too (Rajbhandari et al. 2020, sec. 5.3).

    A unit is gathered before its forward and before its backward, and freed
    after each. The optimizer updates the shard; nothing is sent afterwards.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for unit in self.units:
            before = partial(self._before_forward, unit)
            unit.module.register_forward_pre_hook(
                before, prepend=True, with_kwargs=True
            )
            unit.module.register_forward_hook(
                self._after_forward, always_call=True
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if not self._in_backward:
            self._forwards.clear()  # of a forward that was interrupted
        return super().__call__(*args, **kwargs)

    def _before_forward(
        self, unit: Unit, _: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        outermost = not self._forwards and not self._in_backward
        if unit.module is self.model and outermost:
            self._release_all()  # what a backward that failed has left
            self.schedule.forward_begins()
        this = Pass(unit)
        self._forwards.append(this)
        self._gather(unit)
        if not torch.is_grad_enabled():
            return args, kwargs
        self._pending.setdefault(unit, WeakSet()).add(this)
        done = partial(self._after_backward, this)
        return mark_inputs(done, args, kwargs)

    def _after_forward(self, module: nn.Module, args: Any, out: Any) -> None:
        """Also called, with None as `out`, when the forward has failed."""
        this = self._forwards.pop()
        if isinstance(out, Iterator):
            raise TypeError(
                f"unit {this.unit.name!r} returns a {type(out).__name__}, "
                "which would run when the unit's parameters have been freed; "
                "return a list of what it yields"
            )
        if torch.is_grad_enabled():
            hook_outputs(partial(self._before_backward, this), out)
        self._release(this.unit)

    @contextmanager
    def gathered(self, units: list[Unit]) -> Iterator[None]:
        """As `DataParallel.gathered`; what is in use is whole already."""
        with super().gathered([u for u in units if not self._uses(u)]):
            yield
