"""State in host memory, and an update that works where the states are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from . import tracker
from .bus import Lane, Mark, Turns, aligned
from .ddp import Verbs
from .flat import Flat, Unit
from .memory import Plan
from .seams import Home, host_empty


def place(tensor: Tensor) -> str:
    """Where a tensor is, as a placement says it: "device" or "cpu"."""
    return "cpu" if tracker.on_host(tensor) else "device"


@dataclass
class Near:
    """What the update of one flat buffer uses, all in one place.

    `owned`: the owned rows, where they rest. `rows`, `grads`: the same and
    their gradients, where the optimizer works: copies of what rests
    elsewhere. `lent`: what stands for such rows in the optimizer.
    """

    owned: list[Tensor]
    rows: list[Tensor]
    grads: list[Tensor]
    lent: list[Tensor]


class Offload(Home):
    """Keeps in host memory what the plan places on "cpu".

    The optimizer works where its states rest, so they never cross the bus:
    gradients do, one way, and parameters, the other (Ren et al. 2021,
    sec. 3). Units take turns in two blocks of memory: while unit i is
    updated, i + 1 comes in and i - 1 goes out.

    `down`, `up`: the lanes to the host and to the device, which count the
    bytes that went through them.
    """

    places: tuple[str, ...] = ("device", "cpu")

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.at = plan.optimizer.on
        self.down, self.up = Lane(), Lane()
        lanes = (self.down, self.up)
        self._inward, self._outward = (
            lanes if self.at == "cpu" else lanes[::-1]
        )
        self._lent: dict[Flat, list[Tensor]] = {}
        self._near: dict[Flat, Near] = {}
        self._blocks: Turns | None = None
        self._landing = Landing(self.down)

    def lift(self, shard: Tensor, row: Tensor) -> Tensor:
        if place(shard) == "device":
            return shard
        self.up.copy(row, shard)
        return row

    @contextmanager
    def aside(self) -> Iterator[Callable[[], None]]:
        stream = self.up.stream
        if stream is None or self.plan.parameters.on == "device":
            yield lambda: None
            return
        marks: list[Mark] = []
        self.up.follow()
        with torch.cuda.stream(stream):
            yield lambda: marks[0].wait("device")
        marks.append(self.up.mark())

    def add(self, shard: Tensor, mean: Tensor) -> None:
        if place(shard) == "device":
            shard.add_(mean)
        else:
            self._landing.add(shard, mean)

    def settle(self) -> None:
        self._landing.settle()

    def masters(
        self, flat: Flat, rows: list[Tensor], masters: list[Tensor]
    ) -> list[Tensor]:
        self._landing.reserve(rows[0].nbytes)
        if place(masters[0]) == self.at:
            return masters
        device = flat.full.device
        if masters[0] is not rows[0]:
            return [self._move(master, device) for master in masters]
        self._lent[flat] = [self._stand_in(row, device) for row in rows]
        return self._lent[flat]

    def _move(self, master: Tensor, device: torch.device) -> Tensor:
        """A copy where the states rest."""
        if self.at == "cpu":
            return self.rest(master, "optimizer")
        moved = torch.empty_like(master, device=device).copy_(master)
        return tracker.label(moved, "optimizer", on="device")

    def _stand_in(self, row: Tensor, device: torch.device) -> Tensor:
        """Given to the optimizer for a row that rests elsewhere.

        It points at a copy while its unit is updated, and else at nothing.
        """
        if self.at == "cpu":
            return host_empty((0,), row.dtype, "buffers")
        return torch.empty(0, dtype=row.dtype, device=device)

    def grads(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        return self._near[flat].grads

    def rows(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        return self._near[flat].rows

    def update(self, net: Verbs) -> None:
        """Update unit by unit: in(i+1), step(i), out(i-1)."""
        units = [unit for unit in net.units if unit.trainable]
        if self._blocks is None:
            self._blocks = self._make_blocks(net, units)
        coming = [self._bring(net, unit) for unit in units[:1]]
        for i, unit in enumerate(units):
            here = coming.pop()
            coming += [self._bring(net, u) for u in units[i + 1 : i + 2]]
            here.wait(self.at)
            tracker.mark("update", unit.name)
            net.update([unit])
            self._send(unit)
            net.publish(unit)
        self._outward.mark().wait("device")
        tracker.label_states(net.optimizer)

    def _make_blocks(self, net: Verbs, units: list[Unit]) -> Turns:
        """Room for what crosses for the largest unit, twice."""

        def crossing(unit: Unit) -> int:
            tensors = (
                t
                for flat in unit.trainable
                for t in (*net.owned(flat), *net.owned_grads(flat))
            )
            return sum(aligned(t.nbytes) for t in tensors if self._far(t))

        device = units[0].flats[0].full.device
        return Turns(max(map(crossing, units)), self.at, device)

    def _far(self, tensor: Tensor) -> bool:
        return place(tensor) != self.at

    def _here(self, tensor: Tensor) -> Tensor:
        assert self._blocks is not None
        return self._blocks.take(tensor) if self._far(tensor) else tensor

    def _bring(self, net: Verbs, unit: Unit) -> Mark:
        """Launch in(i): what the update needs and rests elsewhere."""
        tracker.mark("in", unit.name)
        assert self._blocks is not None
        self._blocks.turn()
        # out(i-2) has to leave the block first
        self._inward.follow(self._outward)
        for flat in unit.trainable:
            owned, grads = net.owned(flat), net.owned_grads(flat)
            near = self._near[flat] = Near(
                owned,
                [self._here(row) for row in owned],
                [self._here(grad) for grad in grads],
                self._lent.get(flat, []),
            )
            for stand_in, row, here in zip(
                near.lent, owned, near.rows, strict=bool(near.lent)
            ):
                self._inward.copy(here, row)
                stand_in.data = here
            for grad, here in zip(grads, near.grads, strict=True):
                if here is not grad:
                    self._inward.copy(here, grad)
        return self._inward.mark()

    def _send(self, unit: Unit) -> None:
        """Launch out(i): updated rows, to where parameters rest."""
        tracker.mark("out", unit.name)
        self._outward.follow()
        for flat in unit.trainable:
            near = self._near.pop(flat)
            for row, here in zip(near.owned, near.rows, strict=True):
                if here is not row:
                    self._outward.copy(row, here)
            for stand_in in near.lent:
                stand_in.data = stand_in.data[:0]
        if self.at == "cpu":
            # `publish` reads the rows
            self._outward.mark().wait("device")


class Landing:
    """Mean gradients on their way to shards in host memory.

    A copy is launched at once; the host adds it two calls later, or when
    `settle` is called.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._largest = 0
        self._blocks: Turns | None = None
        self._landed: list[tuple[Tensor, Tensor, Mark]] = []

    def reserve(self, nbytes: int) -> None:
        """Be ready for rows of so many bytes; before the first `add`."""
        self._largest = max(self._largest, aligned(nbytes))

    def add(self, shard: Tensor, mean: Tensor) -> None:
        """Add `mean`, on the device, to `shard`, in host memory."""
        if self._blocks is None:
            self._blocks = Turns(self._largest, "cpu", mean.device)
        if len(self._landed) == 2:
            self._add_first()
        self._blocks.turn()
        landed = self._blocks.take(mean)
        self.lane.follow()
        self.lane.copy(landed, mean)
        self._landed.append((shard, landed, self.lane.mark()))

    def _add_first(self) -> None:
        shard, landed, mark = self._landed.pop(0)
        mark.wait("cpu")
        shard.add_(landed)

    def settle(self) -> None:
        """Add what has been launched."""
        while self._landed:
            self._add_first()
