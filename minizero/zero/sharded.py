"""Flat buffers whose parameters have memory only while they are used."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import comm
from ..comm import Work
from ..memory.labels import label
from ..memory.plan import Plan
from .flat import Flat
from .guards import copy_unsharded, reduce_unsharded
from .seams import Storage


class ShardedFlat(Flat):
    """A flat buffer whose storage is empty, except from `gather` to `free`.

    While it is empty, the parameters are views of one NaN that is expanded
    to their shapes: shapes stay right, and values read as NaN.

    `stored`: what this rank stores of it between steps; `shard`, a part of
        that, is what it updates: here, all of it.
    `is_unsharded`: whether `full` has its storage.
    `used`: whether the unit needs it. `holders`: how many others do.
    """

    storage = Storage(Plan.stage(3))
    is_unsharded, used, holders = True, False, 0
    _arriving: Work | None = None

    def fill(self) -> None:
        """Take the parameters over, out of `zero.Init`'s buffers if need be.

        One of those at a time is unsharded.
        """
        before: ShardedFlat | None = None
        for slot, view in zip(self.slots, self.views(), strict=True):
            p: Any = slot.parameter
            source = getattr(p, "sharded_in", None)
            if source is not before:
                if before is not None:
                    before.free()
                if source is not None:
                    source.unshard()
                before = source
            with torch._C.DisableTorchFunction():  # `zero.Init` would gather
                view.copy_(p.detach())
            p.sharded_in = self
            p.__deepcopy__ = partial(copy_unsharded, p)
            p.__reduce_ex__ = partial(reduce_unsharded, p)
        if before is not None:
            before.free()
        self.cut()
        self.point(self.whole)

    def cut(self) -> None:
        """Cut the views that parameters are: an empty storage gives none."""
        self.whole = self.views()
        is_float = self.full.is_floating_point() or self.full.is_complex()
        nan = self.full.new_full((), torch.nan if is_float else 0)
        self.freed = [nan.expand(slot.shape) for slot in self.slots]

    def point(self, tensors: list[Tensor]) -> None:
        with torch._C.DisableTorchFunction():
            for slot, tensor in zip(self.slots, tensors, strict=True):
                p: Any = slot.parameter
                if p.sharded_in is self:
                    p.data = tensor
        self._noted = self._state()

    def cast(self, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        super().cast(dtype, grad_dtype)
        self.cut()
        self.point(self.whole)

    def keep(self, storage: Storage) -> None:
        """Store what this rank keeps, and free the rest."""
        self.storage, kept = storage, self.kept(self.full)
        self.shard = self.stored = storage.store(kept, "parameters")
        self.free()

    def gather(self) -> Work | None:
        """Launch the all-gather of the shards into `full`.

        None if that has arrived already.
        """
        if self.is_unsharded:
            return self._arriving
        self._check_unwritten()
        self.full.untyped_storage().resize_(self.full.nbytes)
        self.is_unsharded = True
        with self.storage.on_copy_stream() as arrive:
            own = self.storage.load(self.stored, self.kept(self.full))
            work = self.launch_gather(own)
        self._arriving = work
        return work.then(arrive).then(self._arrived)

    def launch_gather(self, own: Tensor) -> Work:
        """Launch the all-gather of what each rank stores."""
        return comm.all_gather(
            self.full, own, async_op=True, group=self.ranks
        )

    def kept(self, buffer: Tensor) -> Tensor:
        """The part of a buffer that this rank stores: its shard."""
        return self.own(buffer)

    def _arrived(self) -> None:
        self._arriving = None
        self.point(self.whole)

    def unshard(self) -> None:
        """Gather, and wait for it."""
        work = self.gather()
        if work is not None:
            work.wait()

    def free(self, seen: bool = False) -> None:
        """Empty the storage, unless somebody still needs it.

        `seen`: a script may have kept views of it; they keep that storage.
        """
        if self._arriving is not None:
            self._arriving.wait()  # it must not write into freed memory
        if not self.is_unsharded or self.used or self.holders:
            return
        if seen:
            dtype, where = self.full.dtype, self.full.device
            self.point(self.freed)
            self.whole, self.full = [], self.full[:0].clone()  # frees it
            full = torch.empty(self.padded, dtype=dtype, device=where)
            self.full = label(full, "parameters")
            self.cut()
        self.point(self.freed)
        # not `p.data = empty`: the graph's views would keep the storage
        self.full.untyped_storage().resize_(0)
        self.is_unsharded = False

    def make_exact(self) -> None:
        """Bring what a quantized all-gather has rounded: here, nothing."""

    def take_over(self, modifier_rank: int) -> None:
        """Keep what that rank has written to the parameters, everywhere."""
        with torch._C.DisableTorchFunction():
            for slot, view in zip(self.slots, self.whole, strict=True):
                p: Any = slot.parameter
                if p.sharded_in is self and p.data_ptr() != view.data_ptr():
                    view.copy_(p.data)  # after `p.data = values`
        comm.broadcast(self.full, modifier_rank, group=self.ranks)
        self.storage.write_shard(self.stored, self.kept(self.full))

    def changed(self) -> None:
        super().changed()
        self._noted = self._state()

    def _state(self) -> list[tuple[int, int]]:
        """Of each parameter, what tells that somebody has written to it."""
        every = [slot.parameter for slot in self.slots]
        with torch._C.DisableTorchFunction():
            return [
                (0 if p.is_inference() else p._version, p.data_ptr())
                for p in every
            ]

    def _check_unwritten(self) -> None:
        """Raise RuntimeError for what was written to freed parameters."""
        now = self._state()
        for slot, a, b in zip(self.slots, self._noted, now, strict=True):
            if a != b and slot.parameter.sharded_in is self:  # type: ignore[attr-defined]
                self.point(self.freed)
                raise RuntimeError(
                    f"parameter {slot.name!r} was written to while it was "
                    "sharded, and what was written is lost; write to it "
                    "inside zero.GatheredParameters(..., modifier_rank=0)"
                )
