"""Collectives: started, waited for, and entered in the ledger.

At the end what all ranks must agree on: the calls that they make, objects, errors.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .algorithms import direct_all_gather, direct_reduce_scatter
from .ledger import enter, phase
from .quantized import Quantized, quantized_all_gather, quantized_reduce_scatter
from .transport import Finish, Group, Rows, all_reduce_whole
from .transport import backend_all_gather, backend_of, backend_reduce_scatter
from .transport import communicator, current_algorithm, everyone, exchange
from .transport import reachable, timeout
from ..ranks import Report, rank, report, world_size

# per group of ranks: how many calls it has made, and their checksum
sequences: dict[tuple[int, ...], tuple[int, int]] = {}


def count_call(what: str, ranks: tuple[int, ...]) -> Report:
    """Count a call of these ranks; returns its report, to be completed by a state."""
    number, history = sequences.get(ranks, (0, zlib.crc32(repr(ranks).encode())))
    number, history = number + 1, zlib.crc32(what.encode(), history)
    sequences[ranks] = number, history
    return Report(number=number, what=what, history=history, ranks=ranks)


class Work:
    """A collective under way, launched by making this; `wait()` finishes it.

    On NCCL waiting orders streams and returns at once; on gloo it blocks the
    thread. The ranks of a group make the same calls in the same order, so the
    checksum of all calls so far marks the messages of this one.
    """

    def __init__(
        self,
        op: str,
        rows: Rows,
        sent: int,
        start: Callable[[int], Finish],
        quantized: Quantized | None = None,
    ) -> None:
        # a device carries it out later, as with NCCL
        self._is_queued = backend_of(rows.buffer) == "nccl"
        self.call = enter(op, rows.buffer, sent, rows.group, quantized)
        self._counted = count_call(str(self.call), rows.group.ranks)
        report("launched", self._counted)
        self._after: list[Callable[[], Any]] = []
        tag = self._counted.history
        self._finish: Finish | None = start(tag & 0x7FFFFFFF)
        self.call.returned = perf_counter()

    def then(self, callback: Callable[[], Any]) -> Work:
        """Run `callback` when the wait is over: now, if it is."""
        if self.call.finished:
            callback()
        else:
            self._after.append(callback)
        return self

    def wait(self) -> Work:
        """Finish the collective; a second wait does nothing."""
        if self._finish is None:
            return self
        finish, self._finish = self._finish, None
        self.call.waited = perf_counter()
        report("waits", self._counted)
        try:
            finish()
        except RuntimeError as error:
            which = f"collective {self._counted.number}, {self._counted.what},"
            raise RuntimeError(f"{which} failed: {error}") from error
        self.call.finished = perf_counter()
        report("queued" if self._is_queued else "done", self._counted)
        while self._after:  # a work that is over keeps nobody alive
            self._after.pop(0)()
        return self


def _full_row(op: str, row: Tensor, rows: Rows) -> Tensor:
    """`row`, flat; a ValueError unless it is as long as a full row."""
    if row.numel() != rows.row_size:
        raise ValueError(
            f"{op}: the row given has {row.numel()} elements, a full row of "
            f"the buffer has {rows.row_size}; make them equal"
        )
    return row.detach().view(-1)


def launchers(
    row: Tensor, quantized: Quantized | None = None
) -> tuple[Callable[..., Finish], Callable[..., Finish]]:
    """The functions that launch a reduce-scatter and an all-gather of such rows."""
    scatter, gather = backend_reduce_scatter, backend_all_gather
    if current_algorithm(row) == "direct":
        scatter, gather = direct_reduce_scatter, direct_all_gather
    if quantized is None:
        return scatter, gather
    gather_quantized = partial(quantized_all_gather, quantized, gather)
    return partial(quantized_reduce_scatter, quantized), gather_quantized


def reduce_scatter(
    out: Tensor,
    inp: Tensor,
    *,
    async_op: bool = False,
    average: bool = False,
    group: Group | None = None,
    quantized: Quantized | None = None,
) -> Work:
    """Sum over ranks, or average (floats only); rank r keeps row r, in `out`.

    `inp`: n elements. `out`: ceil(n/N), of its dtype; in place, if it is row r itself.
    """
    rows = Rows(inp, group)
    row = _full_row("reduce_scatter", out, rows)
    begin, _ = launchers(row, quantized)
    sent = rows.numel - rows.own.numel()
    start = partial(begin, row, rows, average=average)
    work = Work("reduce_scatter", rows, sent, start, quantized)
    return work if async_op else work.wait()


def all_gather(
    out: Tensor,
    inp: Tensor,
    *,
    async_op: bool = False,
    group: Group | None = None,
    quantized: Quantized | None = None,
) -> Work:
    """Every rank gets every rank's row, in `out`.

    `inp`: ceil(n/N) elements; in place, if it is row r of `out`. `out`: n elements.
    """
    rows = Rows(out, group)
    row = _full_row("all_gather", inp, rows)
    _, begin = launchers(row, quantized)
    sent = rows.own.numel() * (len(rows) - 1)
    work = Work("all_gather", rows, sent, partial(begin, rows, row), quantized)
    return work if async_op else work.wait()


def all_reduce(
    tensor: Tensor,
    *,
    async_op: bool = False,
    average: bool = False,
    group: Group | None = None,
    quantized: Quantized | None = None,
) -> Work:
    """Sum or average in place: a reduce-scatter, then an all-gather."""
    rows = Rows(tensor, group)
    own, (scatter, gather) = rows.own, launchers(tensor, quantized)

    def start(tag: int) -> Finish:
        if rows.flat is not None and scatter is backend_reduce_scatter:
            return all_reduce_whole(rows.flat, average, rows.group)
        row = own if own.numel() == rows.row_size else own.new_empty(rows.row_size)
        finish_scatter = scatter(row, rows, tag, average)

        def finish() -> None:
            finish_scatter()
            gather(rows, row, tag ^ 1)()

        return finish

    # numel - own: the other rows, to their ranks; own * (N-1): the own row, to all
    sent = rows.numel + own.numel() * (len(rows) - 2)
    work = Work("all_reduce", rows, sent, start, quantized)
    return work if async_op else work.wait()


def broadcast(
    tensor: Tensor, src: int = 0, *, async_op: bool = False, group: Group | None = None
) -> Work:
    """Every rank gets the tensor of rank `src`, counted within the group."""
    rows, values = Rows(tensor, group), tensor.detach().view(-1)
    group, n = rows.group, len(rows)
    if not 0 <= src < n:
        raise ValueError(f"broadcast: there is no rank {src} among {n}")
    mine = group.rank == src
    to = [j for j in range(n) if mine and j != src]

    def start(tag: int) -> Finish:
        if current_algorithm(values) == "backend":
            ranks = group.ranks[src], communicator(group)
            return dist.broadcast(values, *ranks, async_op=True).wait
        receives = {} if mine else {src: values}
        return exchange(dict.fromkeys(to, values), receives, tag, group)

    work = Work("broadcast", rows, rows.numel * len(to), start)
    return work if async_op else work.wait()


def barrier() -> None:
    """Return when every rank has come here; the host waits for them."""
    # host memory, whatever a script has made the default device
    seen = reachable(torch.zeros(world_size(), dtype=torch.uint8, device="cpu"))
    with phase(unit="barrier"):
        all_gather(seen, seen[rank() : rank() + 1])
    seen.cpu()  # what only a device has waited for


@lru_cache(maxsize=1)
def _own_groups(world: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Two gloo groups of all ranks, made together in their first `gather_objects`."""
    return [dist.new_group(timeout=timeout(), backend="gloo") for _ in range(2)]


