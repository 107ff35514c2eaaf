"""What runs inside a rank: a loop that takes a task, runs it and sends the reply.

A rank is a process. Its parent is the program or the notebook that started it. Three
things join the two: a pipe for tasks and replies, a pipe for everything the rank
prints, and the status board, a small file that both map into memory. The board is the
one place a rank can be read from while it is blocked.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from minizero.ranks.processes.status_board import Board
from minizero.ranks.processes.tasks import attempt, flush


class Surroundings(NamedTuple):
    """What a rank has from its parent, where the server may have had another."""

    environment: dict[str, str]
    cores: set[int]  # that it may use; none if the system does not say
    start_method: str | None  # of the processes that it starts itself

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process."""
        known = hasattr(os, "sched_getaffinity")
        cores = os.sched_getaffinity(0) if known else set[int]()
        method = multiprocessing.get_start_method(allow_none=True)
        return cls(dict(os.environ), cores, method)

    def take_over(self) -> None:
        """Makes them this process's."""
        os.environ.clear()
        os.environ.update(self.environment)
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        multiprocessing.set_start_method(self.start_method, force=True)


_write: Callable[[str, int, str, int], None] | None = None
_last = 0


def report(
    state: str,
    sequence: int,
    what: str,
    history: int = 0,
    ranks: tuple[int, ...] | None = None,
) -> None:
    """Notes on the status board what this rank is doing.

    Args:
        state: "launched", then "waits" just before the rank blocks in a collective, and
            "done" just after; "queued" where a device carries it out in its own time.
        sequence: the collective's number, counted alike on every rank.
        what: the collective in words, such as "all_reduce of 8 float32 (backward)".
        history: a checksum of all collectives so far, alike on every rank.

    In a process that no pool has started there is no board, and nothing happens.
    """
    global _last
    if ranks and len(ranks) < int(os.environ.get("WORLD_SIZE", "1")):
        state, sequence, history = "begun", _last, 0
    _last = sequence
    if _write is not None:
        _write(state, sequence, what, history)


def serve(
    rank: int,
    ranks: int,
    folder: Path,
    surroundings: Surroundings,
    tasks: Connection,
    output: Connection,
) -> None:
    """The life of a rank, from start to an empty task."""
    if "numpy.random" in sys.modules:  # with the state of all ranks of the server
        sys.modules["numpy.random"].seed()
    if os.getpgrp() != os.getpid():
        os.setpgrp()  # the parent decides what a Ctrl-C means, not the terminal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    watcher = threading.Thread(target=_follow_parent, args=(folder,), daemon=True)
    watcher.start()
    _redirect_output(output)
    surroundings.take_over()
    # The names that torchrun uses, for libraries that look there.
    names = {"RANK": rank, "LOCAL_RANK": rank}
    names |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    sys.modules["__main__"] = ModuleType("__main__")  # the namespace of `execute`
    try:
        task = tasks.recv_bytes()
        _be_observed(rank, ranks, folder)
        while task:
            tasks.send_bytes(pickle.dumps(attempt(task)))
            task = tasks.recv_bytes()
    except (EOFError, OSError):
        watcher.join()  # the parent has gone, and the watcher ends this process
    _leave()


def _be_observed(rank: int, ranks: int, folder: Path) -> None:
    """Lets the parent see what this rank reports, and ask where its program is.

    The folder exists from the first task on: while ranks start, a parent that is killed
    might otherwise leave it behind.
    """
    global _write
    _write = functools.partial(Board(folder / "board", ranks).write, rank)
    stack = open(folder / f"stack{rank}", "w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    faulthandler.enable(all_threads=False)


def _leave() -> None:
    """Ends the process as an exit does, but does not take the interpreter apart.

    With torch loaded that takes a quarter of a second for each rank, and may crash.
    """
    vars(sys.modules["__main__"]).clear()  # so that open files are written
    atexit._run_exitfuncs()
    flush()
    os._exit(0)


def _follow_parent(folder: Path) -> None:
    """Ends this rank, and what it has started, as soon as its parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    ends: list[Any] = [parent.sentinel]
    # What the parent has forked may hold its end of that pipe, and live on.
    with contextlib.suppress(OSError, AttributeError):
        ends.append(os.pidfd_open(parent.pid))
    wait(ends)
    while folder.exists():  # other threads and ranks may still be making files there
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _redirect_output(output: Connection) -> None:
    """Sends all that this process writes, C++ libraries included, into one pipe."""
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    output.close()
    # Line buffering sends a line, or a progress bar's "\r", on its way at once.
    options: Any = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace"}
    sys.stdout = open(1, "w", closefd=False, **options)
    sys.stderr = open(2, "w", closefd=False, **options)
