"""State in files: a home whose host memory is bounded by a pool."""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from minizero import tracker
from minizero.ddp import Verbs
from minizero.files import AsyncFiles
from minizero.flat import Flat, Unit
from minizero.memory import Bytes, Plan
from minizero.offload import Offload
from minizero.optim import state_layout
from minizero.records import Reading, RunFolder, ShardFile
from minizero.seams import host_empty
from minizero.staging import Part, Piece, Pool, Row, Span, span

CPU = torch.device("cpu")


class _MadeInPlace(TorchFunctionMode):
    """An optimizer's first states of `p` are made in `rooms`, in order."""

    def __init__(self, p: Tensor, rooms: list[Tensor]) -> None:
        super().__init__()
        self.p, self.rooms = p, rooms

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.zeros_like and args[0] is self.p and self.rooms:
            return self.rooms.pop(0).zero_()
        return func(*args, **(kwargs or {}))


class _Filed(Offload):
    """Where shards rest, and how they come and go; the subclass updates."""

    places: tuple[str, ...] = ("device", "cpu", "nvme")

    def __init__(
        self,
        plan: Plan,
        folder: str | os.PathLike[str] | None = None,
        *,
        buffer_count: int = 4,
        buffer_size: int = 1 << 22,
        block_size: int = 1 << 20,
        queue_depth: int = 8,
    ) -> None:
        super().__init__(plan)
        if buffer_size < 1:
            raise ValueError(
                f"buffer_size must be at least 1 element, not {buffer_size!r}"
            )
        self.at = "device" if plan.optimizer.on == "device" else "cpu"
        self.buffer_size = buffer_size
        self.pool = Pool(buffer_count)
        self.disk = AsyncFiles(block_size, queue_depth)
        chosen = folder or os.environ.get("MINIZERO_NVME")
        where = Path(chosen or tempfile.gettempdir())
        self.folder = RunFolder(where, self.disk)
        # by what stands for the shard; and the other way round, by path
        self._files: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._by_path: weakref.WeakValueDictionary[Path, ShardFile] = (
            weakref.WeakValueDictionary()
        )
        self._nans: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._ahead: deque[Reading] = deque()
        self._next: dict[tuple[Path | None, Path], Path] = {}
        self._last: tuple[Path | None, Path | None] = (None, None)
        self._fault: BaseException | None = None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """After a fault nothing of this home is used any more."""
        if self._fault is not None:
            raise RuntimeError(
                f"the state in files is lost since this: {self._fault!r}; "
                "start again"
            ) from self._fault
        try:
            yield
        except BaseException as fault:
            self.close(fault)
            raise

    def close(self, why: BaseException | None = None) -> None:
        """Wait for what is under way, and delete the files."""
        if self._fault is None:
            self._fault = why or RuntimeError("close() was called")
            self.disk.close()
            self.folder.close()

    @property
    def on_disk(self) -> Bytes:
        """Bytes of the shards in files, without headers and padding."""
        found = Bytes()
        for file in self._files.values():
            had = getattr(found, file.category)
            setattr(found, file.category, had + file.payload)
        return found

    @property
    def file_bytes(self) -> int:
        """Bytes of the files: the shards, headers and padding."""
        return sum(file.nbytes for file in self._files.values())

    def rest(self, row: Tensor, category: str) -> Tensor:
        if getattr(self.plan, category).on != "nvme":
            return super().rest(row, category)
        if row.ndim == 0:  # a step counter
            host = host_empty((), row.dtype, category)
            return host.copy_(row)
        # the optimizer's tensors are the host's, where it works
        device = row.device if category == "parameters" else CPU
        shard = self.new_shard(category, row.numel(), row.dtype, device)
        self.lower(shard, row)
        return shard

    def new_shard(
        self,
        category: str,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Make a file; what stands for its shard reads as NaN, [size].

        The file lives as long as that.
        """
        width = min(self.buffer_size, size)
        with self._guard():
            file = ShardFile(self.folder, category, size, dtype, width)
        shard = self._nan(dtype, device).expand(size)
        self._files[shard] = self._by_path[file.path] = file
        weakref.finalize(shard, file.remove)
        return shard

    def _nan(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if (dtype, device) not in self._nans:
            value = torch.nan if dtype.is_floating_point else 0
            nan = torch.full((), value, dtype=dtype, device=device)
            on = "cpu" if device == CPU else None
            self._nans[dtype, device] = tracker.label(nan, "buffers", on=on)
        return self._nans[dtype, device]

    def lower(self, shard: Tensor, row: Tensor) -> None:
        file = self._files.get(shard)
        if file is None:
            return super().lower(shard, row)
        with self._guard():
            self._forget_ahead()
            self.pool.reserve(file.stride)
            for index, (a, b) in enumerate(file.ranges()):
                buffer = self.pool.take()
                file.data(buffer, index).copy_(row[a:b])
                self.pool.give(buffer, [file.write(index, buffer)])
            self.pool.drain()

    def lift(self, shard: Tensor, row: Tensor) -> Tensor:
        """What an all-gather into the buffer around `row` reads.

        A shard in a file is read into `row`, through the pool.
        """
        file = self._files.get(shard)
        if file is None:
            return super().lift(shard, row)
        with self._guard():
            for index, (a, b) in enumerate(file.ranges()):
                reading = self._take_ahead(file, index)
                self._read_ahead(file, index)
                row[a:b].copy_(reading.wait())
                self.pool.give(reading.buffer)
            before, self._last = self._last, (self._last[1], file.path)
            if before[1] is not None:
                self._next[before[0], before[1]] = file.path
        return row

    def _take_ahead(self, file: ShardFile, index: int) -> Reading:
        """The read of a record: launched before, or now."""
        if self._ahead:
            first = self._ahead[0]
            if first.file is file and first.index == index:
                return self._ahead.popleft()
            self._forget_ahead()
        return file.read(index, self.pool.take())

    def _read_ahead(self, file: ShardFile, index: int) -> None:
        """Launch what comes next into the buffers that are free."""
        coming = islice(self._after(file, index), len(self._ahead), None)
        for later, record in coming:
            if not self.pool.free:
                break
            self._ahead.append(later.read(record, self.pool.take()))

    def _after(
        self, file: ShardFile, index: int
    ) -> Iterator[tuple[ShardFile, int]]:
        """The records after this one, as they came the last time."""
        for record in range(index + 1, file.records):
            yield file, record
        found = self._by_path.get(
            self._next.get((self._last[1], file.path), file.path)
        )
        if found is not None and found is not file:
            for record in range(found.records):
                yield found, record

    def _forget_ahead(self) -> None:
        """Give the buffers of reads back that nobody has asked for."""
        while self._ahead:
            reading = self._ahead.popleft()
            reading.wait()
            self.pool.give(reading.buffer)


class NVMe(_Filed):
    """Keeps in files what the plan places on "nvme", the rest as `Offload`.

    Every shard has a file. Host memory holds a pool of `buffer_count`
    buffers, each with room for all that the update of `buffer_size` elements
    needs: a shard is updated piece by piece. While piece i is updated, i + 1
    is read and i - 1 written (Rajbhandari et al. 2021, sec. 5.2.2, 6.3).
    Before an all-gather a shard is read through the same pool, and the one
    that came next the last time is read ahead.

    `folder`: where (default: the environment's MINIZERO_NVME, or the folder
    for temporary files). Each process has a folder of its own in there, and
    deletes it when `close` is called, when it ends, and after a fault.
    `block_size`, `queue_depth`: bytes of a request, requests in flight.
    `disk.direct`: whether files are read and written past the page cache.
    `timeline`: what the last update did, and when.

    A file that cannot be written, read or trusted raises DiskFault, which
    names it. The home refuses to work from then on: an update may be half
    done.
    """

    def __init__(self, plan: Plan, *args: Any, **options: Any) -> None:
        super().__init__(plan, *args, **options)
        self.timeline: list[Span] = []
        self._apart: dict[Flat, list[Tensor | None]] = {}

    def masters(
        self, flat: Flat, rows: list[Tensor], masters: list[Tensor]
    ) -> list[Tensor]:
        self._landing.reserve(flat)
        apart = masters[0] is not rows[0]
        self._apart[flat] = [
            self.rest(master, "optimizer") if apart else None
            for master in masters
        ]
        device = flat.full.device
        self._lent[flat] = [self._stand_in(m, device) for m in masters]
        return self._lent[flat]

    def update(self, net: Verbs) -> None:
        """Update piece by piece: read(i+1), step(i), write(i-1)."""
        with self._guard():
            self._forget_ahead()
            self._last = (None, None)
            pieces = [p for row in self._rows(net) for p in self._cut(row)]
            self.pool.reserve(max(piece.room for piece in pieces))
            self._run(net, pieces)

    def _run(self, net: Verbs, pieces: list[Piece]) -> None:
        self.timeline, writes, launched = [], [], 0
        # one buffer is for what is being written
        ahead = max(1, self.pool.count - 1)
        for i, piece in enumerate(pieces):
            for later in pieces[launched : i + ahead]:
                later.bring(self.pool.take())
            launched = max(launched, i + ahead)
            self.timeline.append(piece.arrive())
            self._step(net, piece)
            written = piece.leave()
            assert piece.buffer is not None
            self.pool.give(piece.buffer, written)
            writes.append((piece.row.unit, written))
            following = pieces[i + 1].row.unit if pieces[i + 1 :] else None
            if following is not piece.row.unit:
                net.publish(piece.row.unit)
        self.pool.drain()
        self.timeline += [span("write", unit, w) for unit, w in writes]

    def _rows(self, net: Verbs) -> Iterator[Row]:
        for unit in net.units:
            for flat in unit.trainable:
                owned, grads = net.owned(flat), net.owned_grads(flat)
                for row in zip(
                    owned,
                    grads,
                    self._lent[flat],
                    self._apart[flat],
                    strict=True,
                ):
                    yield self._row(net, unit, flat, *row)

    def _row(
        self,
        net: Verbs,
        unit: Unit,
        flat: Flat,
        owned: Tensor,
        grad: Tensor,
        lent: Tensor,
        master: Tensor | None,
    ) -> Row:
        assert flat.group is not None
        group = net.optimizer.param_groups[flat.group]
        layout = state_layout(net.optimizer, group, lent)
        state = net.optimizer.state[lent]
        others = {k: v for k, v in state.items() if k not in layout}
        fresh = len(others) == len(state)
        states = {
            key: self._new_state(flat, dtype) if fresh else state[key]
            for key, dtype in layout.items()
        }
        return Row(
            unit, flat, owned, grad, lent, master, states, others, fresh
        )

    def _new_state(self, flat: Flat, dtype: torch.dtype) -> Tensor:
        """Room for a state that the optimizer has yet to make."""
        on = self.plan.optimizer.on
        if on == "nvme":
            return self.new_shard("optimizer", flat.size, dtype, CPU)
        if on == "cpu":
            return host_empty((flat.size,), dtype, "optimizer")
        empty = flat.full.new_empty(flat.size, dtype=dtype)
        return tracker.label(empty, "optimizer", on="device")

    def _cut(self, row: Row) -> Iterator[Piece]:
        """The row in pieces of `buffer_size` elements."""
        size = row.owned.numel()
        for a in range(0, size, self.buffer_size):
            part = partial(
                Part,
                a=a,
                b=min(a + self.buffer_size, size),
                at=self.at,
                device=CPU if self.at == "cpu" else row.flat.full.device,
            )

            def of(
                whole: Tensor,
                dtype: torch.dtype,
                wanted: bool = True,
                part: partial[Part] = part,
            ) -> Part:
                file = self._files.get(whole)
                return part(whole, file, dtype=dtype, wanted=wanted)

            # masters apart are only rounded into the parameters
            owned = of(row.owned, row.owned.dtype, row.master is None)
            dtype = row.lent.dtype
            yield Piece(
                row,
                owned,
                of(row.grad, dtype),
                owned if row.master is None else of(row.master, dtype),
                {
                    k: of(s, s.dtype, not row.fresh)
                    for k, s in row.states.items()
                },
            )

    def _step(self, net: Verbs, piece: Piece) -> None:
        """Let the optimizer update one piece, as if it were a parameter."""
        row, lent = piece.row, piece.row.lent
        begun, state = time.perf_counter(), net.optimizer.state[row.lent]
        rooms = {key: part.here for key, part in piece.states.items()}
        state.clear()
        state.update(_copied(row.others))
        lent.data = piece.master.here
        [lent.grad] = net.precision.gradients(row.flat, [piece.grad.here])
        if row.fresh:
            with _MadeInPlace(lent, list(rooms.values())):
                net.optimizer.step()
        else:
            state.update(rooms)
            net.optimizer.step()
        for key, room in rooms.items():
            if state[key].data_ptr() != room.data_ptr():
                room.copy_(state[key])
        net.precision.written([lent], [piece.owned.here])
        lent.grad, lent.data = None, lent.data[:0]
        # what is left in `state` is the last piece's, and that of all
        state.update(row.states)
        self._label({k: v for k, v in state.items() if k not in rooms})
        ended = time.perf_counter()
        self.timeline.append(Span("step", row.unit.name, begun, ended))

    def _label(self, others: dict[str, Any]) -> None:
        for value in others.values():
            if isinstance(value, Tensor):
                on = "cpu" if self.at == "cpu" else None
                tracker.label(value, "optimizer", on)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in state.items()
    }
