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
from torch import nn

from minizero import Plan, checkpoint, comm, parallelize
from minizero.checkpoint import exists, read_extra
from minizero.lab.models.gpt import GPT, GPTConfig, decay_groups
from minizero.precision import MixedPrecision
from minizero.ranks import rank, world_size
from minizero.zero import DataParallel

RANKS, KEEP = 2, 2  # ranks of a job, checkpoints that it keeps
OPERATIONS = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir")


@dataclass(frozen=True)
class Job:
    """What to train, up to step `steps`, with a checkpoint before step `save`.

    folder: for checkpoints and the log. background: whether the save is written while
    training goes on. dropout: draws on each rank's random state. victim: the rank that
    counts; it is killed alone, or with all others (`everyone`).
    """

    folder: Path
    stage: int = 3
    fp16: bool = False
    dropout: float = 0.0
    background: bool = False
    victim: int = 0
    everyone: bool = False
    steps: int = 100  # more than there will be in all lives
    save: int = 100


def jobs(root: Path) -> list[Job]:
    return [
        Job(root / "all", everyone=True, dropout=0.1),
        Job(root / "rank 0", stage=2, fp16=True, dropout=0.1),
        Job(root / "rank 1", stage=1, victim=1),
        Job(root / "behind", stage=2, background=True, everyone=True),
        Job(root / "behind, rank 1", background=True, victim=1),
    ]


def build(job: Job) -> DataParallel:
    """A small GPT with dropout, under the plan."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(2, 16, 2, sequence=8, vocabulary=19))
    for block in model.blocks:
        block.mlp = nn.Sequential(block.mlp, nn.Dropout(job.dropout))
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1e-2)
    precision = MixedPrecision(torch.float16) if job.fp16 else None
    net = parallelize(model, optimizer, Plan.stage(job.stage), precision=precision)
    torch.manual_seed(1 + rank())
    return net


def train(job: Job, at: Callable[[str], object]) -> None:
    """From the newest checkpoint, if there is one. `at`: called as each part begins.

    The log gets "loss 6 0x1.6..." after step 6, and "saved 8" when the checkpoint
    before step 8 is known to be complete.
    """
    at("load")
    net, saves, first = build(job), job.folder / "checkpoints", 0
    schedule = torch.optim.lr_scheduler.ExponentialLR(net.optimizer, 0.99)
    if exists(saves):
        extra = checkpoint.load(net, saves).extra
        schedule.load_state_dict(extra["schedule"])
        first = extra["step"]
    for step in range(first, job.steps):
        at("step")
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(19, (4, 9), generator=generator)
        tokens = tokens.chunk(world_size())[rank()]
        loss = net(tokens[:, :-1], tokens[:, 1:])
        net.backward(loss)
        net.clip_grad_norm(1.0)
        if net.step():
            schedule.step()
        mean = loss.detach().clone().view(1)
        comm.all_reduce(mean)
        note(job.folder, f"loss {step} {mean.item().hex()}")
        if step + 1 == job.save:
            at("save")
            extra = {"step": step + 1, "schedule": schedule.state_dict()}
            options = {"keep": KEEP, "background": job.background}
            tag = f"step{step + 1}"
            checkpoint.save(net, saves, tag, extra=extra, **options)
    if first < job.save <= job.steps:
        checkpoint.finish()
        note(job.folder, f"saved {job.save}")


def note(folder: Path, line: str) -> None:
    """Add a line to the log. One write: a kill leaves all of it or nothing."""
    if rank() == 0:
        with open(folder / "log", "ab", buffering=0) as log:
            log.write(f"{line}\n".encode())


def history(folder: Path) -> tuple[set[tuple[str, str]], int]:
    """The losses (step, value) of all lives so far; the newest save that was noted."""
    path = folder / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    words = [line.split() for line in lines]
    losses = {(w[1], w[2]) for w in words if w[0] == "loss"}
    return losses, max((int(w[1]) for w in words if w[0] == "saved"), default=0)


def counted(call: Callable[..., Any], count: Any, last: int, everyone: bool) -> Any:
    """The same function, until the process ends in call number `last` of all."""

    def counting(*args: Any, **options: Any) -> Any:
        if next(count) == last:
            os.kill(0 if everyone else os.getpid(), signal.SIGKILL)
        return call(*args, **options)

    return counting


def be_rank(job: Job, r: int, last: int | None) -> None:
    """The life of a rank; it never returns."""
    code = 1
    try:
        log = os.open(job.folder / f"errors-{r}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 2)
        store = dist.FileStore(str(job.folder / "store"), RANKS)
        dist.init_process_group(
            "gloo", store=store, rank=r, world_size=RANKS, timeout=timedelta(seconds=60)
        )
        # or the survivors of a kill before the first save would wait for their timeout
        comm.gather_objects("the ranks make the group for this")
        at: Callable[[str], object] = str
        if last is not None and r == job.victim:
            death = itertools.count(), last, job.everyone
            for name in OPERATIONS:
                setattr(os, name, counted(getattr(os, name), *death))
            at = counted(at, *death)
        train(job, at)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            # as at a script's end: a save under way is written, or given up
            threading._shutdown()  # type: ignore[attr-defined]
        os._exit(code)


def live(job: Job, last: int | None) -> list[int]:
    """The exit statuses of a life's ranks, negative for signals; they form a group."""
    (job.folder / "store").unlink(missing_ok=True)
    pids: list[int] = []
    for r in range(RANKS):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            be_rank(job, r, last)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def sweep(job: Job) -> int:
    """Kill a job at every moment; how often. AssertionError: what is wrong."""
    saves = job.folder / "checkpoints"
    whole = replace(job, folder=job.folder.with_name(f"{job.folder.name}, whole"))
    for each in (whole, job):
        each.folder.mkdir(parents=True)
    assert not any(live(whole, None))
    expected, before = history(whole.folder)[0], 0
    for last in itertools.count():
        # one step, a save, and one more step, which is beside it in the background
        codes = live(replace(job, save=before + 1, steps=before + 2), last)
        case = f"{job}, killed at {last}: {codes}, from {before}"
        killed = codes[job.victim] == -signal.SIGKILL
        assert killed or not any(codes), case
        losses, saved = history(job.folder)
        # all files of the newest checkpoint are verified
        found = int(read_extra(saves)["step"]) if exists(saves) else 0
        assert losses <= expected, f"{case}: other losses"
        assert found >= max(before, saved), f"{case}: back to {found}"
        if not killed:
            # nothing of the killed saves is left, and so many of the others
            left = sorted(path.name for path in saves.iterdir())
            kept = [f"step{step}" for step in range(1, found + 1)][-KEEP:]
            assert found == before + 1, f"{case}: {found}"
            assert left == sorted(["latest", *kept]), f"{case}: {left}"
            return last
        before = found
    raise AssertionError("unreachable")


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    build(Job(Path("unused"), stage=0))  # imports what an optimizer needs, for all
    os.fsync = lambda fd: None  # a kill undoes nothing that was written
    gc.freeze()  # or each fork would copy what its collector looks at
    print(json.dumps([sweep(job) for job in jobs(Path(sys.argv[1]))]))
