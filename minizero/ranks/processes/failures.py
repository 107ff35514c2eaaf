"""What can go wrong while ranks work on a task, told in one error."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from minizero.ranks.processes.status_board import Board, Slot
from minizero.ranks.processes.worker import Reply

LOOK = 0.25  # seconds between two looks at the board
GRACE = 0.5  # seconds after a failure in which the other ranks may finish, or fail too
OUT_OF_STEP = 0.5  # seconds of waiting in different collectives that prove a bug
LEFT_ALONE = 2.0  # seconds of waiting for a rank that has returned that prove one
LOST = 1 << 16  # in place of an exit code, where nobody can tell it any more


class RankError(RuntimeError):
    """Something went wrong on a rank.

    Attributes:
        rank: the rank that failed first; None when ranks are stuck together.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the rank's story, without the parent's frames."""
        return [f"{type(self).__name__}: {self}"]


class Failure(NamedTuple):
    """How a rank failed. The smallest of several is the likely cause of the others."""

    echo: bool  # it only tells that another rank is gone
    time: float
    rank: int
    summary: str  # "raised ValueError: too short", to follow the rank's name
    details: str = ""  # a traceback


_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|"
    r"remote process exited|communicator was aborted",
    re.IGNORECASE,
)


@dataclasses.dataclass
class Call:
    """A task in progress on some ranks: who has replied what, who is waited for."""

    ranks: Sequence[int]
    timeout: float  # seconds
    keep: bool  # the ranks are meant to live on after an error
    waiting: set[int] = dataclasses.field(default_factory=set)
    results: dict[int, bytes] = dataclasses.field(default_factory=dict)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(default_factory=time.monotonic)
    progress: float = 0.0  # when a rank last printed or replied
    looked: float = 0.0  # when the board was last looked at
    suspicion: str | None = None  # what that look suggested
    interrupted: bool = False
    receiving: bool = False  # half a reply is read

    def __post_init__(self) -> None:
        self.waiting.update(self.ranks)

    def enter(self, rank: int, reply: Reply) -> None:
        """Notes what a rank has sent back."""
        self.waiting.discard(rank)
        self.progress = time.monotonic()
        if reply.result is not None:
            self.results[rank] = reply.result
            return
        echo = bool(_ECHO.search(reply.summary))
        failure = Failure(echo, reply.time, rank, reply.summary, reply.details)
        self.failures.append(failure)

    def died(self, rank: int, summary: str) -> None:
        """Notes that a rank's process has ended."""
        self.waiting.discard(rank)
        self.failures.append(Failure(False, time.monotonic(), rank, summary))

    def since_failure(self) -> float:
        """Seconds since the first failure."""
        return time.monotonic() - min(failure.time for failure in self.failures)

    def unexplained(self) -> bool:
        """Whether ranks have only lost a peer so far: the peer's fault may follow."""
        echoes = bool(self.failures) and all(f.echo for f in self.failures)
        return echoes and self.since_failure() < GRACE

    def error(self) -> RankError:
        """The failure that came first, with all ranks that failed in the same way."""
        first = min(self.failures)
        alike = sorted({f.rank for f in self.failures if f.summary == first.summary})
        who = f"rank{'s' * (len(alike) > 1)} {', '.join(map(str, alike))}"
        message = f"{who} {first.summary}\n\n{first.details}".strip()
        return RankError(message, alike[0])


def blocked(call: Call, board: Board) -> dict[int, Slot]:
    """The ranks that wait in a collective of this call, as they reported it."""
    slots = {rank: board.read(rank) for rank in call.waiting}
    return {
        rank: slot
        for rank, slot in slots.items()
        if slot.state == "waits" and slot.time >= call.started
    }


def all_blocked(call: Call, board: Board) -> bool:
    """Whether all ranks at work have waited in a collective for some time."""
    since = [slot.time for slot in blocked(call, board).values()]
    return len(since) == len(call.waiting) and time.monotonic() - max(since) > GRACE


def verdict(call: Call, board: Board) -> str | None:
    """Why the ranks will never finish, if two looks in a row agree on it."""
    if time.monotonic() - call.looked < LOOK:
        return None
    before, call.suspicion = call.suspicion, _suspicion(call, board)
    call.looked = time.monotonic()
    return call.suspicion if call.suspicion == before else None


def _suspicion(call: Call, board: Board) -> str | None:
    now = time.monotonic()
    waits = blocked(call, board)
    # A rank may be one collective ahead, so only the same numbers compare.
    long = [slot for slot in waits.values() if now - slot.time > OUT_OF_STEP]
    kinds = {(slot.sequence, slot.what) for slot in long}
    if len(kinds) > len({slot.sequence for slot in long}):
        return "the ranks are out of step: they wait in different collectives."
    # A rank that has returned joins in no collective later than its last.
    done = [board.read(r).sequence for r in range(board.ranks) if r not in call.waiting]
    if done and len(waits) == len(call.waiting):
        late = [w for w in waits.values() if now - w.time > LEFT_ALONE]
        if late and all(slot.sequence > min(done) for slot in waits.values()):
            return "the ranks are out of step: some wait for one that has returned."
    reports = [board.read(rank).time for rank in call.waiting]
    latest = max([call.started, call.progress, *reports])
    if now - min([latest, *(slot.time for slot in waits.values())]) > call.timeout:
        return (
            f"the ranks hang: no progress in {call.timeout:g} s. "
            "If they were only slow, give a larger timeout."
        )
    return None


def describe(call: Call, board: Board, rank: int, position: str) -> str:
    """What a rank is doing, in a line; `position` is where its program is."""
    slot = board.read(rank)
    where = f"; it is at {position}" if position else ""
    if rank not in call.ranks:
        doing = "has no part in this call"
    elif rank not in call.waiting:
        doing = "has returned"
    elif slot.time < call.started:
        doing = f"has entered no collective{where}"
    elif slot.state == "waits":
        since = time.monotonic() - slot.time
        doing = f"has waited {since:.1f} s in collective {slot.sequence}, {slot.what}"
    else:
        doing = f"has finished collective {slot.sequence}, {slot.what}{where}"
    return f"  rank {rank} {doing}"
