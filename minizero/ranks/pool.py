"""Ranks that stay: processes that run one function after another together.

What they print appears in rank order, whatever goes wrong becomes one error that says
what and where, and nothing is left behind, however it ends.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import cloudpickle
import torch
import torch.distributed as dist

from . import worker
from .rendezvous import START, check_timeout, choose_backend, join, leave, use_loopback
from .reports import Report, unlike, verdict
from .watch import ECHO
from .worker import Reply

LOOK, GRACE, PATIENCE, LEAVE = 0.25, 0.5, 2.0, 10.0  # seconds
GONE = "All ranks were ended, and their names are gone."


class RankError(RuntimeError):
    """Something went wrong on a rank; `rank`: which one, None if they hang together."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: not the parent's frames."""
        return [f"{type(self).__name__}: {self}"]


_turn = threading.Lock()  # to start processes


@contextlib.contextmanager
def _starting() -> Iterator[str | None]:
    """Inside, processes do not run the caller's script, as multiprocessing has them do.

    Yields the start method of the processes that ranks start themselves.

    With cloudpickle functions travel, and a script needs no `__name__ == "__main__"`.
    """
    modules = ["torch", "cloudpickle", __name__]  # imported once, not by each rank
    if torch.version.cuda is None:  # else it may use a GPU, before the fork
        modules.append("torch._dynamo")
    with _turn:
        multiprocessing.set_forkserver_preload(modules)
        resource_tracker.ensure_running()
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        chosen = multiprocessing.get_start_method(allow_none=True)
        try:
            yield chosen
        finally:
            sys.modules["__main__"] = main
            # a program may choose its method later
            multiprocessing.set_start_method(chosen, force=True)


