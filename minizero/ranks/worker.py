"""What runs in a rank that a pool has started: take a task, run it, send the reply.

Two pipes join a rank and its parent: one for tasks and replies, through which a thread
also posts what the rank is doing, and one for all that it prints.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import linecache
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from .rendezvous import leave
from .reports import Post, position, recent

PERIOD = 0.5  # seconds from post to post
PEER_LOST = "connection (was )?(closed|reset|refused)|broken pipe|socket closed|"
PEER_LOST += "remote process exited|communicator was aborted"


class Reply(NamedTuple):
    """What a rank sends back: a pickled result, or how the task failed, and when."""

    time: float
    result: bytes | None = None
    summary: str = ""  # "raised ValueError: too short", to follow the rank's name
    details: str = ""  # the traceback

    @property
    def is_consequence(self) -> bool:
        """Whether it only follows from the end of another rank."""
        return bool(re.search(PEER_LOST, self.summary, re.IGNORECASE))


def serve(
    rank: int, folder: str, env: dict[str, str], tasks: Connection, output: Connection
) -> None:
    """The life of a rank, from its start to an empty task.

    `folder`: multiprocessing's temporary one; ranks delete it if the parent is killed.
    """
    gc.freeze()  # a collection would copy memory that is shared with the fork server
    atexit._clear()  # the server's handlers; torch's take a third of a second
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else all ranks draw the same numbers
    os.setpgrp()  # a terminal's Ctrl-C goes to the parent, which decides
    end = threading.Thread(target=_end_with_parent, args=(folder,), daemon=True)
    end.start()
    for fd, name in (1, "stdout"), (2, "stderr"):  # so also what C++ libraries print
        os.dup2(output.fileno(), fd)
        setattr(sys, name, open(fd, "w", 1, "utf-8", "backslashreplace", closefd=False))
    output.close()
    os.environ.clear()
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    share = torch.get_num_threads() // int(env["WORLD_SIZE"])
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", max(1, share))))
    sys.modules["__main__"] = ModuleType("__main__")  # the names that cells define
    # who has it may write to `tasks`: `_post` while a task runs, else this thread
    may_send = threading.Lock()
    may_send.acquire()
    threading.Thread(target=_post, args=(tasks, may_send), daemon=True).start()
    try:
        while task := tasks.recv_bytes():
            recent.clear()
            may_send.release()
            reply = attempt(task)
            may_send.acquire()
            tasks.send((Post(list(recent)), reply))
    except (EOFError, OSError):
        end.join(1)  # the parent is gone: that thread deletes its folder
    with contextlib.suppress(RuntimeError, ValueError):  # a task may have left
        dist.barrier()  # a rank that left early would break others' connections
        leave()
    vars(sys.modules["__main__"]).clear()  # so that open files are written
    atexit._run_exitfuncs()


def _post(tasks: Connection, may_send: threading.Lock) -> None:
    """During a task, send the parent what this rank is doing, twice a second."""
    with contextlib.suppress(OSError):  # the parent is gone
        while True:
            time.sleep(PERIOD)
            with may_send:
                last = recent[-1].time if recent else 0.0
                line = position() if time.monotonic() - last > PERIOD else ""
                tasks.send((Post(list(recent), line), None))


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


def attempt(task: bytes) -> Reply:
    """Run a task; whatever it raises becomes a reply too."""
    __tracebackhide__ = True
    try:
        sources, function, args, kwargs = cloudpickle.loads(task)
        linecache.cache.update(sources)  # a notebook's cells are in no file
        result = cloudpickle.dumps(function(*args, **kwargs))
        reply = Reply(time.monotonic(), result)
    except BaseException as error:
        frames = error.__traceback__  # without those that lead to the task
        while frames and "__tracebackhide__" in frames.tb_frame.f_locals:
            frames = frames.tb_next
        details = "".join(traceback.format_exception(type(error), error, frames))
        what = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        reply = Reply(time.monotonic(), None, f"raised {what}", details)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a task may have closed or replaced it
            stream.flush()
    return reply


def pack(function: Any, *args: Any, **kwargs: Any) -> bytes:
    """A task: a call, pickled with what cells and `__main__` define."""
    # an entry is (size, time, lines, name); a cell has no file, and so no time
    entries = linecache.cache.items()
    sources = {name: e for name, e in entries if len(e) == 4 and e[1] is None}
    return bytes(cloudpickle.dumps((sources, function, args, kwargs)))
