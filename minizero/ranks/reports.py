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

SOON = 1.0  # seconds after which a mismatch counts: a rank may be about to raise
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
    """What a rank has done in this task, and its line, if it has been there a while."""

    reports: Sequence[Report] = ()  # from old to new
    line: str = ""


recent: deque[Report] = deque(maxlen=48)


def report(
    state: str, number: int, what: str, history: int, ranks: tuple[int, ...]
) -> None:
    """Note what this rank is doing, as `Report` describes it."""
    recent.append(Report(time.monotonic(), state, number, what, history, ranks))


def verdict(
    posts: Mapping[int, Post], working: set[int], active: float, timeout: float
) -> str:
    """Why the ranks at work will never return, and what each does; "" if they may.

    `active`: when ranks last printed or returned, or when the task began.
    """
    now, why = time.monotonic(), ""
    last = {r: [Report(), *post.reports][-1] for r, post in posts.items()}
    calls: dict[tuple[int, tuple[int, ...]], dict[int, Report]] = {}
    for rank, post in posts.items():
        for each in post.reports:
            calls.setdefault((each.number, each.ranks), {})[rank] = each
    for (number, ranks), made in sorted(calls.items()):
        if why or now - max(each.time for each in made.values()) < SOON:
            continue
        if len({each.history for each in made.values()}) > 1:
            why, last = DIFFERENT, last | made  # the first calls that differ
        elif any(made[r].state == "waits" for r in made.keys() & working):
            for r in {*ranks} - working:
                own = [each.number for each in posts[r].reports if each.ranks == ranks]
                why = ALONE if max(own, default=0) < number else why
    if not why and now - max([active, *(last[r].time for r in working)]) > timeout:
        why = f"the ranks hang: no progress in {timeout:g} s. "
        why += "If they were only slow, give a larger timeout."
    for rank in sorted(posts) if why else ():
        what = _doing(last[rank], now) + posts[rank].line
        why += f"\n  rank {rank} {what if rank in working else 'has returned'}"
    return why


def _doing(last: Report, now: float) -> str:
    if not last.number:
        return "has entered no collective"
    waited = f"waited {now - last.time:.1f} s in"
    how = {"waits": waited, "done": "finished"}.get(last.state, last.state)
    return f"has {how} collective {last.number}, {last.what}"


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
