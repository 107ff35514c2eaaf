"""Reports of what each rank is doing, and what they prove when ranks are stuck.

Each rank keeps its last reports, and a thread of it posts them. A pool's parent reads
them from files. Where there is no parent that looks, as under torchrun, stuck ranks post
them to torch's store, and rank 0 compares: else they would wait in silence until the
backend's timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    TCPStore,
)

SOON, LATE = 1.0, 2.0  # seconds of waiting that prove a mismatch
KEPT, PERIOD = 48, 0.5  # reports; seconds
PACKAGE = str(Path(__file__).parents[1]) + os.sep
DIFFERENT = "the ranks are out of step: they have called different collectives."
ALONE = "the ranks are out of step: some wait for one that has returned."
ECHO = r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|" + (
    r"remote process exited|communicator was aborted"
)
"""What an error says that only follows from a lost peer."""


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

    def __str__(self) -> str:
        if not self.number:
            return "has entered no collective"
        call = f"collective {self.number}, {self.what}"
        if self.state == "waits":
            return f"has waited {time.monotonic() - self.time:.1f} s in {call}"
        return f"has {'finished' if self.state == 'done' else self.state} {call}"


Reports = Mapping[int, Iterable[Report]]  # of each rank, from old to new


def unlike(reports: Reports) -> dict[int, Report]:
    """The earliest collective that ranks of a group have called differently, by rank."""
    calls: dict[tuple[int, tuple[int, ...]], dict[int, Report]] = {}
    for rank, made in reports.items():
        for each in made:
            calls.setdefault((each.number, each.ranks), {})[rank] = each
    for _, by_rank in sorted(calls.items()):
        if len({each.history for each in by_rank.values()}) > 1:
            return by_rank
    return {}


def verdict(reports: Reports, waiting: set[int], active: float, timeout: float) -> str:
    """Why the ranks that are waited for will never return; "" if they may.

    `active`: when ranks last printed or returned, or when the task began.
    """
    now, differ = time.monotonic(), unlike(reports).values()
    if differ and now - max(each.time for each in differ) > SOON:
        return DIFFERENT
    last = [[Report(), *reports.get(rank, ())][-1] for rank in waiting]
    for call in last:
        if call.state == "waits" and now - call.time > LATE:
            for rank in set(call.ranks) - waiting:
                made = [r for r in reports.get(rank, ()) if r.ranks == call.ranks]
                if max((r.number for r in made), default=0) < call.number:
                    return ALONE
    if now - max([active, *(call.time for call in last)]) > timeout:
        return (
            f"the ranks hang: no progress in {timeout:g} s. "
            "If they were only slow, give a larger timeout."
        )
    return ""


recent: deque[Report] = deque(maxlen=KEPT)
_watched: Any = None  # whose reports are posted: a process group, or a pool


def report(
    state: str, number: int, what: str, history: int, ranks: tuple[int, ...]
) -> None:
    """Note what this rank is doing, as `Report` describes it."""
    recent.append(Report(time.monotonic(), state, number, what, history, ranks))
    world = dist.group.WORLD
    if _watched not in (world, "pool") and world is not None and world.size() > 1:
        if dist.get_backend() != "fake":
            one_rank_speaks()
            watch(world, peers())


def watch(whose: Any, post: Callable[[], None]) -> None:
    """Call `post` again and again in a thread, until another is watched."""
    global _watched
    _watched = whose

    over = threading.Event()

    def run() -> None:
        while not over.wait(PERIOD) and _watched is whose:
            with contextlib.suppress(RuntimeError, OSError):  # a full disk may empty
                post()

    thread = threading.Thread(target=run, name="minizero watch", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    # Python would abort a process whose thread is in a call of the store at its end
    atexit.register(end)


def post_to(path: Path) -> Callable[[], None]:
    """What a rank of a pool does again and again: write its reports to a file."""
    new, last = path.with_suffix(".new"), Report()

    def post() -> None:
        nonlocal last
        before, last = last, recent[-1] if recent else last
        here = position() if last is before else ""
        new.write_bytes(pickle.dumps((list(recent), here)))
        new.replace(path)  # at once for its readers

    return post


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


def peers() -> Callable[[], None]:
    """What a rank does again and again for ranks that no parent looks at.

    Each posts its reports when it is stuck. Rank 0 compares them; if calls differ it
    prints them, and all stuck ranks end, rank 0 last: that they lose it is no news.
    """
    me, everyone = dist.get_rank(), range(dist.get_world_size())
    # on a connection of its own: the main thread may wait for the store in new_group
    default: Any = dist.distributed_c10d._get_default_store()
    store = _part("watch", default.clone())
    posted, seen = Report(), 0

    def post() -> None:
        nonlocal posted, seen
        last = recent[-1]
        stuck = last.state != "done" and time.monotonic() - last.time > LATE
        if stuck and last is not posted:
            posted, line = last, f"  rank {me} {last}{position()}"
            store.set(str(me), pickle.dumps((list(recent), line)).hex())
            store.add("stuck", 1)
        if stuck and store.check(["verdict"]):
            os._exit(1)
        if me or (now := store.add("stuck", 0)) == seen:
            return
        seen = now
        there = {r: store.get(str(r)) for r in everyone if store.check([str(r)])}
        found = {r: pickle.loads(bytes.fromhex(m.decode())) for r, m in there.items()}
        if unlike({r: made for r, (made, _) in found.items()}):
            lines = [DIFFERENT, *(line for _, line in found.values())]
            print("\n".join(lines), file=sys.stderr, flush=True)
            sys.excepthook = lambda *_: None
            store.set("verdict", "")
            time.sleep(4 * PERIOD)
            os._exit(1)

    return post


def _part(name: str, store: Store) -> Store:
    """What only ranks of this life use, if torchrun starts them anew."""
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"minizero/{name}/{life}", store)


def one_rank_speaks() -> None:
    """Under torchrun, let one rank print an error that several have, or cause."""
    own = sys.excepthook is not sys.__excepthook__
    if own or "TORCHELASTIC_RUN_ID" not in os.environ:
        return

    def hook(
        kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            soon = timedelta(seconds=10)  # rank 0 may not have made it yet
            kept = TCPStore(host, port, is_master=False, timeout=soon)
            store, text = _part("errors", kept), f"{kind.__name__}: {error}"
            if re.search(ECHO, text, re.IGNORECASE):
                time.sleep(1.0)  # the cause may follow
                if store.add("causes", 0):
                    return
            elif store.add(text, 1) > 1 or not store.add("causes", 1):
                return
        sys.__excepthook__(kind, error, frames)

    sys.excepthook = hook
