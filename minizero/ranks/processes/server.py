"""The process that ranks are forked from: a program of its own.

To import torch takes seconds. Here it is done once, and nothing else is: no CUDA, which
does not survive a fork, no thread, and no module of the reader's or of this package, so
that a rank imports those as they are when it starts.

Its parent holds the other end of the socket `control`. The first message says where to
import from; the answer is that torch is there. Then each message asks for a rank, and
brings open files: where the rank reads what it is to run, where its process id and
later its exit code are written, the resource tracker, and what the rank itself needs.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from multiprocessing import forkserver, resource_tracker, spawn
from typing import Any, NoReturn

NUMBER = struct.Struct("q")  # a process id, or -errno where none was made; an exit code
FILES = 32  # open files that a message may bring


def main(control: socket.socket) -> None:
    """Forks a rank whenever it is asked to, until its parent and all ranks are gone."""
    sys.path[:] = json.loads(control.recv(1 << 18))  # the first entry was this folder
    import cloudpickle  # noqa: F401
    import torch  # noqa: F401

    gc.freeze()  # a collection in a rank would write to, and so copy, these pages
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    control.send(b"!")
    exits: dict[int, int] = {}  # where to write exit codes, by process id
    asked: list[Any] = [control]
    while asked or exits:
        ready = select.select([wake, *asked], [], [])[0]
        if wake in ready:
            os.read(wake, 1 << 12)
            reap(exits)
        if control in ready and not fork(control, exits, [wake, woken]):
            asked.clear()


def fork(control: socket.socket, exits: dict[int, int], own: list[int]) -> bool:
    """Makes the rank that a message asks for; False if there is no message any more."""
    message, files, _, _ = socket.recv_fds(control, 1, FILES)
    if not message:
        return False
    task, status, tracker, *inherited = files
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or errno.EAGAIN)
    if pid == 0:
        signal.set_wakeup_fd(-1)
        control.close()
        for each in (status, *own, *exits.values()):
            os.close(each)
        be_rank(task, tracker, inherited)
    for each in (task, tracker, *inherited):
        os.close(each)
    with contextlib.suppress(BrokenPipeError):
        os.write(status, NUMBER.pack(pid))
    if pid > 0:
        exits[pid] = status
    else:
        os.close(status)
    return True


def be_rank(task: int, tracker: int, inherited: list[int]) -> NoReturn:
    """What multiprocessing's own server does in a new process."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        vars(resource_tracker)["_resource_tracker"]._fd = tracker
        vars(forkserver)["_forkserver"]._inherited_fds = inherited
        code = spawn._main(task, os.dup(task))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def reap(exits: dict[int, int]) -> None:
    """Passes on the exit codes of the ranks that have ended."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitpid(-1, os.WNOHANG):
            pid, status = found
            if pid == 0:
                return
            with os.fdopen(exits.pop(pid), "wb", 0) as file:
                with contextlib.suppress(BrokenPipeError):
                    file.write(NUMBER.pack(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
