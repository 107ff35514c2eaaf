"""All the ranks together, from the parent's side.

`Processes` promises three things: what the ranks print appears in rank order; whatever
goes wrong becomes one error that says what and where; and nothing is left behind,
however it ends.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import util
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle

from minizero.ranks.processes import failures as faults
from minizero.ranks.processes import worker
from minizero.ranks.processes.child import LEAVE, PATIENCE, Child, prepare, starting
from minizero.ranks.processes.failures import GRACE, LOOK, Call, RankError
from minizero.ranks.processes.output import in_order
from minizero.ranks.processes.status_board import Board
from minizero.ranks.processes.worker import pack

if TYPE_CHECKING:
    from typing_extensions import Self


def _end(children: list[Child], folder: Path) -> None:
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
        self.size = size
        self.timeout = timeout
        self._cells = 0
        self._folder = Path(tempfile.gettempdir(), f"minizero-{uuid.uuid4().hex}")
        self._children: list[Child] = []
        # To be called, by whoever comes first: close, the garbage collector, the exit.
        shared = (self._children, self._folder)
        self._end = util.Finalize(self, _end, shared, exitpriority=10)
        prepare()
        with self._ended_by_errors(), starting():
            for rank in range(size):
                self._children.append(Child(rank, size, self._folder))
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
        return self._call(pack(function, *args, **kwargs), ranks)

    def execute(
        self, source: str, ranks: Sequence[int] | None = None
    ) -> list[str | None]:
        """Runs code in the lasting namespace of each rank, as a notebook runs a cell.

        Returns:
            The repr of the last expression on each rank, which the rank prints too;
            None where there is none.
        """
        self._cells += 1
        return self.run(worker.execute, source, f"<cell {self._cells}>", ranks=ranks)

    def pull(self, name: str) -> list[Any]:
        """The value of a variable of the lasting namespace, from each rank."""
        return self.run(worker.lookup, name)

    def close(self) -> None:
        """Lets the ranks end by themselves, and kills those that do not."""
        for each in self._children:
            each.send(b"")
        call = Call([], LEAVE, keep=False)
        while self._living() and time.monotonic() - call.started < LEAVE:
            self._listen(call)
        self._end()

    def _living(self) -> list[Child]:
        return [each for each in self._children if each.alive()]

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

    def _call(
        self,
        task: bytes,
        ranks: Sequence[int] | None = None,
        keep: bool = True,
        timeout: float | None = None,
    ) -> list[Any]:
        """Gives a task to the ranks, and stays with them until all have replied."""
        if not self._children:
            raise RuntimeError("these ranks have ended; start new ones.")
        call = Call(self._chosen(ranks), timeout or self.timeout, keep)
        stopped = False
        with self._ended_by_errors():
            for rank in call.ranks:
                self._children[rank].send(task)
            try:
                while call.waiting or call.unexplained():
                    self._listen(call)
                    self._examine(call)
            except KeyboardInterrupt:
                if call.receiving:
                    raise
                self._stop(call)
                stopped = True
        if stopped:
            raise KeyboardInterrupt("The ranks were interrupted.")
        if call.failures:
            raise call.error()
        return [self._unpacked(rank, call.results[rank]) for rank in call.ranks]

    def _listen(self, call: Call) -> None:
        """Waits a moment for replies and output, and prints what can be printed."""
        replies = {c.tasks: c for c in self._children if c.rank in call.waiting}
        outputs = [c.output for c in self._children if c.output is not None]
        ends = [c.process.sentinel for c in self._living()]
        ready = wait([*replies, *outputs, *ends], LOOK)
        call.receiving = True
        for tasks, each in replies.items():
            if tasks in ready and (reply := each.receive()):
                call.enter(each.rank, reply)
        call.receiving = False
        # What a rank has printed before its reply is in its pipe by now.
        for each in self._children:
            if each.read_output():
                call.progress = time.monotonic()
        self._print(call)

    def _print(self, call: Call) -> None:
        if text := in_order([c.printer for c in self._children], call.waiting):
            sys.stdout.write(text)
            sys.stdout.flush()

    def _examine(self, call: Call) -> None:
        """Raises if the call cannot end well any more."""
        dead = [each for each in self._children if not each.alive()]
        for each in dead:
            call.died(each.rank, each.how_it_ended())
        if dead or (call.failures and self._stuck(call)):
            self._fail(call, call.error())
        if not call.failures and (why := faults.verdict(call, self._board)):
            self._fail(call, RankError("\n".join([why, *self._story(call)])))

    def _story(self, call: Call) -> list[str]:
        """What each rank is doing, a line each."""
        at_work = [self._children[rank] for rank in call.waiting]
        for each in at_work:
            each.ask_position()
        time.sleep(LOOK)  # until they have answered
        where = {each.rank: each.position() for each in at_work}
        board = self._board
        return [
            faults.describe(call, board, rank, where.get(rank, ""))
            for rank in range(self.size)
        ]

    def _stuck(self, call: Call) -> bool:
        """Whether ranks have had their time to come back after another has failed."""
        since = call.since_failure()
        if not call.waiting or since < GRACE:
            return False
        if not call.keep or faults.all_blocked(call, self._board):
            return True
        if since > PATIENCE and not call.interrupted:
            self._interrupt(call)  # it may sleep, or wait where we cannot see it
        return since > 2 * PATIENCE

    def _interrupt(self, call: Call) -> None:
        call.interrupted = True
        for rank in call.waiting:
            self._children[rank].signal(signal.SIGINT)

    def _stop(self, call: Call) -> None:
        """Interrupts the ranks because the user has interrupted their parent."""
        self._interrupt(call)
        limit = time.monotonic() + PATIENCE
        while call.waiting and time.monotonic() < limit:
            self._listen(call)
        if call.waiting:
            raise KeyboardInterrupt(
                f"Ranks {sorted(call.waiting)} did not react to the interrupt. "
                "All ranks were ended, and their names are gone."
            ) from None

    def _fail(self, call: Call, error: RankError) -> NoReturn:
        """Raises, after all that was printed is shown. The caller ends the ranks."""
        for each in self._children:
            each.read_output()
        call.waiting.clear()
        self._print(call)
        if call.keep:
            gone = "All ranks were ended, and their names are gone."
            error = RankError(f"{error}\n\n{gone}", error.rank)
        raise error

    def _unpacked(self, rank: int, result: bytes) -> Any:
        try:
            return cloudpickle.loads(result)
        except Exception as error:
            message = f"the result of rank {rank} cannot be unpickled here: {error}"
            raise RankError(message, rank) from error
