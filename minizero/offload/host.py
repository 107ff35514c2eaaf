"""State in host memory, and an update by the processor that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..memory import labels
from ..memory.labels import aligned
from ..memory.plan import Plan
from ..zero.flat import Flat, Unit
from ..zero.seams import Precision, Storage
from .bus import CopyEvent, CopyStream, DoubleBuffer, placeholder


class Offload(Storage):
    """Keeps in host memory what the plan places on "cpu".

    The optimizer works where its states are stored, so they never cross the
    bus: gradients do, one way, and updated parameters, the other (Ren et al.
    2021, sec. 3). `at`: "device" or "cpu", where the optimizer works. `down`,
    `up`: copies to the host and to the device; they count the bytes.
    """

    places: tuple[str, ...] = ("device", "cpu")

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.at = "device" if plan.optimizer.on == "device" else "cpu"
        self.moves_parameters = plan.parameters.on != self.at
        self.moves_gradients = plan.gradients.on != self.at
        self.down, self.up = CopyStream(), CopyStream()
        # to where the optimizer works, and from there
        streams = (self.down, self.up)
        streams = streams if self.at == "cpu" else streams[::-1]
        self._inward, self._outward = streams
        # two blocks each: for the update, and for gradients that arrive
        self._staging = DoubleBuffer(self.at)
        self._landing = DoubleBuffer("cpu")
        # (shard, copy of its mean gradient, source, event of the copy)
        self._arriving: list[tuple[Tensor, Tensor, Tensor, CopyEvent]] = []
        # of a placeholder, the tensor that it stands for
        self._stored: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def master(self, flat: Flat, copy: Tensor | None) -> Tensor:
        """The precision's copy, where the optimizer works; or the shard.

        A shard that is stored elsewhere is represented by a placeholder.
        """
        if copy is not None:
            is_there = self.at == "device"
            return copy if is_there else self.store(copy, "optimizer")
        if not self.moves_parameters:
            return flat.shard
        master = placeholder(flat.shard, self.at)
        self._stored[master] = flat.shard
        return master

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
        # an updated shard may still be on its way to the host
        self.up.follow(self._outward)
        events: list[CopyEvent] = []
        with torch.cuda.stream(stream):
            yield lambda: events[0].wait("device")
        events.append(self.up.event())

    # ---- continued: gradients arrive during backward

    def accumulate(self, shard: Tensor, mean: Tensor) -> None:
        """Copy the mean to the host now; the host adds it two calls later."""
        if self.plan.gradients.on == "device":
            shard.add_(mean)
            return
        nbytes = aligned(mean.nbytes)
        if self._landing.nbytes < nbytes:
            self.wait_for_copies()
            self._landing.reserve(nbytes)
        if len(self._arriving) == 2:
            self._add_oldest()
        self._landing.turn()
        copied = self._landing.take(mean)
        if self.down.stream is not None:
            mean = mean.clone()  # its buffer is freed as soon as we return
        self.down.follow()
        self.down.copy(copied, mean)
        self._arriving.append((shard, copied, mean, self.down.event()))

    def wait_for_copies(self) -> None:
        while self._arriving:
            self._add_oldest()

    def _add_oldest(self) -> None:
        shard, copied, _, event = self._arriving.pop(0)
        event.wait("cpu")
        shard.add_(copied)

    # ---- continued: the update, unit by unit

    def update(
        self, units: list[Unit], optimizer: Optimizer, precision: Precision
    ) -> Iterator[list[Unit]]:
        """At once: copy in unit i + 1, update unit i, copy out unit i - 1."""
        units = [unit for unit in units if unit.trainable]
        crossing = [
            sum(
                aligned(flat.shard.nbytes) * self.moves_parameters
                + aligned(flat.mean.nbytes) * self.moves_gradients
                for flat in unit.trainable
            )
            for unit in units
        ]
        self._staging.reserve(max(crossing, default=0))
        staged = [self._stage(unit) for unit in units[:1]]
        for i, unit in enumerate(units):
            staged += [self._stage(later) for later in units[i + 1 : i + 2]]
            staged.pop(0).wait(self.at)
            labels.mark("update", unit.name)
            self.step(unit.trainable, optimizer, precision)
            self._unstage(unit)
            yield [unit]
        self._outward.event().wait("device")

    def _stage(self, unit: Unit) -> CopyEvent:
        """Launch the copies of what the unit's update needs."""
        labels.mark("in", unit.name)
        self._staging.turn()
        # the unit that had this block must have been copied out of it
        self._inward.follow(self._outward)
        for flat in unit.trainable:
            flat.staged_shard, flat.staged_grad = flat.shard, flat.mean
            if self.moves_parameters:
                flat.staged_shard = self._staging.take(flat.shard)
                if flat.master in self._stored:
                    self._inward.copy(flat.staged_shard, flat.shard)
                    flat.master.data = flat.staged_shard
            if self.moves_gradients:
                flat.staged_grad = self._staging.take(flat.mean)
                self._inward.copy(flat.staged_grad, flat.mean)
        return self._inward.event()

    def _unstage(self, unit: Unit) -> None:
        """Launch copies of the updated shards to where they are stored."""
        labels.mark("out", unit.name)
        self._outward.follow()
        for flat in unit.trainable:
            if self.moves_parameters:
                self._outward.copy(flat.shard, flat.staged_shard)
            if flat.master in self._stored:
                flat.master.data = placeholder(flat.master, self.at)
            del flat.staged_shard
        if self.at == "cpu":
            # the publication reads the shards
            self._outward.event().wait("device")

    # ---- continued: reading and writing from outside

    def refresh(self, flat: Flat, precision: Precision) -> None:
        if self._stored.get(flat.master) is not flat.shard:
            master = self.read_shard(flat.master)
            precision.shard_to_master(master, self.read_shard(flat.shard))
            self.write_shard(flat.master, master)

    def read_shard(
        self, shard: Tensor, a: int = 0, b: int | None = None
    ) -> Tensor:
        for stream in (self.down, self.up):
            stream.event().wait("cpu")  # the host reads what they copy
        return super().read_shard(self._stored.get(shard, shard), a, b)

    def write_shard(self, shard: Tensor, values: Tensor, a: int = 0) -> None:
        super().write_shard(self._stored.get(shard, shard), values, a)
