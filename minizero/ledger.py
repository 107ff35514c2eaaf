"""The ledger: every collective, what it moved, and when it was waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Call:
    """One collective as one rank made it; times are `time.perf_counter()` seconds.

    `elements` is the size of the whole (padded) buffer, `sent` what this rank put
    on the wire, both counted in elements; `bytes` is what `sent` weighs.
    """

    op: str
    elements: int
    sent: int
    bytes: int
    dtype: str
    phase: str
    unit: str
    launched: float
    waited: float = 0.0
    finished: float = 0.0

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.phase, self.unit)))
        what = f"{self.op} of {self.elements:,} {self.dtype}"
        return f"{what} ({where})" if where else what


class Ledger(list[Call]):
    """Every collective of this rank while the ledger was open."""

    def select(self, op: str | None = None, phase: str | None = None) -> list[Call]:
        """The calls of one op, one phase, or both."""
        return [c for c in self if op in (None, c.op) and phase in (None, c.phase)]

    def sent(self, op: str | None = None, phase: str | None = None) -> int:
        """Elements that this rank sent."""
        return sum(c.sent for c in self.select(op, phase))

    def table(self) -> str:
        """Calls, elements sent and bytes sent, by phase and op."""
        lines = [f"{'phase':10}{'op':16}{'calls':>6}{'sent':>14}{'bytes':>14}"]
        for phase, op in dict.fromkeys((c.phase, c.op) for c in self):
            calls = self.select(op, phase)
            sent, size = sum(c.sent for c in calls), sum(c.bytes for c in calls)
            lines.append(f"{phase:10}{op:16}{len(calls):6}{sent:14,}{size:14,}")
        return "\n".join(lines)


_ledgers: list[Ledger] = []
_where: dict[str, Any] = {"phase": "", "unit": ""}


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
    """Calls inside the block are entered under this phase, this unit, or both."""
    # not a context variable: autograd runs hooks in threads of its own
    before = dict(_where)
    _where.update(phase=name or _where["phase"], unit=unit or _where["unit"])
    try:
        yield
    finally:
        _where.update(before)


def enter(op: str, elements: int, sent: int, dtype: str, itemsize: int) -> Call:
    """Write a call that is being launched into every open ledger."""
    now = time.perf_counter()
    call = Call(op, elements, sent, sent * itemsize, dtype, **_where, launched=now)
    for book in _ledgers:
        book.append(call)
    return call
