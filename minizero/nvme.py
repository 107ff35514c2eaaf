"""The update of shards in files, piece by piece; and what it may cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minizero import tracker
from minizero.ddp import Verbs
from minizero.flat import Flat, Unit
from minizero.memory import Plan
from minizero.optim import state_layout
from minizero.seams import host_empty
from minizero.shelf import CPU, Shelf
from minizero.staging import Part, Piece, Row, Span, span


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


class NVMe(Shelf):
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

    def resting(
        self, flat: Flat, masters: list[Tensor], rows: list[Tensor]
    ) -> list[Tensor]:
        """The owned rows; masters in files are brought up to date here."""
        for apart, row in zip(self._apart[flat], rows, strict=True):
            if apart is not None:
                values = flat.full.new_empty(flat.size)
                self.lower(apart, self.lift(row, values))
        return rows

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
        if piece.buffer is not None:  # a precision may have called it else
            tracker.label(piece.buffer, "buffers")
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


def intensity(
    what: str,
    sequence: int,
    micro_batch: int,
    hidden: int = 0,
    interval: int = 1,
) -> float:
    """Operations for each byte that a state moves: FLOP/byte, a GPU.

    `what`: "parameters" (with their gradients), "optimizer" or
    "activations" (checkpoints, one every `interval` blocks of size
    `hidden`). With 16-bit parameters and gradients, fp32 optimizer states
    and full recomputation (Rajbhandari et al. 2021, sec. 4.1): forward,
    recomputation and twice backward are 8 operations a token and parameter.
    """
    tokens = sequence * micro_batch
    known = {
        # read for forward, recomputation and backward, written as gradients
        "parameters": 8 * tokens / (2 * 4),
        # 16 bytes read and 16 written in a step
        "optimizer": 8 * tokens / (16 * 2),
        # 2 bytes written and read, against 8 x 12 h^2 a token and block
        "activations": 24.0 * hidden * interval,
    }
    if what not in known:
        raise ValueError(
            f"what must be one of {', '.join(known)}, not {what!r}"
        )
    if not known[what] > 0:
        raise ValueError(
            f"sequence, micro_batch and, for activations, hidden and interval "
            f"must be above 0, not {sequence!r}, {micro_batch!r}, "
            f"{hidden!r} and {interval!r}"
        )
    return known[what]


def efficiency(ait: float, bandwidth: float, peak: float) -> float:
    """The share of time spent computing, if nothing overlaps: 0 to 1.

    `ait`: operations a byte moved. `bandwidth`: bytes a second. `peak`:
    operations a second while computing (Rajbhandari et al. 2021, sec. 4):
    ait * bandwidth / (ait * bandwidth + peak).
    """
    for name, value in (
        ("ait", ait),
        ("bandwidth", bandwidth),
        ("peak", peak),
    ):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, not {value!r}")
    return ait * bandwidth / (ait * bandwidth + peak)
