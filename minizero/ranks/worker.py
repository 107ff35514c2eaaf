"""What runs in a rank that a pool has started: take a task, run it, send the reply.

Three things join a rank and its parent: a pipe for tasks and replies, a pipe for all
that the rank prints, and the store to which a thread of it posts what it is doing.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import linecache
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from .rendezvous import leave
from .reports import Report, recent, watch

ECHO = r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|" + (
    r"remote process exited|communicator was aborted"
)
"""What an error says that only follows from a lost peer."""


class Reply(NamedTuple):
    """What a rank sends back: a pickled result, or how the task failed, and when."""

    time: float
    result: bytes | None = None
    summary: str = ""  # "raised ValueError: too short", to follow the rank's name
    details: str = ""  # the traceback
    reports: Sequence[Report] = ()  # what the rank has done last

    @property
    def is_echo(self) -> bool:
        """Whether it only follows from the end of another rank."""
        return bool(re.search(ECHO, self.summary, re.IGNORECASE))


def serve(
    rank: int,
    folder: str,
    environment: dict[str, str],
    tasks: Connection,
    output: Connection,
) -> None:
    """The life of a rank, from its start to an empty task.

    `folder`: multiprocessing's, which must go with a parent that is killed.
    """
    gc.freeze()  # a collection would copy the pages that are shared with the server
    atexit._clear()  # the server's; torch's take a third of a second
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # all ranks have the server's state
    os.setpgrp()  # a terminal's Ctrl-C goes to the parent, which decides
    end = threading.Thread(target=_end_with_parent, args=(folder,), daemon=True)
    end.start()
    for fd, name in (1, "stdout"), (2, "stderr"):  # so also what C++ libraries print
        os.dup2(output.fileno(), fd)
        setattr(sys, name, open(fd, "w", 1, "utf-8", "backslashreplace", closefd=False))
    output.close()
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    ranks = int(environment["WORLD_SIZE"])
    share = torch.get_num_threads() // ranks
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", max(1, share))))
    watch(rank, ranks, in_pool=True)
    faulthandler.enable(all_threads=False)
    sys.modules["__main__"] = ModuleType("__main__")  # where cells keep their names
    try:
        while task := tasks.recv_bytes():
            tasks.send_bytes(pickle.dumps(attempt(task)))
    except (EOFError, OSError):
        end.join()  # the parent is gone, and its folder must be too
    with contextlib.suppress(RuntimeError, ValueError):  # a task may have left
        dist.barrier()  # nobody leaves while another still talks
        leave()
    vars(sys.modules["__main__"]).clear()  # so that open files are written
    atexit._run_exitfuncs()


def _end_with_parent(folder: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    end = parent.sentinel
    with contextlib.suppress(OSError, AttributeError):
        # the sentinel is a pipe: what the parent has forked may keep it open, and a
        # parent that is interrupted as it starts this rank may close it
        end = os.pidfd_open(parent.pid)
    wait([end])
    shutil.rmtree(folder, ignore_errors=True)  # which all ranks do at once
    os.killpg(0, signal.SIGKILL)  # and what this rank has started


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a task may have closed or replaced it
            stream.flush()


def attempt(task: bytes) -> Reply:
    """Run a task; whatever it raises becomes a reply too."""
    try:
        reply = Reply(time.monotonic(), _perform(task))
    except BaseException as error:
        reply = _failure(error)
    _flush()
    return reply._replace(reports=list(recent))


def _perform(task: bytes) -> bytes:
    sources, function, args, kwargs = cloudpickle.loads(task)
    linecache.cache.update(sources)  # a notebook's cells are in no file
    result = function(*args, **kwargs)
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        kind = type(result).__name__
        raise TypeError(f"the result, a {kind}, cannot be pickled: {error}") from None


def _failure(error: BaseException) -> Reply:
    """The error as text, without the frames that lead to the task."""
    frames = error.__traceback__
    while frames is not None and (
        frames.tb_frame.f_code.co_filename == __file__
        or "__tracebackhide__" in frames.tb_frame.f_locals
    ):
        frames = frames.tb_next
    details = "".join(traceback.format_exception(type(error), error, frames))
    summary = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
    how = f"left by sys.exit({error.code!r})" if isinstance(error, SystemExit) else ""
    return Reply(time.monotonic(), None, how or f"raised {summary}", details)


def pack(function: Any, *args: Any, **kwargs: Any) -> bytes:
    """A task: a call, pickled with what cells and `__main__` define.

    Raises TypeError if `function` is none, or if a part of the call cannot be pickled.
    """
    if not callable(function):
        raise TypeError(f"ranks run a function, and {function!r} is not one.")
    # a cell is a source without a file, and so without a modification time
    entries = linecache.cache.items()
    sources = {name: e for name, e in entries if len(e) == 4 and e[1] is None}
    try:
        return bytes(cloudpickle.dumps((sources, function, args, kwargs)))
    except Exception as error:
        what = f"{getattr(function, '__name__', function)} and its arguments"
        raise TypeError(f"{what} cannot be sent to the ranks: {error}") from None
