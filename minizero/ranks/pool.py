"""Pools of ranks: processes that run one function after another together.

What they print appears in rank order, whatever goes wrong becomes one error that says
what and where, and nothing is left behind, however it ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing import util
from multiprocessing.connection import Pipe, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from . import worker
from .rendezvous import TIMEOUT, choose_backend, join
from .reports import Post, verdict
from .worker import Reply

LOOK = 0.25  # seconds after which ranks are looked at, though they are silent
PATIENCE = 1.0  # seconds that others have to come back when one has failed
LEAVE = 10.0  # seconds that ranks have to leave, or the cause of a failure to appear
START = 600.0  # seconds that ranks may take to start: importing torch is slow
# starts a rank; a parent that has imported torch and has one thread may set fork's
Process: type[BaseProcess] = multiprocessing.get_context("forkserver").Process


class RankError(RuntimeError):
    """Something went wrong on a rank; `rank`: which one, None if they hang together."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: not the parent's frames."""
        return [f"{type(self).__name__}: {self}"]


@contextlib.contextmanager
def _without_main_script() -> Iterator[None]:
    """Keep processes that start inside from importing the caller's script again.

    Functions travel by cloudpickle, so a script needs no `__name__ == "__main__"`.
    """
    # the fork server imports these once; none may start CUDA, which survives no fork
    core = [m for m in sys.modules if re.match(r"minizero\.(?!lab)", m)]
    modules = [__name__] if torch.cuda.is_available() else ["torch._dynamo", *core]
    multiprocessing.set_forkserver_preload(modules)
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Child:
    """A rank seen from its parent: its process, what it has printed and sent."""

    def __init__(self, rank: int, folder: str, environment: dict[str, str]) -> None:
        self.rank, self.text, self._rest = rank, "", b""
        self.post, self.reply = Post(), None  # type: tuple[Post, Reply | None]
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

    def send(self, task: bytes) -> None:
        """Give it a task, or with an empty one let it leave."""
        self.post, self.reply = Post(), None
        with contextlib.suppress(OSError):  # it is dead, as will be noticed
            self.tasks.send_bytes(task)

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

    def receive(self) -> None:
        """Take what it has posted or replied; end it if it has closed its pipe."""
        try:
            self.post, self.reply = self.tasks.recv()
        except (EOFError, OSError):
            self.process.join(LEAVE)
            self.kill()  # a rank that lives on is lost too

    def how_it_ended(self) -> str:
        """Its exit code or signal, in words that follow the rank's name."""
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"left with exit code {code} before it had finished."
        hint = " The system does that when memory runs out." * (code == -signal.SIGKILL)
        return f"was killed by {signal.Signals(-code).name}.{hint}"

    def kill(self) -> None:
        """Kill the rank and all that it has started."""
        if self.process.pid is None:  # an interrupt came before its number did;
            return  # if it has started, it ends as its pipe is closed
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not have made its process group yet


