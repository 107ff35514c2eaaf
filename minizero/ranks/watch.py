"""Each rank keeps its last reports, and a thread of it posts them while it is stuck.

A pool's parent reads them from files. Where there is no parent that looks, as under
torchrun, the ranks post them to torch's store, and rank 0 compares: else they would wait
in silence until the backend's timeout.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from .reports import DIFFERENT, LATE, Report, unlike

KEPT, PERIOD = 48, 0.5  # reports; seconds
ECHO = r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|" + (
    r"remote process exited|communicator was aborted"
)
"""What an error says that only follows from a lost peer."""
PACKAGE = str(Path(__file__).parents[1]) + os.sep

_reports: deque[Report] = deque(maxlen=KEPT)
_watched: Any = None  # whose reports are posted: a process group, or a pool


def report(
    state: str, number: int, what: str, history: int, ranks: tuple[int, ...]
) -> None:
    """Note what this rank is doing, as `Report` describes it."""
    _reports.append(Report(time.monotonic(), state, number, what, history, ranks))
    world = dist.group.WORLD
    if _watched not in (world, "pool"):
        peers = world is not None and world.size() > 1
        if peers and dist.get_backend() != "fake":
            one_rank_speaks()
            watch(world, _Peers().post)


def watch(whose: Any, post: Callable[[], None]) -> None:
    """Call `post` again and again in a thread, until another is watched."""
    global _watched
    _watched = whose

    def run() -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the store or folder is gone
            while _watched is whose:
                time.sleep(PERIOD)
                post()

    threading.Thread(target=run, daemon=True).start()


def post_to(path: Path) -> None:
    """Write the reports to a file, at once for its readers."""
    new = path.with_suffix(".new")
    new.write_bytes(pickle.dumps((list(_reports), position())))
    new.replace(path)


def position() -> str:
    """Where the program of this process is: its line, not the libraries' below it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for each in reversed(traceback.extract_stack(frame)):
        if "/lib/python3" not in each.filename and PACKAGE not in each.filename:
            return f"; it is at line {each.lineno} of {each.name} ({each.filename})"
    return ""


class _Peers:
    """The ranks of a process group that nobody else looks at."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        self.store = PrefixStore("minizero/watch", store)
        self.told, self.seen = Report(), 0

    def post(self) -> None:
        """Tell the others when this rank is stuck; rank 0 compares what all have told."""
        last = _reports[-1]
        stuck = last.state != "done" and time.monotonic() - last.time > LATE
        if stuck and last is not self.told:
            story = f"  rank {self.rank} {last}{position()}"
            told = pickle.dumps((list(_reports), story)).hex()
            self.store.set(str(self.rank), told)
            self.store.add("stuck", 1)
            self.told = last
        if self.rank == 0 and (now := self.store.add("stuck", 0)) > self.seen:
            self.seen = now
            self._compare()
        if stuck and self.store.check(["verdict"]):
            os._exit(1)

    def _compare(self) -> None:
        ranks = [r for r in range(self.ranks) if self.store.check([str(r)])]
        stored = {r: bytes.fromhex(self.store.get(str(r)).decode()) for r in ranks}
        found = {r: pickle.loads(each) for r, each in stored.items()}
        if unlike({r: reports for r, (reports, _) in found.items()}):
            lines = [DIFFERENT, *(story for _, story in found.values())]
            print("\n".join(lines), file=sys.stderr, flush=True)
            sys.excepthook = lambda *_: None  # that peers end now is no news
            self.store.set("verdict", "")
            time.sleep(4 * PERIOD)  # they end first


def one_rank_speaks() -> None:
    """Under torchrun, let one rank print an error that several have, or cause."""
    if (
        "TORCHELASTIC_RUN_ID" not in os.environ
        or sys.excepthook is not sys.__excepthook__
    ):
        return

    def hook(
        kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store: Store = TCPStore(host, port, is_master=False)
            life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = PrefixStore(f"minizero/errors/{life}", store)
            text = f"{kind.__name__}: {error}"
            if re.search(ECHO, text, re.IGNORECASE):
                time.sleep(1.0)  # the cause may follow
                if store.add("causes", 0):
                    return
            elif store.add(text, 1) > 1 or not store.add("causes", 1):
                return
        sys.__excepthook__(kind, error, frames)

    sys.excepthook = hook
