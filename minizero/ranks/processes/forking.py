"""How ranks are forked from a server (on Linux), seen from their parent.

It is not multiprocessing's own server, which a program may use for itself. That one
cannot be interrupted while it starts, dies of a kill with an error in the next pool,
changes how a rank's own processes start, fails in a parent that has forked, and leaves
a folder behind when the parent is killed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from minizero.ranks.processes.failures import LOST
from minizero.ranks.processes.interrupts import uninterrupted
from minizero.ranks.processes.server import NUMBER

PROGRAM = str(Path(__file__).with_name("server.py"))


def surroundings() -> Any:
    """What a process has from the one that starts it, and may not be told later.

    Libraries read their environment as they are loaded, for one. A test runner tells
    there which test is running; nobody else reads that.
    """
    told = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = [resource.getrlimit(getattr(resource, name)) for name in names]
    cores, nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    umask = ""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text().splitlines()
        umask = next((line for line in status if line.startswith("Umask")), "")
    flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    where = [os.path.abspath(os.fsdecode(entry)) for entry in sys.path]
    return told, limits, cores, nice, umask, [spawn.get_executable(), *flags], where


class Server:
    """The process that runs `server.py`, ready to fork."""

    def __init__(self) -> None:
        self.surroundings = surroundings()
        *_, command, where = self.surroundings
        self.control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # What it writes must keep nobody's pipe open, nor can it go to a screen that
        # this process has now, and may not have later.
        self.log = tempfile.TemporaryFile()
        with other, uninterrupted():
            self.process = subprocess.Popen(
                [*command, PROGRAM, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[other.fileno()],
                start_new_session=True,  # no terminal stops or interrupts it
            )
        try:
            self.control.send(json.dumps(where).encode())
            self.control.recv(1)  # torch is there; or it has ended: a fork will tell
        except ConnectionError:
            pass
        except BaseException:
            self.end()
            raise

    def fits(self) -> bool:
        """Whether a rank forked from it is one of this moment."""
        return self.surroundings == surroundings()

    def fork(self, files: Sequence[int]) -> tuple[int, int, int]:
        """A new process, which has the open `files`.

        Returns:
            Its process id, and the ends of two pipes: the one that gives its exit code,
            and the one from which it reads what to run.

        Raises:
            OSError, EOFError: the system refuses another process; the server has ended.
        """
        status, told = os.pipe()
        task, write = os.pipe()
        tracker: Any = resource_tracker.getfd()
        try:
            try:
                socket.send_fds(self.control, [b"?"], [task, told, tracker, *files])
            finally:
                _close(task, told)  # the server has its own by now, or will have none
            pid = read_number(status)
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
        except BaseException:
            _close(status, write)
            raise
        return pid, status, write

    def written(self) -> int:
        """How many bytes it and its ranks have written to the log."""
        return os.fstat(self.log.fileno()).st_size

    def written_since(self, start: int) -> str:
        """What they have written after so many bytes."""
        return os.pread(self.log.fileno(), 1 << 16, start).decode(errors="replace")

    def retire(self) -> None:
        """Lets it end, as soon as the last of its ranks has."""
        self.control.close()

    def end(self) -> None:
        """Ends it at once."""
        self.control.close()
        self.log.close()
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """It belongs to the process that this one was forked from."""
        self.control.close()
        self.process.returncode = 0  # nobody is to wait for it here


def read_number(pipe: int) -> int:
    """What the server has written. Raises EOFError if it has ended instead."""
    data = os.read(pipe, NUMBER.size)  # so few bytes come whole
    if len(data) < NUMBER.size:
        raise EOFError("the process that ranks are forked from has ended")
    number: int = NUMBER.unpack(data)[0]
    return number


def _close(*files: int) -> None:
    for each in files:
        os.close(each)


class Servers:
    """The one in use, and those before it that may still have ranks."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.all: list[Server] = []

    def current(self) -> Server:
        """One that fits; it takes seconds where there is none yet."""
        with self.lock:
            self.all = [each for each in self.all if each.process.poll() is None]
            if self.all and self.all[-1].fits():
                return self.all[-1]
            return self._start()

    def _start(self) -> Server:
        resource_tracker.ensure_running()  # it is to be no child of the server
        for each in self.all:
            each.retire()
        self.all.append(Server())
        return self.all[-1]

    def fork(self, files: Sequence[int]) -> tuple[Server, int, int, int]:
        """As `Server.fork`, from one that fits, which is returned first."""
        with self.lock:
            server = self.current()
            try:
                return server, *server.fork(files)
            except (EOFError, ConnectionError):  # it was killed a moment ago
                server = self._start()
                return server, *server.fork(files)

    def end(self) -> None:
        """Ends all of them. Their ranks have ended before."""
        while self.all:
            self.all.pop().end()

    def forget(self) -> None:
        """In a fork of this process."""
        self.lock = threading.RLock()
        while self.all:
            self.all.pop().forget()


SERVERS = Servers()
os.register_at_fork(after_in_child=SERVERS.forget)
util.Finalize(None, SERVERS.end, exitpriority=5)  # pools have 10, and end before


class Popen(popen_forkserver.Popen):
    """A process that a server has forked."""

    def duplicate_for_child(self, fd: int) -> int:
        """Lets the process have this open file; returns its place among them."""
        self._files.append(fd)
        return len(self._files) - 1

    def _launch(self, process_obj: BaseProcess) -> None:
        self._files: list[int] = []
        buffer = io.BytesIO()
        about = spawn.get_preparation_data(process_obj.name)
        about.pop("start_method")  # which the rank's program may choose itself
        set_spawning_popen(self)
        try:
            reduction.dump(about, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        self.server, self.pid, self.sentinel, write = SERVERS.fork(self._files)
        self._said = self.server.written()
        # The end of this pipe tells the rank that its parent has ended.
        held = os.dup(write)
        self.finalizer = util.Finalize(self, _close, (held, self.sentinel))
        with contextlib.suppress(BrokenPipeError), open(write, "wb") as file:
            file.write(buffer.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Its exit code; None as long as it runs."""
        if self.returncode is None:
            if not wait([self.sentinel], 0 if flag == os.WNOHANG else None):
                return None
            try:
                self.returncode = read_number(self.sentinel)
            except EOFError:  # nobody will tell when it ends, so it ends now
                self.returncode = LOST
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
        return self.returncode

    def said(self) -> str:
        """What it has printed before its output was redirected, and others since."""
        return self.server.written_since(self._said)


class Process(ForkServerProcess):
    """A rank's process, forked from a server."""

    # What a rank starts itself is started in the system's usual way.
    _start_method = None  # type: ignore[assignment]

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        return Popen(process_obj)
