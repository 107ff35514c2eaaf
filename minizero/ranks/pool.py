"""Pools of ranks: processes that run one function after another together.

What they print appears in rank order, whatever goes wrong becomes one error that says
what and where, and nothing is left behind, however it ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import util
from multiprocessing.connection import Pipe, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from . import worker
from .rendezvous import START, check_timeout, choose_backend, join
from .reports import Post, explain, posted, verdict
from .worker import Reply

LOOK, PATIENCE, LEAVE = 0.25, 1.0, 10.0  # seconds
GONE = "\n\nAll ranks were ended, and their names are gone."
HERE = "127.0.0.1"
Process: type[BaseProcess] = multiprocessing.get_context("forkserver").Process
"""What starts a rank; "fork" has one too, for a parent of one thread with torch."""


class RankError(RuntimeError):
    """Something went wrong on a rank; `rank`: which one, None if they hang together."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: not the parent's frames."""
        return [f"{type(self).__name__}: {self}"]


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Inside, processes do not run the caller's script, as multiprocessing has them do.

    With cloudpickle functions travel, and a script needs no `__name__ == "__main__"`.
    """
    modules = ["torch", "cloudpickle", __name__]  # imported once, not by each rank
    if torch.version.cuda is None:  # else it may use a GPU, before the fork
        modules.append("torch._dynamo")
    multiprocessing.set_forkserver_preload(modules)
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Child:
    """A rank seen from its parent: its process, pipes to it, what it has printed."""

    def __init__(self, rank: int, folder: str, environment: dict[str, str]) -> None:
        self.rank, self.text, self._rest = rank, "", b""
        self.tasks, tasks = Pipe()
        self.output, output = Pipe(duplex=False)
        os.set_blocking(self.output.fileno(), False)
        self._given = tasks, output
        self.process = Process(
            target=worker.serve, args=(rank, folder, environment, *self._given)
        )

    def start(self) -> None:
        """Start the process, and close its ends of the pipes here."""
        self.process.start()
        for end in self._given:
            end.close()

    def read(self, to_the_end: bool) -> bool:
        """Take the lines that the rank has printed, each behind its number.

        `to_the_end`: also a last one that does not end. Returns whether any has come.
        """
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(self.output.fileno(), 1 << 20)  # more than a pipe holds
        # a progress bar's line ends with \r
        lines = re.split(rb"(?<=\n)|(?<=\r)(?=[^\n])", self._rest + data)
        self._rest = lines.pop()
        if to_the_end and self._rest:
            lines, self._rest = [*lines, self._rest + b"\n"], b""
        for line in lines:
            self.text += f"[rank {self.rank}] {line.decode('utf-8', 'replace')}"
        return bool(data)

    def receive(self) -> Reply | None:
        """The reply that has arrived; None if the rank has ended instead."""
        try:
            return pickle.loads(self.tasks.recv_bytes())
        except (EOFError, OSError):
            self.process.join(LEAVE)
        self.kill()  # a rank that lives on, but has closed its pipe, is lost too
        return None

    def how_it_ended(self) -> str:
        """Its exit code or signal, in words that follow the rank's name."""
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"left with exit code {code} before it had finished."
        hint = " The system does that when memory runs out." * (code == -signal.SIGKILL)
        return f"was killed by {signal.Signals(-code).name}.{hint}"

    def kill(self) -> None:
        """Kill the rank and all that it has started."""
        if self.process.pid is None:  # an interrupt came before its number did:
            self.tasks.send_bytes(b"")  # if it has started, it ends
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not have made its process group yet


