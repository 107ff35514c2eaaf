"""One rank, seen from its parent."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from types import ModuleType

import torch.multiprocessing

from . import worker
from .output import Printer

PACKAGE = str(Path(__file__).parents[1]) + os.sep
PATIENCE = 2.0  # seconds that an interrupted rank has to come back
LEAVE = 10.0  # seconds that ranks have to end when they are told to


def _context() -> ForkServerContext | SpawnContext:
    """How a rank's process comes to be.

    To import torch takes seconds. A server does it once, and ranks are forked from it.
    It has nothing of this process: no CUDA, which does not survive a fork, no threads,
    and no module of the reader's, so ranks import those as they are now. The libraries
    of other systems than Linux do not survive a fork either, so there each rank starts
    from nothing.
    """
    if sys.platform != "linux":
        return torch.multiprocessing.get_context("spawn")
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "cloudpickle"])
    return context


class Child:
    """A rank's process, the pipes to it, and what it has printed."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        context = _context()
        self.rank = rank
        self.printer = Printer(rank)
        self.tasks, tasks = context.Pipe()
        reader, writer = context.Pipe(duplex=False)
        os.set_blocking(reader.fileno(), False)
        self.output: Connection | None = reader
        self._stack = folder / f"stack{rank}"
        self.process = context.Process(
            target=worker.serve,
            args=(rank, ranks, folder, dict(os.environ), tasks, writer),
        )
        self.process.start()
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
        if code is None or code >= 0:
            return f"left with exit code {code} before it had finished."
        names = {int(number): number.name for number in signal.Signals}
        short = code == -signal.SIGKILL
        hint = " The system does that when memory runs out." if short else ""
        return f"was killed by {names.get(-code, f'signal {-code}')}.{hint}"

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


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Within it, new ranks are deaf to Ctrl-C and do not run the caller's script.

    A Ctrl-C is put off until the end, lest a rank be left half started. Multiprocessing
    runs the script again in every process, to have its functions there; with
    cloudpickle they travel, and a script needs no `if __name__ == "__main__"`.
    """
    resource_tracker.ensure_running()  # started later, it would unblock the signal
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Other threads of this process may get the signal all the same.
    pressed: list[int] = []
    handled = threading.current_thread() is threading.main_thread()
    if handled:
        before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handled:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if pressed:
        raise KeyboardInterrupt
