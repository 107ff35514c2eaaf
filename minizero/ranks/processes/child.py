"""One rank, seen from its parent."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from minizero.ranks.processes.failures import RankError
from minizero.ranks.processes.output import Printer
from minizero.ranks.processes.starting import start
from minizero.ranks.processes.tasks import Reply
from minizero.ranks.processes.worker import Surroundings, serve

PACKAGE = str(Path(__file__).parents[2]) + os.sep
PATIENCE = 2.0  # seconds that an interrupted rank has to come back
LEAVE = 10.0  # seconds that ranks have to end when they are told to


class Child:
    """A rank's process, the pipes to it, and what it has printed."""

    def __init__(
        self, rank: int, ranks: int, folder: Path, surroundings: Surroundings
    ) -> None:
        self.rank = rank
        self.printer = Printer(rank)
        self.tasks, tasks = Pipe()
        reader, writer = Pipe(duplex=False)
        os.set_blocking(reader.fileno(), False)
        self.output: Connection | None = reader
        self._stack = folder / f"stack{rank}"
        try:
            self.process = start(
                serve, rank, ranks, folder, surroundings, tasks, writer
            )
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

    def receive(self) -> Reply | None:
        """The reply that has arrived; None if the rank has ended instead."""
        try:
            reply: Reply = pickle.loads(self.tasks.recv_bytes())
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
        """Sends a signal to the rank, if it is ready for one.

        Not to what it has started. Until it is observed, any would end it.
        """
        if self._stack.exists() and self.process.pid is not None and self.alive():
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
        if code == 255 and self._runs_on():
            return "lost: the process that ranks are forked from has ended."
        if code is None or code >= 0:
            return f"left with exit code {code} before it had finished."
        names = {int(number): number.name for number in signal.Signals}
        short = code == -signal.SIGKILL
        hint = " The system does that when memory runs out." if short else ""
        return f"was killed by {names.get(-code, f'signal {-code}')}.{hint}"

    def _runs_on(self) -> bool:
        """Whether it is there, though multiprocessing has lost it and says 255."""
        with contextlib.suppress(OSError):
            os.kill(self.process.pid or 0, 0)
            return True
        return False

    def ask_position(self) -> None:
        """Lets the rank write down where its program is, even if it is blocked."""
        self.signal(signal.SIGUSR1)

    def position(self) -> str:
        """Where its program was when last asked, or ""."""
        stack = self._stack.read_text() if self._stack.exists() else ""
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', stack)
        # Readers know the lines of their program, not of the libraries below it.
        below = re.compile(rf"^{re.escape(PACKAGE)}|/lib/python3")
        own = [frame for frame in frames if not below.search(frame[0])]
        return "line {1} of {2} ({0})".format(*own[0]) if own else ""
