"""Reports of what each rank is doing, and what they prove when ranks are stuck.

A thread of each rank posts its last reports to the store by which the ranks have met.
A pool's parent reads them there. Where no parent looks, as under torchrun, rank 0
compares them: else stuck ranks would wait in silence until the backend's timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

SOON, LATE = 1.0, 2.0  # seconds of waiting that prove a mismatch
KEPT, PERIOD = 48, 0.5  # reports; seconds
PACKAGE = str(Path(__file__).parents[1]) + os.sep
DIFFERENT = "the ranks are out of step: they have called different collectives."
ALONE = "the ranks are out of step: some wait for one that has returned."


class Report(NamedTuple):
    """The state of a collective on a rank: "launched", "waits", "done"; "queued" on a
    device.

    `number` counts the collectives of its group of `ranks`, and `history` is their
    checksum: both are equal on ranks that make the same calls. `what`: it in words.
    """

    time: float = 0.0  # of the monotonic clock
    state: str = ""
    number: int = 0
    what: str = ""
    history: int = 0
    ranks: tuple[int, ...] = ()


class Post(NamedTuple):
    """What a rank posts: its clock, its last reports, and the line that it is at."""

    now: float = 0.0
    reports: Sequence[Report] = ()  # from old to new
    line: str = ""

    def text(self, differs: Report | None) -> str:
        """What the rank does; `differs`: the call to name, if it is not the last."""
        last = differs or [Report(), *self.reports][-1]
        if not last.number:
            return f"has entered no collective{self.line}"
        call = f"collective {last.number}, {last.what}{self.line}"
        if last.state == "waits":
            return f"has waited {self.now - last.time:.1f} s in {call}"
        return f"has {'finished' if last.state == 'done' else last.state} {call}"


def unlike(posts: Mapping[int, Post]) -> dict[int, Report]:
    """The earliest call that ranks of a group have made differently, by rank."""
    calls: dict[tuple[int, tuple[int, ...]], dict[int, Report]] = {}
    for rank, post in posts.items():
        for each in post.reports:
            calls.setdefault((each.number, each.ranks), {})[rank] = each
    for _, by_rank in sorted(calls.items()):
        if len({each.history for each in by_rank.values()}) > 1:
            return by_rank
    return {}


def verdict(
    posts: Mapping[int, Post], waiting: set[int], active: float, timeout: float
) -> str:
    """Why the ranks that are waited for will never return; "" if they may.

    `active`: when ranks last printed or returned, or when the task began.
    """
    now, differ = time.monotonic(), unlike(posts).values()
    if differ and now - max(each.time for each in differ) > SOON:
        return DIFFERENT
    made = {rank: post.reports for rank, post in posts.items()}
    last = [[Report(), *made.get(rank, ())][-1] for rank in waiting]
    for call in last:
        if call.state == "waits" and now - call.time > LATE:
            for rank in set(call.ranks) - waiting:
                own = [r for r in made.get(rank, ()) if r.ranks == call.ranks]
                if max((r.number for r in own), default=0) < call.number:
                    return ALONE
    if now - max([active, *(call.time for call in last)]) > timeout:
        return (
            f"the ranks hang: no progress in {timeout:g} s. "
            "If they were only slow, give a larger timeout."
        )
    return ""


def explain(why: str, posts: Mapping[int, Post], waiting: set[int]) -> str:
    """The verdict, and what each rank does."""
    differ = unlike(posts)
    for rank, post in sorted(posts.items()):
        what = post.text(differ.get(rank)) if rank in waiting else "has returned"
        why += f"\n  rank {rank} {what}"
    return why


def connect() -> Store:
    """The part of the ranks' store where ranks of this life post.

    Torchrun keeps the store when it starts ranks anew. The connection is its own: the
    main thread may wait for an answer on another.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    soon = timedelta(seconds=10)  # rank 0 may not have made it yet
    store = TCPStore(host, port, is_master=False, timeout=soon)
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"minizero/watch/{life}", store)


def posted(board: Store, ranks: int) -> dict[int, Post]:
    """What all ranks have posted; nothing of one that has not begun."""
    there = {r: board.check([str(r)]) for r in range(ranks)}
    return {r: pickle.loads(board.get(str(r))) if there[r] else Post() for r in there}


recent: deque[Report] = deque(maxlen=KEPT)
_watch: threading.Thread | None = None


def report(
    state: str, number: int, what: str, history: int, ranks: tuple[int, ...]
) -> None:
    """Note what this rank is doing, as `Report` describes it."""
    recent.append(Report(time.monotonic(), state, number, what, history, ranks))


def watch(me: int, ranks: int, in_pool: bool = False) -> None:
    """Post what this rank, `me`, does, in a thread, until the process ends.

    `in_pool`: its parent looks at what is posted. Elsewhere rank 0 looks, and ranks
    post only when they are stuck: there may be thousands.
    """
    global _watch
    if _watch is not None and _watch.is_alive():
        return
    over = threading.Event()

    def run() -> None:
        board, before = None, Report()
        while not over.wait(PERIOD):
            with contextlib.suppress(RuntimeError, OSError):  # the store is lost
                last, now = [Report(), *recent][-1], time.monotonic()
                stuck = last.state not in ("", "done") and now - last.time > LATE
                if stuck or in_pool:
                    board = board or connect()
                    line = position() if stuck or last == before else ""
                    post = pickle.dumps(Post(now, list(recent), line))
                    board.set(str(me), post)  # type: ignore[arg-type]
                    posts = posted(board, ranks) if me == 0 and not in_pool else {}
                    if unlike(posts):
                        why = explain(DIFFERENT, posts, set(posts))
                        print(why, file=sys.stderr, flush=True)
                        os._exit(1)  # and so torchrun ends the others
                before = last

    thread = threading.Thread(target=run, name="minizero watch", daemon=True)
    thread.start()
    _watch = thread

    def end() -> None:
        over.set()
        thread.join()

    # Python would abort a process whose thread is in a call of the store at its end
    atexit.register(end)


def position() -> str:
    """Where the program of this process is: its line, not the libraries' below it.

    Call it when no collective has ended for a while: whoever holds a frame keeps
    alive what its variables name, such as a gradient that is free by now.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code, line, frame = frame.f_code, frame.f_lineno, frame.f_back
        if "/lib/python3" not in code.co_filename and PACKAGE not in code.co_filename:
            return f"; it is at line {line} of {code.co_name} ({code.co_filename})"
    return ""
