"""Where a rank reports what it does: to its pool's board, or by torch's store to the others.

A pool's parent looks at the board. Where nobody looks, as under torchrun, each rank has a
thread that notices when it is stuck, and rank 0's compares what the stuck ranks have
called: without it they would wait in silence until the backend's timeout.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from .board import LATE, Board, Report, unlike

ECHO = r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|" + (
    r"remote process exited|communicator was aborted"
)
"""What an error says that only tells of a lost peer."""

_write: Callable[[Report], None] | None = None
_watched: Callable[[], Any] = object  # the process group that the watch belongs to


def report_to(write: Callable[[Report], None]) -> None:
    """Let `report` write there."""
    global _write
    _write = write


def report(
    state: str, number: int, what: str, history: int, ranks: Iterable[int]
) -> None:
    """Note what this rank is doing: a collective's state, as `Report` describes it."""
    if isinstance(_write, Watch | None):
        world = dist.group.WORLD
        if world is not _watched():
            _watch(world)
        if _write is None:
            return
    _write(Report.now(state, number, what, history, ranks))


def _watch(world: Any) -> None:
    global _write, _watched
    _write, _watched = None, ref(world) if world else object
    if world and world.size() > 1 and dist.get_backend(world) != "fake":
        one_rank_speaks()
        _write = Watch(world.rank(), world.size())
        threading.Thread(target=_write.run, daemon=True).start()


class Watch(deque[Report]):
    """The last reports of this rank, and a thread that compares them when it is stuck."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(maxlen=Board.KEPT)
        self.rank, self.ranks = rank, ranks
        store = dist.distributed_c10d._get_default_store()
        self.store = PrefixStore("minizero/watch", store)

    def __call__(self, report: Report) -> None:
        self.append(report)

    def run(self) -> None:
        told, seen = Report(), 0
        with contextlib.suppress(RuntimeError):  # the store has ended with its owner
            while _write is self:
                time.sleep(1.0)
                last = self[-1] if self else told
                stuck = last.state != "done" and time.monotonic() - last.time > LATE
                if stuck and last is not told:
                    mine = list(self), f"rank {self.rank} {last}{position()}"
                    self.store.set(str(self.rank), pickle.dumps(mine))
                    self.store.add("stuck", 1)
                    told = last
                if self.rank == 0 and (now := self.store.add("stuck", 0)) > seen:
                    seen = now
                    self._compare()
                if stuck and self.store.check(["verdict"]):
                    os._exit(1)

    def _compare(self) -> None:
        found = {}
        for rank in range(self.ranks):
            if self.store.check([str(rank)]):
                found[rank] = pickle.loads(self.store.get(str(rank)))
        if unlike({rank: reports for rank, (reports, _) in found.items()}):
            why = "the ranks are out of step: they have called different collectives."
            lines = [why, *(f"  {line}" for _, line in found.values())]
            print("\n".join(lines), file=sys.stderr, flush=True)
            sys.excepthook = lambda *_: None  # that peers end now is no news
            self.store.set("verdict", "")
            time.sleep(3.0)  # they end first


PACKAGE = str(Path(__file__).parents[1]) + os.sep


def position() -> str:
    """Where the program of this process is: its line, not the libraries' below it."""
    frames = sys._current_frames().get(threading.main_thread().ident or 0)
    for frame in reversed(traceback.extract_stack(frames)):
        if "/lib/python3" not in frame.filename and PACKAGE not in frame.filename:
            return f"; it is at line {frame.lineno} of {frame.name} ({frame.filename})"
    return ""


def one_rank_speaks() -> None:
    """Under torchrun, of ranks that end by the same error only one prints it."""
    if (
        "TORCHELASTIC_RUN_ID" not in os.environ
        or sys.excepthook is not sys.__excepthook__
    ):
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def hook(
        kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            store: Store = TCPStore(host, port, is_master=False)
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
