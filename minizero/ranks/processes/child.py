"""One rank, seen from its parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from minizero.ranks.processes import worker
from minizero.ranks.processes.failures import LOST, RankError
from minizero.ranks.processes.interrupts import uninterrupted
from minizero.ranks.processes.output import Printer

if sys.platform == "linux":
    from minizero.ranks.processes import forking
    from minizero.ranks.processes.forking import Process
else:
    Process = multiprocessing.get_context("spawn").Process

PACKAGE = str(Path(__file__).parents[1]) + os.sep
PATIENCE = 2.0  # seconds that an interrupted rank has to come back
LEAVE = 10.0  # seconds that ranks have to end when they are told to


def prepare() -> None:
    """Makes ready what a start of ranks needs, if it takes long.

    To import torch takes seconds, so on Linux a server does it once, and ranks are
    forked from that. The libraries of other systems do not survive a fork; there each
    rank starts from nothing.
    """
    if sys.platform == "linux":
        forking.SERVERS.current()


class Child:
    """A rank's process, the pipes to it, and what it has printed."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank = rank
        self.printer = Printer(rank)
        self.tasks, tasks = Pipe()
        reader, writer = Pipe(duplex=False)
        os.set_blocking(reader.fileno(), False)
        self.output: Connection | None = reader
        self._stack = folder / f"stack{rank}"
        self.process: BaseProcess = Process(
            target=worker.serve,
            args=(rank, ranks, folder, dict(os.environ), tasks, writer),
        )
        try:
            self.process.start()
        except OSError as error:
            self.tasks.close()
            reader.close()
            raise RankError(f"rank {rank} cannot be started: {error}.", rank) from None
        finally:
            tasks.close()
            writer.close()

    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process.is_alive()

    def send(self, task: bytes) -> None:
        """Hands over a task. If the rank is dead, whoever waits for it will notice."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.tasks.send_bytes(task)

    def receive(self) -> worker.Reply | None:
        """The reply that has arrived; None if the rank has ended instead."""
        try:
            reply: worker.Reply = pickle.loads(self.tasks.recv_bytes())
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            self.kill()  # a rank that lives on, but has closed its pipe, is lost too
            return None
        return reply

    def read_output(self) -> bool:
        """Moves what the rank has written to its printer; False if there was none."""
        if self.output is None:
            return False
        try:
            data = os.read(self.output.fileno(), 1 << 20)  # more than a pipe holds
        except BlockingIOError:
            return False
        if not data:
            self.output.close()
            self.output = None
        self.printer.feed(data)
        return bool(data)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the rank, but not to what it has started."""
        if self.process.pid is not None and self.alive():
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kills the rank and all it has started."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()  # it may not have made its process group yet

    def how_it_ended(self) -> str:
        """Its exit code or signal, in words that follow the rank's name."""
        code = self.process.exitcode
        if code == LOST:
            return "lost: the process that ranks are forked from has ended."
        if code is None or code >= 0:
            before = "" if self._stack.exists() else self._said()
            return f"left with exit code {code} before it had finished.{before}"
        names = {int(number): number.name for number in signal.Signals}
        short = code == -signal.SIGKILL
        hint = " The system does that when memory runs out." if short else ""
        return f"was killed by {names.get(-code, f'signal {-code}')}.{hint}"

    def _said(self) -> str:
        """What a rank has printed that could not start; its output goes to nobody."""
        said = getattr(getattr(self.process, "_popen", None), "said", str)()
        return f"\n\n{said}".rstrip()

    def ask_position(self) -> None:
        """Lets the rank write down where its program is, even if it is blocked."""
        if self._stack.exists():  # otherwise it is not ready for the signal
            self.signal(signal.SIGUSR1)

    def position(self) -> str:
        """Where its program was when last asked, or ""."""
        stack = self._stack.read_text() if self._stack.exists() else ""
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', stack)
        # Readers know the lines of their program, not of the libraries below it.
        below = re.compile(rf"^{re.escape(PACKAGE)}|/lib/python3")
        own = [frame for frame in frames if not below.search(frame[0])]
        return "line {1} of {2} ({0})".format(*own[0]) if own else ""


_turn = threading.RLock()  # else a thread could put another's `__main__` back


def _renew() -> None:
    """In a fork of this process: a thread that had the turn is not there."""
    global _turn
    _turn = threading.RLock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Within it, new ranks are deaf to Ctrl-C and do not run the caller's script.

    A Ctrl-C is put off until the end, lest a rank be left half started. Multiprocessing
    runs the script again in every process, to have its functions there; with
    cloudpickle they travel, and a script needs no `if __name__ == "__main__"`.
    """
    resource_tracker.ensure_running()  # started later, it would unblock the signal
    with _turn, uninterrupted():
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        chosen = multiprocessing.get_start_method(allow_none=True)
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            # to start a process chooses a method, which the program may do later
            multiprocessing.set_start_method(chosen, force=True)
