"""State in host memory, and an update on the processor that keeps the states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..memory import labels
from ..memory.labels import aligned, host_empty
from ..memory.plan import Plan
from ..ranks.launch import device
from ..zero.flat import Flat, Unit
from ..zero.seams import Precision, Storage


class CopyEvent:
    """The moment when all copies launched on a stream so far are done."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.event = stream.record_event() if stream else None

    def wait(self, on: str = "cpu") -> None:
        """Make the host ("cpu") or the computation ("device") wait for it."""
        if self.event is None:
            return
        if on == "cpu":
            self.event.synchronize()
        else:
            torch.cuda.current_stream().wait_event(self.event)

    def is_over(self) -> bool:
        """Whether that moment has passed."""
        return self.event is None or self.event.query()


class CopyStream:
    """Copies in one direction between device and host, beside the computation.

    Without CUDA a copy is done when `copy` returns. `nbytes` is the sum of
    all copies. The stream keeps no tensor alive: before you overwrite or free
    either end of a copy, wait for its `event`.
    """

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        self.stream = torch.cuda.Stream() if cuda else None
        self.nbytes = 0

    def follow(self, *others: CopyStream) -> None:
        """Start later copies only after what the computation and `others` have queued."""
        if self.stream is None:
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        for other in others:
            if other.stream is not None:
                self.stream.wait_stream(other.stream)

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Launch `out.copy_(source)`; host memory must be page-locked."""
        self.nbytes += source.nbytes
        with torch.cuda.stream(self.stream):
            out.copy_(source, non_blocking=True)

    def event(self) -> CopyEvent:
        """The moment when the copies launched so far are done."""
        return CopyEvent(self.stream)


def empty(
    shape: Sequence[int], dtype: torch.dtype, on: str, category: str = "buffers"
) -> Tensor:
    """Uninitialized memory of this rank's device ("device") or of the host ("cpu")."""
    if on == "cpu":
        return host_empty(shape, dtype, category)
    made = torch.empty(tuple(shape), dtype=dtype, device=device())
    return labels.label(made, category, on="device")


def placeholder(like: Tensor, on: str) -> Tensor:
    """A tensor of the same shape that takes no memory and reads as NaN.

    It stands for a tensor that is stored elsewhere; during an update its
    `.data` is a copy of that tensor where the optimizer works.
    """
    value = torch.nan if like.is_floating_point() else 0
    where = device() if on == "device" else torch.device("cpu")
    with labels.host_memory() if on == "cpu" else nullcontext():
        nan = torch.full((), value, dtype=like.dtype, device=where)
    # `.data`: the view's base would stay alive when its `.data` is exchanged
    return labels.label(nan, "buffers", on).expand(like.shape).data


class DoubleBuffer:
    """Two blocks of memory that are used in turn; `take` cuts tensors from them.

    A tensor cut from a block is overwritten two turns later. `nbytes`: what
    one turn may cut, `aligned` sizes added up. `on`: "device" or "cpu".
    """

    def __init__(self, on: str) -> None:
        self.on, self.nbytes, self._used = on, 0, 0
        self.blocks: list[Tensor] = []

    def reserve(self, nbytes: int) -> None:
        """Let a turn cut at least `nbytes`; nothing may use the blocks now."""
        if nbytes > self.nbytes:
            self.blocks.clear()  # first: old and new blocks never coexist
            self.nbytes = nbytes
            self.blocks = [empty((nbytes,), torch.uint8, self.on) for _ in range(2)]

    def turn(self) -> None:
        """Cut from the other block now, from its start."""
        self.blocks.reverse()
        self._used = 0

    def take(self, like: Tensor) -> Tensor:
        """An uninitialized tensor with the shape and dtype of `like`."""
        start, self._used = self._used, self._used + aligned(like.nbytes)
        part = self.blocks[0][start : start + like.nbytes]
        return part.view(like.dtype).view(like.shape)


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
        self._inward, self._outward = streams if self.at == "cpu" else streams[::-1]
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
            return copy if self.at == "device" else self.store(copy, "optimizer")
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
        """Copy the mean to the host now; add it to the shard two calls later."""
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
            mean = mean.clone()  # small: the buffer it is a part of is freed now
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
        self,
        units: list[Unit],
        optimizer: torch.optim.Optimizer,
        precision: Precision,
    ) -> Iterator[list[Unit]]:
        """Copy in unit i + 1, update unit i, copy out unit i - 1: all at once."""
        units = [unit for unit in units if unit.trainable]
        self._staging.reserve(max(map(self._crossing, units), default=0))
        staged = [self._stage(unit) for unit in units[:1]]
        for i, unit in enumerate(units):
            staged += [self._stage(following) for following in units[i + 1 : i + 2]]
            staged.pop(0).wait(self.at)
            labels.mark("update", unit.name)
            self.step(unit.trainable, optimizer, precision)
            self._unstage(unit)
            yield [unit]
        self._outward.event().wait("device")

    def _crossing(self, unit: Unit) -> int:
        """Bytes of a block that the unit's update needs."""
        return sum(
            aligned(flat.shard.nbytes) * self.moves_parameters
            + aligned(flat.mean.nbytes) * self.moves_gradients
            for flat in unit.trainable
        )

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
        """Launch the copies of the updated shards to where they are stored."""
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

    def read_shard(self, shard: Tensor, a: int = 0, b: int | None = None) -> Tensor:
        for stream in (self.down, self.up):
            stream.event().wait("cpu")  # the host reads what they copy
        return super().read_shard(self._stored.get(shard, shard), a, b)

    def write_shard(self, shard: Tensor, values: Tensor, a: int = 0) -> None:
        super().write_shard(self._stored.get(shard, shard), values, a)
