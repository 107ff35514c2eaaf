"""State in host memory, and an update that works where the states are."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from minizero.memory import labels
from minizero.memory.plan import Plan
from minizero.offload.copy_streams import (
    ArrivingGradients,
    CopyEvent,
    CopyStream,
    DoubleBuffer,
)
from minizero.offload.lending import Lending
from minizero.zero.flat_buffer import Unit
from minizero.zero.interfaces import Near, NearShard
from minizero.zero.owned import Owned


class HostStorage(Lending):
    """Shards in host memory: parameters go up, gradients come down.

    `down`, `up`: the copies to the host and to the device, which count the
    bytes that crossed the bus.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.down, self.up = CopyStream(), CopyStream()
        streams = (self.down, self.up)
        # to where the optimizer works, and from there
        self._inward, self._outward = (
            streams if self.at == "cpu" else streams[::-1]
        )
        self.arriving = ArrivingGradients(self.down)

    def load(self, shard: Tensor, into: Tensor) -> Tensor:
        if self.plan.parameters.on == "device":
            return shard
        self.up.copy(into, shard)
        return into

    @contextmanager
    def on_copy_stream(self) -> Iterator[Callable[[], None]]:
        stream = self.up.stream
        if stream is None or self.plan.parameters.on == "device":
            yield lambda: None
            return
        events: list[CopyEvent] = []
        # an updated shard may still be on its way out
        self.up.follow(self._outward)
        with torch.cuda.stream(stream):
            yield lambda: events[0].wait("device")
        events.append(self.up.event())

    def add(self, shard: Tensor, mean: Tensor) -> None:
        if self.plan.gradients.on == "device":
            shard.add_(mean)
        else:
            self.arriving.add(shard, mean)

    def finish_adds(self) -> None:
        self.arriving.finish()


class Offload(HostStorage):
    """Keeps in host memory what the plan places on "cpu".

    The optimizer works where its states rest, so they never cross the bus:
    gradients do, one way, and parameters, the other (Ren et al. 2021,
    sec. 3). Units take turns in two blocks of memory: while unit i is
    updated, i + 1 comes in and i - 1 goes out.
    """

    places: tuple[str, ...] = ("device", "cpu")
    _blocks: DoubleBuffer | None = None

    def staged(
        self,
        units: list[tuple[Unit, list[Owned]]],
        optimizer: torch.optim.Optimizer,
    ) -> Generator[Near, None, None]:
        """Bring unit by unit: in(i+1), step(i), out(i-1)."""
        if self._blocks is None:
            device = units[0][0].flats[0].full.device
            largest = max(self.crossing(owned) for _, owned in units)
            self._blocks = DoubleBuffer(largest, self.at, device)
        coming = [self._bring(self._blocks, *unit) for unit in units[:1]]
        for i, (unit, every) in enumerate(units):
            shards, arrived = coming.pop()
            for following in units[i + 1 : i + 2]:
                coming.append(self._bring(self._blocks, *following))
            arrived.wait(self.at)
            labels.mark("update", unit.name)
            yield Near(shards, partial(self._send, unit, every, shards))
        self._outward.event().wait("device")

    def _bring(
        self, blocks: DoubleBuffer, unit: Unit, every: list[Owned]
    ) -> tuple[list[NearShard], CopyEvent]:
        """Launch in(i): what the update needs and rests elsewhere."""
        labels.mark("in", unit.name)
        blocks.turn()
        # out(i-2) has to leave the block first
        self._inward.follow(self._outward)
        shards = []
        for owned in every:
            values, grad = owned.shard, owned.grad
            if self.moves_parameters:
                values = blocks.take(owned.shard)
                if self.lends(owned.flat):
                    self._inward.copy(values, owned.shard)
                    owned.given.data = values
            if self.moves_gradients:
                grad = blocks.take(owned.grad)
                self._inward.copy(grad, owned.grad)
            shards.append(NearShard(owned.flat, owned.given, grad, values))
        return shards, self._inward.event()

    def _send(
        self, unit: Unit, every: list[Owned], shards: list[NearShard]
    ) -> list[Unit]:
        """Launch out(i): updated shards, to where parameters rest."""
        labels.mark("out", unit.name)
        self._outward.follow()
        for owned, near in zip(every, shards, strict=True):
            if self.moves_parameters:
                self._outward.copy(owned.shard, near.values)
            if self.lends(owned.flat):
                owned.given.data = owned.given.data[:0]
        if self.at == "cpu":
            # the publication reads the shards
            self._outward.event().wait("device")
        return [unit]
