"""What rests off the device, in simulated time: its copies, and the update there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..memory.plan import Plan
from .machine import Buffer, Layer
from .simulated_rank import Rank


class SimulatedHome:
    """Copies a rank's shards between device, host and disk, as the homes do.

    Where a machine's bus and disk take no time, neither do they.
    """

    def __init__(self, rank: Rank, plan: Plan) -> None:
        self.rank, self.plan = rank, plan
        self._arrives: dict[Layer, float] = {}  # gradients on the host, then parameters

    def _own(self, flat: Buffer, itemsize: int) -> float:
        return flat.padded * itemsize / self.rank.machine.ranks

    def load(self, unit: Layer, flat: Buffer) -> float:
        """When the own shard is on the device, for its all-gather."""
        now, on = self.rank.now, self.plan.parameters.on
        nbytes = self._own(flat, flat.itemsize)
        if on == "nvme":
            now = self.rank.copy("read", unit.name, nbytes, now)
        return now if on == "device" else self.rank.copy("up", unit.name, nbytes, now)

    def add(self, unit: Layer) -> None:
        """The mean of the own shard goes to where gradients rest."""
        if self.plan.gradients.on != "device":
            self._down(unit)

    def _down(self, unit: Layer) -> None:
        nbytes = sum(self._own(flat, flat.gradient) for flat in unit.trainable)
        self._arrives[unit] = self.rank.copy("down", unit.name, nbytes, self.rank.now)

    def arrives(self, unit: Layer) -> float:
        """When the updated shard is where parameters rest."""
        return self._arrives.get(unit, 0.0)

    def update(self, layers: Sequence[Layer], owned: float) -> Iterator[Layer]:
        """Unit by unit, where the states rest; `owned` is the share of this rank.

        Off the device each unit is handed on when it is updated; else all at the end.
        """
        rank, on = self.rank, self.plan.optimizer.on
        if on != "device" and self.plan.gradients.on == "device":
            for unit in layers:
                self._down(unit)
        ready = [rank.now] * len(layers)
        for i, unit in enumerate(layers):
            if on == "nvme":  # this one and the next are read while others are updated
                for j in range(i and i + 1, min(i + 2, len(layers))):
                    nbytes = self._states(layers[j])
                    ready[j] = rank.copy("read", layers[j].name, nbytes, rank.now)
            rank.spend("wait", unit.name, max(ready[i], self.arrives(unit)))
            rank.compute("update", unit.name, unit.update * owned)
            if on == "nvme":
                rank.copy("write", unit.name, self._states(unit), rank.now)
            if on != "device" and self.plan.parameters.on == "device":
                nbytes = sum(self._own(f, f.itemsize) for f in unit.trainable)
                self._arrives[unit] = rank.copy("up", unit.name, nbytes, rank.now)
            if on != "device":
                yield unit
        if on == "device":
            yield from layers

    def _states(self, unit: Layer) -> float:
        return sum(self._own(flat, flat.states) for flat in unit.trainable)