class Child:
    """A rank seen from its parent: its process, the pipes to it, what it has printed."""

    def __init__(
        self, rank: int, ranks: int, folders: list[Path], method: str | None
    ) -> None:
        self.rank, self.text, self._fresh = rank, "", True
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.tasks, tasks = Pipe()
        self.output, output = Pipe(duplex=False)
        os.set_blocking(self.output.fileno(), False)
        self.process = multiprocessing.get_context("forkserver").Process(
            target=worker.serve,
            args=(rank, ranks, folders, method, dict(os.environ), tasks, output),
        )
        self.process.start()
        tasks.close()
        output.close()

    def read(self) -> bool:
        """Take what the rank has printed, each line behind its number; whether it has."""
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(self.output.fileno(), 1 << 20)  # more than a pipe holds
        for piece in re.findall(r"\r?\n|\r|[^\r\n]+", self._decode(data)):
            if self._fresh and piece != "\r":
                self.text += f"[rank {self.rank}] "
            self.text += piece
            self._fresh = piece[-1] in "\r\n"
        return bool(data)

    def receive(self) -> Reply | None:
        """The reply that has arrived; None if the rank has ended instead."""
        with contextlib.suppress(EOFError, OSError):
            return pickle.loads(self.tasks.recv_bytes())
        self.process.join(PATIENCE)
        self.kill()  # a rank that lives on, but has closed its pipe, is lost too
        return None

    def how_it_ended(self) -> str:
        """Its exit code or signal, in words that follow the rank's name."""
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"left with exit code {code} before it had finished."
        hint = " The system does that when memory runs out." * (code == -signal.SIGKILL)
        return f"was killed by {signal.Signals(-code).name}.{hint}"

    def signal(self, number: signal.Signals) -> None:
        """Send the rank a signal, and nothing that it has started."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the rank and all that it has started."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()  # it may not have made its process group yet


def _end(children: list[Child], folder: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # in a fork of the ranks' parent
    for each in children:
        each.kill()
    for each in children:
        each.process.join()
        each.tasks.close()
        each.output.close()
    children.clear()
    shutil.rmtree(folder, ignore_errors=True)


class Pool:
    """Ranks that live until they are closed, for one function after another.

    Args:
        nprocs: how many ranks.
        backend: "nccl", "gloo", or None for nccl where each rank has its own GPU. With
            gloo, ranks share the GPUs there are, or compute on the CPU.
        timeout: seconds without progress after which a call counts as hanging. A rank
            makes progress when it enters or leaves a collective, prints or returns.

    They also end when nobody holds the object any more, and with their parent, even if
    that is killed.

    Raises:
        ValueError: an argument makes no sense.
        RankError: a rank could not start.
    """

    def __init__(
        self, nprocs: int, backend: str | None = None, timeout: float | None = None
    ) -> None:
        if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
            raise ValueError(
                f"nprocs is {nprocs!r}; give a number of ranks, 1 or more."
            )
        backend = choose_backend(backend, nprocs)
        self.size, self.timeout = nprocs, check_timeout(timeout)
        self._cells, self._ready = 0, False
        self._folder = folder = Path(tempfile.mkdtemp(prefix="minizero-"))
        self._children: list[Child] = []
        held = self._children, folder, os.getpid()
        self._end = weakref.finalize(self, _end, *held)
        atexit.register(self._end)  # before multiprocessing's, which waits for them
        with self._ended_by_errors():
            with _starting() as method:
                folders = [folder, Path(util.get_temp_dir())]
                for rank in range(nprocs):
                    self._children.append(Child(rank, nprocs, folders, method))
            task = worker.pack(_join, backend, self.timeout, str(folder / "store"))
            self.call(task, timeout=START)
        self._ready = True

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close() if kind is None else self._end()

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._end()
            raise

    @property
    def alive(self) -> bool:
        """Whether all ranks are there to take a task."""
        alive = [each.process.is_alive() for each in self._children]
        return bool(alive) and all(alive)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank, or on those in `ranks`.

        Returns:
            The results, in the order of `ranks`.

        Raises:
            RankError: a rank has raised, ended or hung. If every rank has come back the
                pool lives on; if not it has ended, and the message says so.
            KeyboardInterrupt: the parent was interrupted, and with it every rank.
        """
        return self.call(worker.pack(function, *args, **kwargs), ranks)

    def execute(
        self, source: str, ranks: Sequence[int] | None = None
    ) -> list[str | None]:
        """Run code in the lasting namespace of each rank, as a notebook runs a cell.

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
        """End the ranks. To close them again does nothing."""
        if self.alive:
            with contextlib.suppress(RankError), self._ended_by_errors():
                self.call(worker.pack(_leave), keep=False, timeout=LEAVE)
        for each in self._children:
            with contextlib.suppress(OSError):
                each.tasks.send_bytes(b"")
        limit = time.monotonic() + LEAVE
        while any(c.process.is_alive() for c in self._children):
            self._listen(set(), {})
            if time.monotonic() > limit:
                break
        self._end()
        atexit.unregister(self._end)

    def call(
        self,
        task: bytes,
        ranks: Sequence[int] | None = None,
        keep: bool = True,
        timeout: float | None = None,
    ) -> list[Any]:
        """Give a task to ranks, and stay with them until all have replied.

        `keep`: the ranks are meant to live on after an error.
        """
        if not self._children:
            raise RuntimeError("these ranks have ended; start new ones.")
        chosen = list(range(self.size) if ranks is None else ranks)
        if not chosen or len(set(chosen) & {*range(self.size)}) < len(chosen):
            there = f"one or more of 0 to {self.size - 1}, each once"
            raise ValueError(f"ranks is {ranks!r}; name {there}.")
        waiting, replies = set(chosen), dict[int, Reply]()
        try:
            for rank in chosen:
                with contextlib.suppress(OSError):  # it is dead, as will be noticed
                    self._children[rank].tasks.send_bytes(task)
            self._follow(waiting, replies, timeout or self.timeout, keep)
        except KeyboardInterrupt:
            if not self._ready or not self._recall(waiting, replies):
                self._end()
                stuck = (
                    f"Ranks {sorted(waiting)} did not react to the interrupt. {GONE}"
                )
                raise KeyboardInterrupt(stuck) from None
            raise KeyboardInterrupt("The ranks were interrupted.") from None
        if any(reply.result is None for reply in replies.values()):
            self._fail(replies, ended=False)
        return [self._unpacked(rank, replies[rank]) for rank in chosen]

    def _follow(
        self, waiting: set[int], replies: dict[int, Reply], timeout: float, keep: bool
    ) -> None:
        """Wait for all replies; raise RankError when they cannot come any more."""
        since = active = looked = time.monotonic()
        while waiting:
            if self._listen(waiting, replies):
                active = time.monotonic()
            now = time.monotonic()
            dead = [each for each in self._children if not each.process.is_alive()]
            for each in dead:
                replies[each.rank] = Reply(now, summary=each.how_it_ended())
                waiting.discard(each.rank)
            failed = [each.time for each in replies.values() if each.result is None]
            patience = PATIENCE if keep and self._ready else GRACE
            late = failed and waiting and now - min(failed) > patience
            if dead or (late and not (keep and self._recall(waiting, replies))):
                self._show(set())
                self._fail(replies, ended=True, keep=keep)
            if now - looked > LOOK and not failed:
                looked = now
                if why := self._examine(waiting, since, active, timeout):
                    self._show(set())
                    self._end()
                    raise RankError(why + f"\n\n{GONE}" * keep)

    def _listen(self, waiting: set[int], replies: dict[int, Reply]) -> bool:
        """Wait a moment for replies and output; whether there was any."""
        pipes = {c.tasks: c for c in self._children if c.rank in waiting}
        outputs = [c.output for c in self._children if c.process.is_alive()]
        ends = [c.process.sentinel for c in self._children if c.process.is_alive()]
        ready = wait([*pipes, *outputs, *ends], LOOK)
        for pipe, each in pipes.items():
            if pipe in ready and (reply := each.receive()):
                replies[each.rank] = reply
                waiting.discard(each.rank)
        # what a rank has printed before its reply is in its pipe by now
        return self._show(waiting) or any(pipe in ready for pipe in pipes)

    def _show(self, waiting: set[int]) -> bool:
        """Print in rank order, up to the first rank at work; whether anything came."""
        came = [each.read() for each in self._children]
        for each in self._children:
            if each.rank not in waiting and not each._fresh:
                each.text, each._fresh = each.text + "\n", True
            sys.stdout.write(each.text)
            each.text = ""
            if each.rank in waiting:
                break
        sys.stdout.flush()
        return any(came)

    def _recall(self, waiting: set[int], replies: dict[int, Reply]) -> bool:
        """Interrupt the ranks at work; whether all have come back.

        Again and again, since a rank ignores what comes before its task has begun.
        """
        limit = time.monotonic() + PATIENCE
        while waiting and time.monotonic() < limit:
            for rank in waiting:
                self._children[rank].signal(signal.SIGINT)
            self._listen(waiting, replies)
        return not waiting

    def _fail(
        self, replies: dict[int, Reply], ended: bool, keep: bool = True
    ) -> NoReturn:
        """Raise the likely cause of all failures: the first that is not an echo."""
        failed = [(rank, r) for rank, r in replies.items() if r.result is None]

        def order(failure: tuple[int, Reply]) -> tuple[bool, float]:
            summary = failure[1].summary
            return bool(re.search(ECHO, summary, re.IGNORECASE)), failure[1].time

        first = min(failed, key=order)[1]
        alike = sorted(rank for rank, r in failed if r.summary == first.summary)
        who = f"rank{'s' * (len(alike) > 1)} {', '.join(map(str, alike))}"
        message = f"{who} {first.summary}\n\n{first.details}".strip()
        if ended:
            self._end()
        raise RankError(message + f"\n\n{GONE}" * (ended and keep), alike[0])

    def _examine(
        self, waiting: set[int], since: float, active: float, timeout: float
    ) -> str:
        """Why the ranks at work will never return, with what each does; "" if they may."""
        found: dict[int, tuple[list[Report], str]] = {}
        for rank in range(self.size):
            with contextlib.suppress(OSError):  # it has posted nothing yet
                posted = (self._folder / f"reports{rank}").read_bytes()
                made, position = pickle.loads(posted)
                found[rank] = [each for each in made if each.time >= since], position
        reports = {rank: made for rank, (made, _) in found.items()}
        why = verdict(reports, waiting, active, timeout)
        if not why:
            return ""
        lines, differ = [why], unlike(reports)
        for rank in range(self.size):
            made, position = found.get(rank, ([], ""))
            what = f"{differ.get(rank) or [Report(), *made][-1]}{position}"
            lines.append(f"  rank {rank} {what if rank in waiting else 'has returned'}")
        return "\n".join(lines)

    def _unpacked(self, rank: int, reply: Reply) -> Any:
        try:
            return cloudpickle.loads(reply.result)
        except Exception as error:
            message = f"the result of rank {rank} cannot be unpickled here: {error}"
            raise RankError(message, rank) from error


def default_ranks() -> int:
    """Ranks to start when nobody says: MINIZERO_RANKS, the GPUs, or 4.

    Raises:
        ValueError: MINIZERO_RANKS is not a positive number.
    """
    wanted = os.environ.get("MINIZERO_RANKS")
    if wanted is None:
        return torch.cuda.device_count() or 4
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ValueError(
            f"MINIZERO_RANKS is {wanted!r}; set it to a number of ranks, such as 4."
        )
    return int(wanted)


def _join(backend: str, timeout: float, rendezvous: str) -> None:
    use_loopback()
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS") or cores // int(
        os.environ["WORLD_SIZE"]
    )
    torch.set_num_threads(max(1, int(threads)))
    # the parent, which can explain a hang, should speak long before torch gives up
    join(backend, timeout + 3600, rendezvous)


def _leave() -> None:
    dist.barrier()  # nobody leaves while another still talks
    leave()