def _end(children: list[Child]) -> None:
    mine = threading.current_thread() is threading.main_thread()
    # who presses Ctrl-C again would keep it from ending them
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN) if mine else None
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

    They also end when the object is gone, and with their parent, even if it is killed.
    Raises ValueError for arguments that make no sense, RankError if a rank cannot start.
    """

    def __init__(
        self, nprocs: int, backend: str | None = None, timeout: float = TIMEOUT
    ) -> None:
        if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
            raise ValueError(f"nprocs is {nprocs!r}; give a number of ranks from 1 on.")
        backend = choose_backend(backend, nprocs)
        self.size, self.timeout = nprocs, timeout
        self._children: list[Child] = []
        self._end = partial(_end, self._children)
        # before multiprocessing waits for them, and not in a fork of this process
        util.Finalize(self, self._end, exitpriority=0)
        try:
            # the ranks meet here, as under torchrun
            self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            own = dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], str(nprocs))
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
            own |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            with _without_main_script():
                # within a rank the folder is its parent's, which still needs it
                folder = "" if multiprocessing.parent_process() else util.get_temp_dir()
                for rank in range(nprocs):
                    # in the list first: if it is interrupted as it starts, it must end
                    self._children.append(Child(rank, folder, os.environ | own))
                    self._children[-1].start()
            # the parent, which can explain a hang, should speak before torch gives up
            last = timedelta(seconds=timeout + 3600)
            self.call(worker.pack(join, backend, last), START)
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
        """Call `function(*args, **kwargs)` on every rank; returns the results in order.

        RankError if a rank raised, ended or hung. The pool lives on if every rank came
        back, with a result or an error. Otherwise it has ended, as no one can interrupt
        a rank that waits in a collective; an error here, Ctrl-C too, also ends it.
        """
        return self.call(worker.pack(function, *args, **kwargs))

    def close(self) -> None:
        """End the ranks. To close them again does nothing."""
        try:
            if self.alive:
                limit = time.monotonic() + LEAVE
                for each in self._children:
                    each.send(b"")
                for each in self._children:
                    each.process.join(max(0.0, limit - time.monotonic()))
                self._show(to_the_end=True)
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
        results = [each.reply.result for each in self._children if each.reply]
        return [cloudpickle.loads(each) for each in results if each]

    def _failed(self) -> list[tuple[int, Reply]]:
        return [(c.rank, r) for c in self._children if (r := c.reply) and not r.result]

    def _follow(self, task: bytes, timeout: float) -> None:
        """Wait for all replies to a task; raise RankError when they cannot come.

        It raises at once if one died, soon if one failed, else when posts prove it.
        """
        for each in self._children:
            each.send(task)
        active = time.monotonic()
        while running := [each for each in self._children if each.reply is None]:
            outputs = [c.output for c in self._children if c.process.is_alive()]
            ready = wait([*(each.tasks for each in running), *outputs], LOOK)
            for each in running:
                if each.tasks in ready:
                    each.receive()
            # what a rank has printed before its reply is in its pipe by now
            if self._show() or any(each.reply for each in running):
                active = time.monotonic()
            now = time.monotonic()
            dead = [each for each in self._children if not each.process.is_alive()]
            for each in dead:
                each.reply = Reply(now, summary=each.how_it_ended())
            failed = [reply for _, reply in self._failed()]
            patience = LEAVE if all(r.is_consequence for r in failed) else PATIENCE
            late = any(now - reply.time > patience for reply in failed)
            left = {each.rank for each in self._children if each.reply is None}
            why, rank = "", None
            if dead or (late and left):
                why, rank = self._cause()
            elif not failed:
                posts = {each.rank: each.post for each in self._children}
                why = verdict(posts, left, active, timeout)
            if why:
                self._show(to_the_end=True)
                raise RankError(f"{why}\n\nAll ranks were ended.", rank)

    def _show(self, to_the_end: bool = False) -> bool:
        """Print in rank order, up to the first rank at work; whether anything came."""
        came, is_next = False, True
        for each in self._children:
            is_over = to_the_end or each.reply is not None
            came |= each.read(is_over)
            if is_next:
                sys.stdout.write(each.text)
                each.text = ""
            is_next &= is_over
        sys.stdout.flush()
        return came

    def _cause(self) -> tuple[str, int]:
        """The likely cause, the first failure that is no consequence, and its rank."""
        failed = self._failed()
        _, first = min(failed, key=lambda each: (each[1].is_consequence, each[1].time))
        alike = [rank for rank, each in failed if each.summary == first.summary]
        who = f"rank{'s' * (len(alike) > 1)} {', '.join(map(str, alike))}"
        return f"{who} {first.summary}\n\n{first.details}".strip(), alike[0]


def launch(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    backend: str | None = None,
    timeout: float = TIMEOUT,
    **kwargs: Any,
) -> list[Any]:
    """Runs `fn(*args, **kwargs)` on `nprocs` ranks; returns their results.

    The function may be defined anywhere, also in a notebook's cell; it and its arguments
    must pickle (with cloudpickle). What ranks print is shown in rank order, each line
    behind its rank. `backend`, `timeout`, errors: as for `Pool`.
    """
    task = worker.pack(fn, *args, **kwargs)
    with Pool(nprocs, backend, timeout) as pool:
        return pool.call(task)


def default_ranks() -> int:
    """Ranks to start when nobody says: MINIZERO_RANKS, the GPUs, or 4."""
    return int(os.environ.get("MINIZERO_RANKS") or torch.cuda.device_count() or 4)
