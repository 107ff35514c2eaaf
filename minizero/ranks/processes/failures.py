"""What can go wrong while ranks work on a task, told in one error."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence

from minizero.ranks.processes.status_board import Activity, Board
from minizero.ranks.processes.tasks import Reply

LOOK = 0.25  # seconds between two looks at the board
GRACE = 0.5  # seconds after a failure in which the other ranks may finish, or fail too
OUT_OF_STEP = 0.5  # seconds of waiting in different collectives that prove a bug
LEFT_ALONE = 2.0  # seconds of waiting for a rank that has returned that prove one


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


_ECHO = (
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|"
    r"remote process exited|communicator was aborted"
)


def _echo(failure: Reply) -> bool:
    """Whether it only tells that another rank is gone."""
    return bool(re.search(_ECHO, failure.summary, re.IGNORECASE))


@dataclasses.dataclass
class Run:
    """One run of a task on some ranks: who has replied what, who is waited for."""

    ranks: Sequence[int]
    timeout: float  # seconds
    keep: bool  # the ranks are meant to live on after an error
    waiting: set[int] = dataclasses.field(default_factory=set)
    results: dict[int, bytes] = dataclasses.field(default_factory=dict)
    failures: list[tuple[int, Reply]] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(default_factory=time.monotonic)
    active: float = 0.0  # when a rank last printed or replied
    looked: float = 0.0  # when the board was last looked at
    suspicion: str | None = None  # what that look suggested
    receiving: bool = False  # half a reply is read

    def __post_init__(self) -> None:
        self.waiting.update(self.ranks)

    def enter(self, rank: int, reply: Reply) -> None:
        """Notes what a rank has sent back, or how its process has ended."""
        self.waiting.discard(rank)
        self.active = time.monotonic()
        if reply.result is None:
            self.failures.append((rank, reply))
        else:
            self.results[rank] = reply.result

    def since_failure(self) -> float:
        """Seconds since the first failure."""
        return time.monotonic() - min(reply.time for _, reply in self.failures)

    def unexplained(self) -> bool:
        """Whether ranks have only lost a peer so far: the peer's fault may follow."""
        echoes = bool(self.failures) and all(_echo(each) for _, each in self.failures)
        return echoes and self.since_failure() < GRACE

    def error(self) -> RankError:
        """The likely cause of all failures, with the ranks that failed in this way."""
        first = min(self.failures, key=lambda f: (_echo(f[1]), f[1].time, f[0]))[1]
        alike = sorted(
            {r for r, each in self.failures if each.summary == first.summary}
        )
        who = f"rank{'s' * (len(alike) > 1)} {', '.join(map(str, alike))}"
        message = f"{who} {first.summary}\n\n{first.details}".strip()
        return RankError(message, alike[0])


def blocked(run: Run, board: Board) -> dict[int, Activity]:
    """The ranks that wait in a collective of this run, as they reported it."""
    found = {rank: board.read(rank) for rank in run.waiting}
    return {
        r: a for r, a in found.items() if a.state == "waits" and a.time >= run.started
    }


def all_blocked(run: Run, board: Board) -> bool:
    """Whether all ranks at work have waited in a collective for some time."""
    since = [each.time for each in blocked(run, board).values()]
    return len(since) == len(run.waiting) and time.monotonic() - max(since) > GRACE


def verdict(run: Run, board: Board) -> str | None:
    """Why the ranks will never finish, if two looks in a row agree on it."""
    if time.monotonic() - run.looked < LOOK:
        return None
    before, run.suspicion = run.suspicion, _suspicion(run, board)
    run.looked = time.monotonic()
    return run.suspicion if run.suspicion == before else None


def diverging(run: Run, board: Board) -> dict[int, Activity]:
    """What ranks have called under one number, if it differs: the earliest known.

    Ranks may not wait for it, or for other numbers: where a device carries collectives
    out, unlike ones of equal size may even exchange wrong data.
    """
    numbers: dict[int, dict[int, Activity]] = {}
    for rank in run.ranks:
        for each in board.kept(rank):
            if each.history and each.time >= run.started:
                numbers.setdefault(each.sequence, {})[rank] = each
    for _, calls in sorted(numbers.items()):
        if len({each.history for each in calls.values()}) > 1:
            return calls
    return {}


def _suspicion(run: Run, board: Board) -> str | None:
    now = time.monotonic()
    waits = list(blocked(run, board).values())
    # A rank may be one collective ahead, so only the same numbers compare.
    long = {(a.sequence, a.what) for a in waits if now - a.time > OUT_OF_STEP}
    if len(long) > len({sequence for sequence, _ in long}):
        return "the ranks are out of step: they wait in different collectives."
    unlike = [each.time for each in diverging(run, board).values()]
    if unlike and now - max(unlike) > 2 * OUT_OF_STEP:
        return "the ranks are out of step: they wait in different collectives."
    # A rank that has returned joins in no collective later than its last.
    done = [board.read(r).sequence for r in range(board.ranks) if r not in run.waiting]
    if done and len(waits) == len(run.waiting):
        late = any(now - each.time > LEFT_ALONE for each in waits)
        if late and all(each.sequence > min(done) for each in waits):
            return "the ranks are out of step: some wait for one that has returned."
    reports = [board.read(rank).time for rank in run.waiting]
    latest = max([run.started, run.active, *reports])
    if now - min([latest, *(each.time for each in waits)]) > run.timeout:
        return (
            f"the ranks hang: no progress in {run.timeout:g} s. "
            "If they were only slow, give a larger timeout."
        )
    return None


def describe(run: Run, board: Board, rank: int, position: str) -> str:
    """What a rank is doing, in a line; `position` is where its program is."""
    last = diverging(run, board).get(rank) or board.read(rank)
    where = f"; it is at {position}" if position else ""
    if rank not in run.ranks:
        doing = "has no part in this call"
    elif rank not in run.waiting:
        doing = "has returned"
    elif last.time < run.started:
        doing = f"has entered no collective{where}"
    elif last.state == "waits":
        since = time.monotonic() - last.time
        doing = f"has waited {since:.1f} s in collective {last.sequence}, {last.what}"
    else:
        did = "finished" if last.state == "done" else last.state
        doing = f"has {did} collective {last.sequence}, {last.what}{where}"
    return f"  rank {rank} {doing}"