def gather_objects(value: Any) -> list[Any]:
    """Every rank gets the values of all ranks, in rank order; they are pickled.

    Over two gloo groups that nothing else uses, one for the main thread: other threads
    may call it beside any collective. It is not in the ledger. In a pool, a rank whose
    main thread calls it alone, as in a save that others do not make, is reported.
    """
    if dist.group.WORLD is None or world_size() == 1:
        return [value]
    call, is_main = None, threading.current_thread() is threading.main_thread()
    if is_main:
        call = count_call("gather_objects (a save, a load)", everyone().ranks)
        report("waits", call)
    values = [None] * world_size()
    dist.all_gather_object(values, value, _own_groups(dist.group.WORLD)[is_main])
    if call is not None:
        report("done", call)
    return values


def check_sequence() -> None:
    """Raise RuntimeError, on every rank, unless all have made the same calls.

    The messages of the direct exchange carry a checksum of all calls: ranks that differ
    wait for each other until a pool or a timeout ends them. The backend's own
    collectives have none: calls that happen to fit would mix their data in silence.
    """
    if current_algorithm() != "backend" or dist.get_backend() == "fake":  # a dry run
        return
    mine = dict(sequences)
    for theirs in gather_objects(mine):
        if any(theirs[ranks] != mine[ranks] for ranks in theirs.keys() & mine):
            raise RuntimeError(
                "the ranks have not made the same collectives in this step, so what "
                "they have got is mixed; a forward must use the same units in the same "
                "order on every rank at stage 3. comm.ledger() shows each rank's calls"
            )


@contextmanager
def agreeing(raised: type[Exception]) -> Iterator[None]:
    """An error inside the block, on any rank, is raised on all, as `raised`.

    The message is that of the first such rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    for message in gather_objects(error and (str(error) or repr(error))):
        if message and isinstance(error, raised) and str(error) == message:
            raise error  # this rank's own, with its traceback
        if message:
            raise raised(message) from error
