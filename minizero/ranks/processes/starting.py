"""How a rank's process is started: forked from a server, or from nothing.

To import torch takes seconds. Multiprocessing's fork server does it once, and forks
each rank from there in milliseconds. Where a system has no fork server, or this one
cannot serve, a rank is a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

# Environment variables that libraries read as they are loaded, and never again.
AT_LOAD = (
    "LD_",
    "DYLD_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH",
)
PRELOAD = ["minizero.ranks.processes.preload", "torch", "cloudpickle"]

_turn = threading.RLock()  # else a thread could put another's `__main__` back
_loaded_with: dict[str, str] | None = None  # the server's variables of AT_LOAD


def _renew() -> None:
    """In a fork of this process: a thread that had the turn is not there."""
    global _turn
    _turn = threading.RLock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew)


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A new process that calls `target(*args)`. Only within `starting`.

    Raises:
        OSError: the system has no room for another process.
    """
    global _loaded_with
    wanted = {k: v for k, v in os.environ.items() if k.startswith(AT_LOAD)}
    methods = ["spawn"]
    if "forkserver" in multiprocessing.get_all_start_methods():
        _loaded_with = wanted if _loaded_with is None else _loaded_with
        if wanted == _loaded_with:
            methods.insert(0, "forkserver")
    for method in methods:
        context: Any = multiprocessing.get_context(method)
        process: BaseProcess = context.Process(target=target, args=args)
        # The server has been killed this moment, or belongs to a parent that this
        # process was forked from.
        with contextlib.suppress(EOFError, ConnectionError, ChildProcessError):
            if method == "forkserver":
                _ensure_server()
            process.start()
            return process
    raise OSError("it has ended at once")


def _ensure_server() -> None:
    """Lets the server run, and import from where this process does."""
    from multiprocessing import forkserver  # not everywhere

    multiprocessing.set_forkserver_preload(PRELOAD)
    here = [os.path.abspath(entry) for entry in sys.path]
    told = {"PYTHONPATH": os.pathsep.join(here), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            del os.environ[name]
            os.environ.update({} if value is None else {name: value})


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Within it, new ranks are deaf to Ctrl-C and do not run the caller's script.

    Multiprocessing runs the script again in every process, to have its functions there;
    with cloudpickle they travel, and a script needs no `if __name__ == "__main__"`.
    """
    resource_tracker.ensure_running()  # started later, it would unblock the signal
    with _turn, _uninterrupted():
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        chosen = multiprocessing.get_start_method(allow_none=True)
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            # to start a process chooses a method, which the program may do later
            multiprocessing.set_start_method(chosen, force=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Puts a Ctrl-C off until the end. Processes started within are deaf to it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Other threads of this process may get the signal all the same.
    pressed: list[int] = []
    handled = threading.current_thread() is threading.main_thread()
    if handled:
        before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handled:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if pressed:
        raise KeyboardInterrupt
