"""Tasks: functions that travel to a rank, and what comes back."""

from __future__ import annotations

import ast
import contextlib
import linecache
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import cloudpickle


class Reply(NamedTuple):
    """What a rank sends back: a pickled result, or how the task failed, and when."""

    time: float
    result: bytes | None = None
    summary: str = ""  # "raised ValueError: too short", to follow the rank's name
    details: str = ""  # the traceback


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
    flush()
    return reply


def flush() -> None:
    """Sends what was printed on its way."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a task may have closed or replaced it
            stream.flush()


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
