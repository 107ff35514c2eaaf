"""Reports of what each rank of a pool is doing, and what they prove if it is stuck.

Each rank sends its last reports to the pool's parent, which compares them. Under
torchrun nobody reads them: there the backend's timeout ends ranks that are stuck.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

GRACE = 1.0  # seconds after which a mismatch counts: a rank may be about to raise
PACKAGE = str(Path(__file__).parents[1]) + os.sep
DIFFERENT = "the ranks are out of step: they have called different collectives."
ALONE = "the ranks are out of step: some wait for one that has returned."


class Report(NamedTuple):
    """The state of a collective on a rank.

    `state`: "launched", "waits" or "done"; "queued" if a device carries it out later.
    `number` counts the collectives of its group of `ranks`, and `history` is the checksum
    of all so far; ranks that make the same calls agree in both. `what`: it in words.
    """

    time: float = 0.0  # of the monotonic clock
    state: str = ""
    number: int = 0
    what: str = ""
    history: int = 0
    ranks: tuple[int, ...] = ()


class Post(NamedTuple):
    """What a rank sends its parent during a task, twice a second."""

    reports: Sequence[Report] = ()  # its last ones, from old to new
    line: str = ""  # where it is, if no collective has begun or ended for a while


recent: deque[Report] = deque(maxlen=48)


def report(state: str, call: Report) -> None:
    """Note that this rank has reached a state of a collective."""
    recent.append(call._replace(time=time.monotonic(), state=state))


def verdict(
    posts: Mapping[int, Post], running: set[int], active: float, timeout: float
) -> str:
    """Why the running ranks will never return, and what each does; "" if they may.

    `active`: when a rank last printed or returned, or when the task began.
    """
    now = time.monotonic()
    why, differing = find_mismatch(posts, running, now)
    last = {r: [Report(), *post.reports][-1] for r, post in posts.items()} | differing
    if not why and now - max([active, *(last[r].time for r in running)]) > timeout:
        why = f"the ranks hang: no progress in {timeout:g} s. "
        why += "If they were only slow, give a larger timeout."
    for rank in sorted(posts) if why else ():
        what = _doing(last[rank], now) + posts[rank].line
        why += f"\n  rank {rank} {what if rank in running else 'has returned'}"
    return why


def find_mismatch(
    posts: Mapping[int, Post], running: set[int], now: float
) -> tuple[str, dict[int, Report]]:
    """What proves that ranks are out of step, if something does, and calls that differ."""
    calls: dict[tuple[int, tuple[int, ...]], dict[int, Report]] = {}
    for rank, post in posts.items():
        for each in post.reports:  # the last report of a call replaces earlier ones
            calls.setdefault((each.number, each.ranks), {})[rank] = each
    for (number, ranks), call in sorted(calls.items()):
        if now - max(each.time for each in call.values()) < GRACE:
            continue
        if len({each.history for each in call.values()}) > 1:
            return DIFFERENT, call
        if any(call[r].state == "waits" for r in call.keys() & running):
            for r in {*ranks} - running:  # did it make this call before it returned?
                own = [each.number for each in posts[r].reports if each.ranks == ranks]
                if max(own, default=0) < number:
                    return ALONE, {}
    return "", {}


def _doing(last: Report, now: float) -> str:
    if not last.number:
        return "has entered no collective"
    waited = f"waited {now - last.time:.1f} s in"
    how = {"waits": waited, "done": "finished"}.get(last.state, last.state)
    return f"has {how} collective {last.number}, {last.what}"


def position() -> str:
    """Where the program of this process is: its line, not the libraries' below it.

    Call it rarely: reading a frame keeps its variables alive, and with them gradients.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code, line, frame = frame.f_code, frame.f_lineno, frame.f_back
        if "/lib/python3" not in code.co_filename and PACKAGE not in code.co_filename:
            return f"; it is at line {line} of {code.co_name} ({code.co_filename})"
    return ""
