"""Kills training jobs at every moment of a save, and sees what they leave behind.

    python tests/kills.py FOLDER

A life of a job is a fork of this process, which has imported torch already. It loads,
trains, saves and trains on; one rank counts all that it does to files, and before
operation number n it kills itself, or all ranks. The next life goes on from what is
there, with a larger n, until one comes through: so its lives pass every moment. After
each one all that the job promises is checked.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from recovery import Job, build, history, train

from minizero import comm
from minizero.checkpoint import exists, read_extra

KEEP = 2  # checkpoints
OPERATIONS = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir")


@dataclass(frozen=True)
class Hunt:
    """A job, the rank that counts, and whether all ranks are killed or it alone."""

    job: Job
    ranks: int
    victim: int = 0
    everyone: bool = False


def hunts(root: Path) -> dict[str, Hunt]:
    def job(name: str, **options: Any) -> Job:
        return Job(str(root / name), keep=KEEP, every=1, **options)

    dropout: dict[str, Any] = {"dropout": 0.1}
    return {
        "all": Hunt(job("all", **dropout), 2, everyone=True),
        "rank 0": Hunt(job("rank 0", stage=2, fp16=True, **dropout), 2),
        "rank 1": Hunt(job("rank 1", stage=1), 2, victim=1),
        "behind": Hunt(job("behind", stage=2, background=True), 2, everyone=True),
        "behind, rank 1": Hunt(job("behind 1", background=True), 2, victim=1),
    }


def counted(call: Callable[..., Any], count: Any, last: int, everyone: bool) -> Any:
    """The same function, until the process ends in call number `last` of all."""

    def counting(*args: Any, **options: Any) -> Any:
        if next(count) == last:
            os.kill(0 if everyone else os.getpid(), signal.SIGKILL)
        return call(*args, **options)

    return counting


def be_rank(hunt: Hunt, r: int, last: int | None) -> None:
    """The life of a rank; it never returns."""
    code = 1
    try:
        folder = Path(hunt.job.folder)
        log = os.open(folder / f"errors-{r}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 2)
        store = dist.FileStore(str(folder / "store"), hunt.ranks)
        options = {
            "rank": r,
            "world_size": hunt.ranks,
            "timeout": timedelta(seconds=60),
        }
        dist.init_process_group("gloo", store=store, **options)
        # or the survivors of a kill before the first save would wait for their timeout
        comm.gather_objects("the ranks make the group for this")
        at: Callable[[str], object] = str
        if last is not None and r == hunt.victim:
            death = itertools.count(), last, hunt.everyone
            for name in OPERATIONS:
                setattr(os, name, counted(getattr(os, name), *death))
            at = counted(at, *death)
        train(hunt.job, at)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            # as at a script's end: a save under way is written, or given up
            threading._shutdown()  # type: ignore[attr-defined]
        os._exit(code)


def live(hunt: Hunt, last: int | None) -> list[int]:
    """The exit statuses of a life's ranks, negative for signals; they form a group."""
    Path(hunt.job.folder, "store").unlink(missing_ok=True)
    pids: list[int] = []
    for r in range(hunt.ranks):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            be_rank(hunt, r, last)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def newest(folder: Path) -> int:
    """The step of the newest checkpoint, after all its files were verified."""
    return int(read_extra(folder)["step"]) if exists(folder) else 0


def sweep(hunt: Hunt) -> int:
    """Kill a job at every moment; how often. AssertionError: what is wrong."""
    job, saves = hunt.job, Path(hunt.job.folder, "checkpoints")
    steps = 100  # more than the job will make in all its lives
    whole = replace(job, folder=f"{job.folder}, whole", every=steps, steps=steps)
    for each in (whole, job):
        Path(each.folder).mkdir(parents=True)
    assert not any(live(replace(hunt, job=whole), None))
    expected = history(whole.folder).losses
    for last in itertools.count():
        before = newest(saves)
        # one step, a save, and one more step, which is beside it in the background
        this = replace(job, every=before + 1, steps=before + 2)
        codes = live(replace(hunt, job=this), last)
        case = f"{hunt}, killed at {last}: {codes}, from {before}"
        killed = codes[hunt.victim] == -signal.SIGKILL
        assert killed or not any(codes), case
        seen, found = history(job.folder), newest(saves)
        assert seen.losses.items() <= expected.items(), f"{case}: other losses"
        assert found >= max(before, seen.saved), f"{case}: back to {found}"
        if not killed:
            # nothing of the killed saves is left, and so many of the others
            left = sorted(path.name for path in saves.iterdir())
            kept = [f"step{step}" for step in range(1, found + 1)][-KEEP:]
            assert found == before + 1, f"{case}: {found}"
            assert left == sorted(["latest", *kept]), f"{case}: {left}"
            return last
    raise AssertionError("unreachable")


def main() -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    build(Job("unused", stage=0))  # imports what an optimizer needs, once for all
    os.fsync = lambda fd: None  # a kill undoes nothing that was written
    gc.freeze()  # or each fork would copy what its collector looks at
    found = hunts(Path(sys.argv[1])).items()
    kills = {name: sweep(hunt) for name, hunt in found}
    print(json.dumps(kills))


if __name__ == "__main__":
    main()
