"""The bus between device and host: copies, memory for them, and placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..memory import labels
from ..memory.labels import aligned, host_empty
from ..memory.plan import Plan
from ..ranks import device
from ..zero.flat import Flat
from ..zero.seams import Precision, Storage


class CopyStream:
    """Copies in one direction between device and host, beside the computation.

    `nbytes` is the sum of all copies. The stream keeps no tensor alive: before you
    overwrite or free either end of a copy, wait for its `event`. Without CUDA a copy is
    done when `copy` returns; the CPU's streams and events are torch's, and never wait.
    """

    def __init__(self) -> None:
        self.torch: Any = torch.cuda if torch.cuda.is_available() else torch.cpu
        self.stream = self.torch.Stream()
        self.nbytes = 0

    def follow(self, other: CopyStream | None = None) -> None:
        """Start later copies after what the computation and `other` have queued."""
        self.stream.wait_stream(self.torch.current_stream())
        if other is not None:
            self.stream.wait_stream(other.stream)

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Launch `out.copy_(source)`; host memory must be page-locked."""
        self.nbytes += source.nbytes
        with self.torch.stream(self.stream):
            out.copy_(source, non_blocking=True)

    def event(self) -> Any:
        """torch's event of the moment when the copies launched so far are done.

        Its `wait` lets the computation wait for it, its `synchronize` the host.
        """
        event = self.torch.Event()
        event.record(self.stream)
        return event


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

    (Integers read as 0.) It stands for a tensor that is stored elsewhere; during an
    update its `.data` is a copy of that tensor where the optimizer works.
    """
    value = torch.nan if like.is_floating_point() else 0
    where = device() if on == "device" else torch.device("cpu")
    with labels.host_memory() if on == "cpu" else nullcontext():
        nan = torch.full((), value, dtype=like.dtype, device=where)
    # `.data`: the view's base would stay alive when its `.data` is exchanged
    return labels.label(nan, "buffers", on).expand(like.shape).data


class DoubleBuffer:
    """Two blocks of memory that are used in turn; `take` cuts tensors from one of them.

    Call `turn` before each unit; what was cut for it is overwritten two turns later.
    `nbytes`: what one turn may cut, `aligned` sizes added up. `on`: "device" or "cpu".
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


class HostStorage(Storage):
    """The base of `Offload`: which tensor a placeholder stands for, where updates run.

    `down`: the stream of copies from device to host; `up`: from host to device.
    `_inward`: the one that copies to the optimizer; `_outward`: the other.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.down, self.up = CopyStream(), CopyStream()
        self._inward, self._outward = self.down, self.up
        if self.at == "device":
            self._inward, self._outward = self.up, self.down
        self._stored: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of placeholders

    @property
    def at(self) -> str:
        """Where the optimizer works: "device" or "cpu"."""
        return "device" if self.plan.optimizer.on == "device" else "cpu"

    def has_master_copy(self, flat: Flat) -> bool:
        """Whether the optimizer updates a copy of the shard, in place of the shard."""
        return self._stored.get(flat.master, flat.master) is not flat.shard

    def master(self, flat: Flat, copy: Tensor | None) -> Tensor:
        """The precision's copy, where the optimizer works; or the shard."""
        if copy is not None:
            return copy if self.at == "device" else self.store(copy, "optimizer")
        if self.plan.parameters.on == self.at:
            return flat.shard
        master = placeholder(flat.shard, self.at)
        self._stored[master] = flat.shard
        return master

    def refresh(self, flat: Flat, precision: Precision) -> None:
        if self.has_master_copy(flat):
            master = self.read_shard(flat.master)
            precision.shard_to_master(master, self.read_shard(flat.shard))
            self.write_shard(flat.master, master)

    def read_shard(self, shard: Tensor, a: int = 0, b: int | None = None) -> Tensor:
        for stream in (self.down, self.up):
            stream.event().synchronize()  # the host reads what they copy
        return super().read_shard(self._stored.get(shard, shard), a, b)

    def write_shard(self, shard: Tensor, values: Tensor, a: int = 0) -> None:
        super().write_shard(self._stored.get(shard, shard), values, a)
