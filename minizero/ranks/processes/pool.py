"""All the ranks together, from the parent's side.

`Processes` promises three things: what the ranks print appears in rank order; whatever
goes wrong becomes one error that says what and where; and nothing is left behind,
however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle

from minizero.ranks.processes import failures, tasks
from minizero.ranks.processes.child import LEAVE, PATIENCE, Child
from minizero.ranks.processes.failures import GRACE, LOOK, RankError, Run
from minizero.ranks.processes.output import in_order
from minizero.ranks.processes.starting import starting
from minizero.ranks.processes.status_board import Board
from minizero.ranks.processes.tasks import Reply
from minizero.ranks.processes.worker import Surroundings

if TYPE_CHECKING:
    from typing import Self

GONE = "All ranks were ended, and their names are gone."

_open: weakref.WeakSet[Processes] = weakref.WeakSet()


@atexit.register  # before multiprocessing, which would wait for them
def _end_all() -> None:
    for each in list(_open):
        each._end()


def _end(children: list[Child], folder: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # in a fork of the ranks' parent
    for each in children:
        each.kill()
    for each in children:
        each.process.join()
        each.tasks.close()
    children.clear()
    shutil.rmtree(folder, ignore_errors=True)


class Processes:
    """Live processes, numbered by rank, that run functions together.

    Args:
        size: how many.
        timeout: seconds without progress after which a call counts as hanging.

    They end with `close`, at the end of a `with` block, when nobody holds the object
    any more, and with their parent, even if that is killed.
    """

    def __init__(self, size: int, timeout: float) -> None:
        if multiprocessing.current_process().daemon:
            raise RuntimeError(
                "ranks are processes, and this process may not start any: it was itself "
                "started with daemon=True (as a DataLoader's workers are); start it "
                "with daemon=False"
            )
        self.size = size
        self.timeout = timeout
        self._cells = 0
        self._folder = Path(tempfile.gettempdir(), f"minizero-{uuid.uuid4().hex}")
        self._children: list[Child] = []
        # To be called, by whoever comes first: close, the garbage collector, the exit.
        held = self._children, self._folder, os.getpid()
        self._end = weakref.finalize(self, _end, *held)
        self._end.atexit = False
        _open.add(self)
        around = Surroundings.here()
        with self._ended_by_errors(), starting():
            for rank in range(size):
                self._children.append(Child(rank, size, self._folder, around))
            # Only now, since from now on there are ranks that would remove it.
            self._folder.mkdir(mode=0o700)
            self._board = Board(self._folder / "board", size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    @property
    def alive(self) -> bool:
        """Whether all ranks are there to take a task."""
        return bool(self._children) and all(each.alive() for each in self._children)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `function(*args, **kwargs)` on every rank, or on those in `ranks`.

        Returns:
            The results, in the order of `ranks`.

        Raises:
            RankError: a rank has raised, ended or hung. If every rank has come back the
                pool lives on; if not it has ended, and the message says so.
            KeyboardInterrupt: the parent was interrupted, and with it every rank.
        """
        return self.call(tasks.pack(function, *args, **kwargs), ranks)

    def execute(
        self, source: str, ranks: Sequence[int] | None = None
    ) -> list[str | None]:
        """Runs code in the lasting namespace of each rank, as a notebook runs a cell.

        Returns:
            The repr of the last expression on each rank, which the rank prints too;
            None where there is none.
        """
        self._cells += 1
        return self.run(tasks.execute, source, f"<cell {self._cells}>", ranks=ranks)

    def pull(self, name: str) -> list[Any]:
        """The value of a variable of the lasting namespace, from each rank."""
        return self.run(tasks.lookup, name)

    def close(self) -> None:
        """Lets the ranks end by themselves, and kills those that do not."""
        for each in self._children:
            each.send(b"")
        run = Run([], LEAVE, keep=False)
        limit = run.started + LEAVE
        while any(c.alive() for c in self._children) and time.monotonic() < limit:
            self._listen(run)
        self._end()

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _chosen(self, ranks: Sequence[int] | None) -> list[int]:
        chosen = list(range(self.size) if ranks is None else ranks)
        known = all(rank in range(self.size) for rank in chosen)
        if not chosen or not known or len(set(chosen)) < len(chosen):
            there = f"one or more of 0 to {self.size - 1}, each once"
            raise ValueError(f"ranks is {ranks!r}; name {there}.")
        return chosen

    def call(
        self,
        task: bytes,
        ranks: Sequence[int] | None = None,
        keep: bool = True,
        timeout: float | None = None,
    ) -> list[Any]:
        """Gives a task to the ranks, and stays with them until all have replied."""
        if not self._children:
            raise RuntimeError("these ranks have ended; start new ones.")
        run = Run(self._chosen(ranks), timeout or self.timeout, keep)
        interrupt: KeyboardInterrupt | None = None
        with self._ended_by_errors():
            for rank in run.ranks:
                self._children[rank].send(task)
            try:
                while run.waiting or run.unexplained():
                    self._listen(run)
                    self._examine(run)
            except KeyboardInterrupt as pressed:
                if run.receiving:
                    raise
                interrupt = pressed
            if interrupt and not self._recall(run):
                raise KeyboardInterrupt(
                    f"Ranks {sorted(run.waiting)} did not react to the interrupt. {GONE}"
                )
        if interrupt:
            raise KeyboardInterrupt("The ranks were interrupted.")
        if run.failures:
            raise run.error()
        return [self._unpacked(rank, run.results[rank]) for rank in run.ranks]

    def _listen(self, run: Run) -> None:
        """Waits a moment for replies and output, and prints what can be printed."""
        replies = {c.tasks: c for c in self._children if c.rank in run.waiting}
        outputs = [c.output for c in self._children if c.output is not None]
        ends = [c.process.sentinel for c in self._children if c.alive()]
        ready = wait([*replies, *outputs, *ends], LOOK)
        run.receiving = True
        for pipe, each in replies.items():
            if pipe in ready and (reply := each.receive()):
                run.enter(each.rank, reply)
        run.receiving = False
        # What a rank has printed before its reply is in its pipe by now.
        self._read(run)
        self._print(run)

    def _read(self, run: Run) -> None:
        for each in self._children:
            if each.read_output():
                run.active = time.monotonic()

    def _print(self, run: Run) -> None:
        if text := in_order([c.printer for c in self._children], run.waiting):
            sys.stdout.write(text)
            sys.stdout.flush()

    def _examine(self, run: Run) -> None:
        """Raises if the call cannot end well any more."""
        dead = [each for each in self._children if not each.alive()]
        for each in dead:
            ended = Reply(time.monotonic(), summary=each.how_it_ended())
            run.enter(each.rank, ended)
        if dead or (run.failures and self._stuck(run)):
            self._fail(run, run.error())
        if not run.failures and (why := failures.verdict(run, self._board)):
            self._fail(run, RankError("\n".join([why, *self._story(run)])))

    def _story(self, run: Run) -> list[str]:
        """What each rank is doing, a line each."""
        at_work = [self._children[rank] for rank in run.waiting]
        for each in at_work:
            each.ask_position()
        time.sleep(LOOK)  # until they have answered
        where = {each.rank: each.position() for each in at_work}
        return [
            failures.describe(run, self._board, rank, where.get(rank, ""))
            for rank in range(self.size)
        ]

    def _stuck(self, run: Run) -> bool:
        """Whether ranks do not come back after another has failed."""
        since = run.since_failure()
        if not run.waiting or since < GRACE:
            return False
        if not run.keep or failures.all_blocked(run, self._board):
            return True
        # A rank may sleep, or wait where we cannot see it.
        return since > PATIENCE and not self._recall(run)

    def _recall(self, run: Run) -> bool:
        """Interrupts the ranks at work; whether all have come back.

        Again and again, since a rank ignores what comes before it has begun its task.
        """
        limit = time.monotonic() + PATIENCE
        while run.waiting and time.monotonic() < limit:
            for rank in run.waiting:
                self._children[rank].signal(signal.SIGINT)
            self._listen(run)
        return not run.waiting

    def _fail(self, run: Run, error: RankError) -> NoReturn:
        """Raises, after all that was printed is shown. The caller ends the ranks."""
        self._read(run)
        run.waiting.clear()
        self._print(run)
        raise RankError(f"{error}\n\n{GONE}", error.rank) if run.keep else error

    def _unpacked(self, rank: int, result: bytes) -> Any:
        try:
            return cloudpickle.loads(result)
        except Exception as error:
            message = f"the result of rank {rank} cannot be unpickled here: {error}"
            raise RankError(message, rank) from error
