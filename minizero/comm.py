"""Collectives: started, waited for, and entered in the ledger."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minizero.exchange import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Rows,
    exchange,
    rows,
    staged,
)
from minizero.launch import rank, report, world_size
from minizero.ledger import Call, enter
from minizero.ledger import ledger as ledger
from minizero.ledger import phase as phase

ALGORITHMS = tuple(REDUCE_SCATTER)

_algorithm: list[str] = []
_sequence = 0


@contextmanager
def algorithm(name: str) -> Iterator[None]:
    """Choose how collectives are done: "direct", "ring" or "backend".

    Without it gloo takes "direct" and NCCL takes "backend". Only "direct" promises
    that the order of a sum is the order of the ranks.
    """
    if name not in ALGORITHMS:
        raise ValueError(
            f"algorithm must be one of {', '.join(ALGORITHMS)}, not {name!r}"
        )
    _algorithm.append(name)
    try:
        yield
    finally:
        _algorithm.pop()


def current_algorithm() -> str:
    """The algorithm that the next collective takes."""
    if _algorithm:
        return _algorithm[-1]
    single = not dist.is_initialized()
    return "direct" if single or dist.get_backend() != "nccl" else "backend"


class Work:
    """A collective under way. `wait()` blocks until its result may be used.

    On NCCL waiting orders streams and returns at once; on gloo it blocks the
    thread. Callbacks added with `then` run once, when the wait is over.
    """

    def __init__(self, call: Call, finish: Callable[[], Any]) -> None:
        self.call = call
        self._finish: Callable[[], Any] | None = finish
        self._after: list[Callable[[], Any]] = []
        global _sequence
        _sequence += 1
        self._number = _sequence

    def then(self, callback: Callable[[], Any]) -> Work:
        """Run `callback` when the wait is over."""
        self._after.append(callback)
        return self

    def wait(self) -> None:
        """Finish the collective; a second wait does nothing."""
        if self._finish is None:
            return
        finish, self._finish = self._finish, None
        self.call.waited = time.perf_counter()
        report("waits", self._number, str(self.call))
        try:
            finish()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank()}: collective {self._number}, {self.call}, failed: {error}"
            ) from error
        self.call.finished = time.perf_counter()
        report("done", self._number, str(self.call))
        for callback in self._after:
            callback()


def _launch(
    op: str,
    parts: Rows,
    sent: int,
    start: Callable[[int], Callable[[], None]],
    async_op: bool,
) -> Work:
    """Enter the call in the ledgers, start it, and wait unless it is async."""
    elements, like = sum(p.numel() for p in parts), parts[0]
    dtype = str(like.dtype).removeprefix("torch.")
    call = enter(op, elements, sent, dtype, like.element_size())
    # ranks whose programs differ get different tags: they wait for each other, and
    # the status board says in what, where matching bytes would silently mix up
    key = f"{_sequence + 1} {op} {elements} {dtype}"
    tag = zlib.crc32(key.encode()) & 0x7FFFFFFF
    work = Work(call, start(tag))
    if not async_op:
        work.wait()
    return work


def _others(parts: Rows) -> int:
    """Elements of all rows but the own one: what a reduce-scatter sends."""
    return sum(p.numel() for j, p in enumerate(parts) if j != rank())


def reduce_scatter(
    out: Tensor, inp: Tensor | Sequence[Tensor], async_op: bool = False
) -> Work:
    """Sum over ranks; rank r keeps row r.

    `inp`: n elements, or N rows. `out`: ceil(n/N) elements, may be row r itself.
    """
    parts = rows(inp)
    if out.numel() != parts[0].numel():
        raise ValueError(
            f"reduce_scatter: out has {out.numel()} elements, rank {rank()}'s row of "
            f"the input has {parts[0].numel()}; make them equal"
        )
    start = REDUCE_SCATTER[current_algorithm()]
    target = out.detach().view(-1)
    return _launch(
        "reduce_scatter",
        parts,
        _others(parts),
        lambda tag: start(target, parts, tag),
        async_op,
    )


def all_gather(
    out: Tensor | Sequence[Tensor], inp: Tensor, async_op: bool = False
) -> Work:
    """Every rank gets every rank's row.

    `inp`: ceil(n/N) elements, may be row r of `out`. `out`: n elements, or N rows.
    """
    parts = rows(out)
    if inp.numel() != parts[0].numel():
        raise ValueError(
            f"all_gather: the input has {inp.numel()} elements, rank {rank()}'s row of "
            f"the output has {parts[0].numel()}; make them equal"
        )
    start = ALL_GATHER[current_algorithm()]
    own = inp.detach().view(-1)
    sent = parts[rank()].numel() * (world_size() - 1)
    return _launch(
        "all_gather", parts, sent, lambda tag: start(parts, own, tag), async_op
    )


def all_reduce(tensor: Tensor | Sequence[Tensor], async_op: bool = False) -> Work:
    """Sum over ranks, in place, on every rank: a reduce-scatter and an all-gather."""
    parts, me = rows(tensor), rank()
    name = current_algorithm()
    own = parts[me]

    def start(tag: int) -> Callable[[], None]:
        if name == "backend" and isinstance(tensor, Tensor) and not staged(tensor):
            work = dist.all_reduce(tensor.detach(), async_op=True)
            return lambda: work.wait()
        short = own.numel() < parts[0].numel()
        mine = own.new_empty(parts[0].numel()) if short else own
        reduce = REDUCE_SCATTER[name](mine, parts, tag)

        def finish() -> None:
            reduce()
            ALL_GATHER[name](parts, mine, tag ^ 1)()

        return finish

    sent = _others(parts) + own.numel() * (world_size() - 1)
    return _launch("all_reduce", parts, sent, start, async_op)


def broadcast(tensor: Tensor, src: int = 0, async_op: bool = False) -> Work:
    """Every rank gets `src`'s tensor, in place."""
    if not 0 <= src < world_size():
        raise ValueError(f"broadcast: there is no rank {src} among {world_size()}")
    flat = tensor.detach().view(-1)
    peers = [j for j in range(world_size()) if j != src]
    mine = rank() == src

    def start(tag: int) -> Callable[[], None]:
        if current_algorithm() == "backend" and not staged(flat):
            work = dist.broadcast(flat, src, async_op=True)
            return lambda: work.wait()
        sends = dict.fromkeys(peers, flat) if mine else {}
        return exchange(sends, {} if mine else {src: flat}, tag)

    sent = flat.numel() * len(peers) if mine else 0
    return _launch("broadcast", [flat], sent, start, async_op)


def barrier() -> None:
    """Return when every rank has come here."""
    seen = torch.zeros(world_size(), dtype=torch.uint8)
    if dist.is_initialized() and dist.get_backend() == "nccl":
        seen = seen.cuda()
    parts = rows(seen)
    start = ALL_GATHER[current_algorithm()]
    mine = parts[rank()]
    sent = world_size() - 1
    _launch("barrier", parts, sent, lambda tag: start(parts, mine.clone(), tag), False)
