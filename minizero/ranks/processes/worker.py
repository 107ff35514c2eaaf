"""What runs inside a rank: a loop that takes a task, runs it and sends the reply.

A rank is a process. Its parent is the program or the notebook that started it. Three
things join the two: a pipe for tasks and replies, a pipe for everything the rank
prints, and the status board, a small file that both map into memory. The board is the
one place a rank can be read from while it is blocked.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import faulthandler
import functools
import linecache
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple

import cloudpickle

from minizero.ranks.processes.status_board import Board


class Reply(NamedTuple):
    """What a rank sends back: a pickled result, or how the task failed, and when."""

    time: float
    result: bytes | None = None
    summary: str = ""  # "raised ValueError: too short", to follow the rank's name
    details: str = ""  # the traceback


_write_slot: Callable[[str, int, str], None] | None = None


def report(state: str, sequence: int, what: str) -> None:
    """Notes on the status board what this rank is doing.

    Args:
        state: "waits" just before the rank blocks in a collective, "done" just after.
        sequence: the collective's number, counted alike on every rank.
        what: the collective in words, such as "all_reduce of 8 float32 (backward)".

    In a process that no pool has started there is no board, and nothing happens.
    """
    if _write_slot is not None:
        _write_slot(state, sequence, what)


def serve(
    rank: int,
    ranks: int,
    folder: Path,
    environment: dict[str, str],
    tasks: Connection,
    output: Connection,
) -> None:
    """The life of a rank, from start to an empty task."""
    if "numpy.random" in sys.modules:  # with the state of all ranks of the server
        sys.modules["numpy.random"].seed()
    os.setpgrp()  # the parent decides what a Ctrl-C means, not the terminal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    watcher = threading.Thread(target=_follow_parent, args=(folder,), daemon=True)
    watcher.start()
    _redirect_output(output)

    os.environ.clear()  # what it was forked from may have had another
    os.environ.update(environment)
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
    global _write_slot
    _write_slot = functools.partial(Board(folder / "board", ranks).write, rank)
    stack = open(folder / f"stack{rank}", "w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    faulthandler.enable(all_threads=False)


def _leave() -> None:
    """Ends the process as an exit does, but does not take the interpreter apart.

    With torch loaded that takes a quarter of a second for each rank, and may crash.
    """
    vars(sys.modules["__main__"]).clear()  # so that open files are written
    atexit._run_exitfuncs()
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a task may have closed or replaced it
            stream.flush()


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


def pack(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes:
    """A task for a rank: a call, pickled with what its cells and `__main__` define.

    Raises:
        TypeError: `function` is not callable, or a part of the call cannot be pickled.
    """
    if not callable(function):
        raise TypeError(f"ranks run a function, and {function!r} is not one.")
    # A cell is a source without a file, and so without a modification time.
    entries = linecache.cache.items()
    sources = {name: e for name, e in entries if len(e) == 4 and e[1] is None}
    try:
        task: bytes = cloudpickle.dumps((sources, function, args, kwargs))
    except Exception as error:
        parts = {f"the function {getattr(function, '__name__', function)}": function}
        parts |= {f"argument {i}": value for i, value in enumerate(args)}
        parts |= {f"argument {name!r}": value for name, value in kwargs.items()}
        culprit = next((what for what in parts if not _picklable(parts[what])), "it")
        raise TypeError(f"{culprit} cannot be sent to the ranks: {error}") from None
    return task


def _picklable(value: Any) -> bool:
    with contextlib.suppress(Exception):
        cloudpickle.dumps(value)
        return True
    return False


def attempt(task: bytes) -> Reply:
    """Runs a task; whatever it raises becomes a reply too."""
    try:
        signal.signal(signal.SIGINT, _interrupt)
        try:
            reply = Reply(time.monotonic(), result=_perform(task))
        except BaseException as error:
            reply = _failure(error)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt as error:  # came while another error was being told
        reply = _failure(error)
    _flush()
    return reply


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt in the task, once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _perform(task: bytes) -> bytes:
    sources, function, args, kwargs = cloudpickle.loads(task)
    linecache.cache.update(sources)  # a notebook's cells are in no file of this machine
    result = function(*args, **kwargs)
    try:
        packed: bytes = cloudpickle.dumps(result)
    except Exception as error:
        kind = type(result).__name__
        raise TypeError(f"the result, a {kind}, cannot be pickled: {error}") from None
    return packed


def _failure(error: BaseException) -> Reply:
    """The error as text, without the frames of this module that lead to the task."""
    now = time.monotonic()
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    details = "".join(traceback.format_exception(type(error), error, frames))
    if isinstance(error, SystemExit):
        return Reply(now, None, f"left by sys.exit({error.code!r})", details)
    summary = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
    return Reply(now, None, f"raised {summary}", details)


def execute(source: str, name: str) -> str | None:
    """Runs `source` in this rank's namespace, as a notebook runs a cell.

    Prints the value of a last expression, unless it is None, and returns its repr.
    """
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)  # for tracebacks
    namespace = vars(sys.modules["__main__"])
    body = ast.parse(source, name).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    # Without dont_inherit, the cell would get this module's __future__ imports.
    code = compile(ast.Module(body, []), name, "exec", dont_inherit=True)
    exec(code, namespace)
    if not isinstance(last, ast.Expr):
        return None
    code = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
    value = eval(code, namespace)
    if value is None or source.rstrip().endswith(";"):
        return None
    namespace["_"] = value
    print(text := repr(value))
    return text


def lookup(name: str) -> Any:
    """The value of a variable of this rank's namespace."""
    namespace = vars(sys.modules["__main__"])
    if name not in namespace:
        raise NameError(f"no variable {name!r} in this rank's namespace")
    return namespace[name]
