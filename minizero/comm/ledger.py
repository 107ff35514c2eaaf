"""The ledger: every collective, what it moved, and when it was waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from .quantized import Quantized
from .transport import Group


@dataclass(slots=True)
class Call:
    """One collective as one rank made it.

    `elements`: of the full buffer. `sent`: elements that this rank sends in
    the direct exchange; a backend may send more. `bytes`: the size of what is
    sent. `group`: the name of the group of ranks.

    Times are the host's, in seconds of `perf_counter`: the launch from
    `launched` to `returned`, the wait from `waited` to `finished`, early on NCCL.
    """

    op: str
    elements: int
    sent: int
    bytes: int
    dtype: str
    phase: str
    unit: str
    group: str = "all"
    launched: float = 0.0
    waited: float = 0.0
    finished: float = 0.0
    returned: float = 0.0

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.phase, self.unit)))
        what = f"{self.op} of {self.elements:,} {self.dtype}"
        what += f" {self.group} groups" * (self.group != "all")
        return f"{what} ({where})" if where else what


class Ledger(list[Call]):
    """Every collective of this rank while the ledger was open."""

    def select(
        self, op: str | None = None, phase: str | None = None, group: str | None = None
    ) -> list[Call]:
        """The calls of one op, one phase, one group, or any of these."""
        return [
            c
            for c in self
            if op in (None, c.op)
            and phase in (None, c.phase)
            and group in (None, c.group)
        ]

    def sent(self, op: str | None = None, phase: str | None = None) -> int:
        """Elements that this rank sent."""
        return sum(c.sent for c in self.select(op, phase))

    def table(self) -> str:
        """Calls, elements sent and bytes sent, by phase and op."""
        grouped = any(c.group != "all" for c in self)
        w = 24 if grouped else 16
        largest = max([sum(c.bytes for c in self), self.sent()])
        n = max(14, len(f"{largest:,}") + 2)  # the width of a column
        lines = [f"{'phase':10}{'op':{w}}{'calls':>6}{'sent':>{n}}{'bytes':>{n}}"]
        for key in dict.fromkeys((c.op, c.phase, c.group) for c in self):
            op, where, group = key
            calls = self.select(*key)
            sent = sum(c.sent for c in calls)
            size = sum(c.bytes for c in calls)
            what = f"{op} {group}" if grouped else op
            lines.append(f"{where:10}{what:{w}}{len(calls):6}{sent:{n},}{size:{n},}")
        return "\n".join(lines)


_ledgers: list[Ledger] = []
_where = "", ""  # phase, unit; global, since autograd runs hooks in other threads


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Collect every collective that this rank launches inside the block."""
    book = Ledger()
    _ledgers.append(book)
    try:
        yield book
    finally:
        # by identity: two ledgers with the same calls are equal lists
        _ledgers[:] = [other for other in _ledgers if other is not book]


@contextmanager
def phase(name: str = "", unit: str = "") -> Iterator[None]:
    """Record the calls inside the block under this phase, unit, or both."""
    global _where
    before = _where
    _where = name or before[0], unit or before[1]
    try:
        yield
    finally:
        _where = before


def enter(
    op: str, buffer: Tensor, sent: int, group: Group, quantized: Quantized | None = None
) -> Call:
    """Record a call that is being launched in every open ledger.

    `sent`: elements of the buffer that this rank sends; quantized, they are full rows.
    """
    name = str(buffer.dtype).removeprefix("torch.")
    elements, nbytes = buffer.numel(), sent * buffer.dtype.itemsize
    if quantized:
        name, row = f"int{quantized.bits}", max(1, -(-elements // group.size))
        nbytes = -(-sent // row) * quantized.nbytes(row)
    call = Call(op, elements, sent, nbytes, name, *_where, group.name)
    call.launched = time.perf_counter()
    for book in _ledgers:
        book.append(call)
    return call