def _end(children: list[Child]) -> None:
    usual = signal.getsignal(signal.SIGINT)
    mine = threading.current_thread() is threading.main_thread() and usual is not None
    if mine:  # who presses Ctrl-C again would keep it from ending them
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for each in children:
            each.kill()
        for each in children:
            if each.process.pid is not None:
                each.process.join()
            each.tasks.close()
            each.output.close()
        children.clear()
    finally:
        if mine:
            signal.signal(signal.SIGINT, usual)


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
        self._children: list[Child] = []
        self._replies: dict[int, Reply] = {}
        self._end = partial(_end, self._children)
        # before multiprocessing waits for them, and not in a fork of this process
        util.Finalize(self, self._end, exitpriority=0)
        try:
            store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
            self._board = PrefixStore("minizero/watch/0", store)
            # as under torchrun
            own = dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], str(nprocs))
            own |= {"MASTER_ADDR": HERE, "MASTER_PORT": str(store.port)}
            own |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            own |= {"TORCHELASTIC_RESTART_COUNT": "0"}
            with _starting():
                nested = multiprocessing.parent_process()  # then it is its parent's
                folder = "" if nested else util.get_temp_dir()
                for rank in range(nprocs):
                    # in the list first: if it is interrupted as it starts, it must end
                    self._children.append(Child(rank, folder, os.environ | own))
                    self._children[-1].start()
            # the parent, which can explain a hang, should speak before torch gives up
            self.call(worker.pack(join, backend, self.timeout + 3600), START)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close() if kind is None else self._end()

    @property
    def alive(self) -> bool:
        """Whether all ranks are there to take a task."""
        alive = [each.process.is_alive() for each in self._children]
        return bool(alive) and all(alive)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; returns the results.

        Raises:
            RankError: a rank has raised, ended or hung. If every rank has come back the
                pool lives on. If not it has ended, as after any error of the parent,
                KeyboardInterrupt included: a rank that waits for another in a
                collective cannot be called back.
        """
        try:
            return self.call(worker.pack(function, *args, **kwargs))
        except RankError as error:
            if not self._children:
                raise RankError(f"{error}{GONE}", error.rank) from None
            raise

    def close(self) -> None:
        """End the ranks. To close them again does nothing."""
        try:
            if self.alive:
                limit = time.monotonic() + LEAVE
                self._send(b"")
                for each in self._children:
                    each.process.join(max(0.0, limit - time.monotonic()))
                self._show(set())
        finally:
            self._end()

    def call(self, task: bytes, timeout: float | None = None) -> list[Any]:
        """Give a task to the ranks, and stay with them until all have replied."""
        if not self._children:
            raise RuntimeError("these ranks have ended; start new ones.")
        try:
            self._follow(task, timeout or self.timeout)
        except BaseException:  # a later reply would answer another task
            self._end()
            raise
        if self._failed():
            raise RankError(*self._cause())
        results = [self._replies.pop(rank).result for rank in range(self.size)]
        return [cloudpickle.loads(each) for each in results]

    def _send(self, task: bytes) -> None:
        self._replies.clear()
        for each in self._children:
            with contextlib.suppress(OSError):  # it is dead, as will be noticed
                each.tasks.send_bytes(task)

    def _working(self) -> set[int]:
        return set(range(self.size)) - set(self._replies)

    def _failed(self) -> dict[int, Reply]:
        return {r: each for r, each in self._replies.items() if each.result is None}

    def _follow(self, task: bytes, timeout: float) -> None:
        """Wait for all replies to a task; raise RankError when they cannot come."""
        since = active = looked = time.monotonic()  # before any rank can report
        self._send(task)
        while self._working():
            if self._listen():
                active = time.monotonic()
            now = time.monotonic()
            dead = [each for each in self._children if not each.process.is_alive()]
            for each in dead:
                self._replies[each.rank] = Reply(now, summary=each.how_it_ended())
            failed = self._failed().values()
            # others may come back too, or the end be noticed that an echo follows from
            patience = LEAVE if all(each.is_echo for each in failed) else PATIENCE
            late = any(now - each.time > patience for each in failed)
            why, rank = "", None
            if dead or (late and self._working()):
                why, rank = self._cause()
            elif not failed and now - looked > LOOK:
                looked = now
                why = self._examine(since, active, timeout)
            if why:
                self._show(set())
                raise RankError(why, rank)

    def _listen(self) -> bool:
        """Wait a moment for replies and output; whether there was any."""
        tasks = {self._children[rank].tasks: rank for rank in self._working()}
        outputs = [c.output for c in self._children if c.process.is_alive()]
        ready = wait([*tasks, *outputs], LOOK)
        for pipe, rank in tasks.items():
            if pipe in ready and (reply := self._children[rank].receive()):
                self._replies[rank] = reply
        # what a rank has printed before its reply is in its pipe by now
        return self._show(self._working()) or any(pipe in ready for pipe in tasks)

    def _show(self, working: set[int]) -> bool:
        """Print in rank order, up to the first rank at work; whether anything came."""
        came = [each.read(each.rank not in working) for each in self._children]
        for each in self._children:
            sys.stdout.write(each.text)
            each.text = ""
            if each.rank in working:
                break
        sys.stdout.flush()
        return any(came)

    def _examine(self, since: float, active: float, timeout: float) -> str:
        """Why the ranks at work will not return, and what each does; "" if they may."""
        posts = posted(self._board, self.size)
        for rank, post in posts.items():
            # what a rank has posted may be older than its reply
            own = self._replies.get(rank, post)
            made = [each for each in own.reports if each.time >= since]
            posts[rank] = Post(time.monotonic(), made, post.line)
        why = verdict(posts, self._working(), active, timeout)
        return why and explain(why, posts, self._working())

    def _cause(self) -> tuple[str, int]:
        """The likely cause of all failures, the first that is no echo, and its rank."""
        failed = self._failed()
        first = min(failed.values(), key=lambda reply: (reply.is_echo, reply.time))
        alike = sorted(r for r, each in failed.items() if each.summary == first.summary)
        who = f"rank{'s' * (len(alike) > 1)} {', '.join(map(str, alike))}"
        return f"{who} {first.summary}\n\n{first.details}".strip(), alike[0]


def launch(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    backend: str | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs `fn(*args, **kwargs)` on `nprocs` ranks; returns their results.

    The function may be defined anywhere, a notebook cell included. What the
    ranks print is shown in rank order, behind the number of the rank.

    Args:
        fn: the function; it and its arguments must pickle (with cloudpickle).
        nprocs, backend, timeout: as for `Pool`.

    Raises:
        TypeError, ValueError: an argument makes no sense or cannot be
            pickled.
        RankError: a rank has raised, ended or hung. The others have been
            ended.
    """
    task = worker.pack(fn, *args, **kwargs)
    with Pool(nprocs, backend, timeout) as pool:
        return pool.call(task)


def default_ranks() -> int:
    """Ranks to start when nobody says: MINIZERO_RANKS, the GPUs, or 4.

    Raises:
        ValueError: MINIZERO_RANKS is not a positive number.
    """
    wanted = os.environ.get("MINIZERO_RANKS", str(torch.cuda.device_count() or 4))
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ValueError(
            f"MINIZERO_RANKS is {wanted!r}; set it to a number of ranks, such as 4."
        )
    return int(wanted)
