"""Kills training runs at random moments, and sees what they leave behind.

    python tests/kills.py FOLDER KILLS SEED

A life of a run is a fork of this process, which has imported torch already: it costs
a fraction of a second where a new process costs several. Half of the kills come at any
moment of a life, the other half while a checkpoint is being saved; half hit the whole
process group, the others one rank, whose survivors must then end by themselves. After
each kill everything that the run promises is checked; the next life goes on from there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import random
import signal
import struct
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from recovery import Job, build, history, train

from minizero.checkpoint import exists

STEPS, KEEP = 40, 2
ENDING = 30.0  # seconds that survivors may take to notice and to end
PHASES = ("start", "load", "step", "save", "end")

# ranks, and what differs from the default job
RUNS: list[tuple[int, dict[str, Any]]] = [
    (1, {"stage": 0, "every": 1}),
    (2, {"stage": 3, "every": 1, "dropout": 0.1}),
    (2, {"stage": 1, "every": 2, "background": True}),
    (1, {"stage": 2, "every": 1, "background": True, "fp16": True}),
    (2, {"stage": 2, "every": 1, "fp16": True, "dropout": 0.1}),
]


@dataclass
class Seen:
    """What a rank tells its parent through memory that both have: phase and step."""

    memory: mmap.mmap
    rank: int = 0

    def tell(self, what: str, step: int) -> None:
        struct.pack_into("ii", self.memory, 8 * self.rank, PHASES.index(what), step)

    def read(self) -> tuple[str, int]:
        phase, step = struct.unpack_from("ii", self.memory, 0)
        return PHASES[phase], step


def live(job: Job, ranks: int, store: Path, seen: Seen) -> list[int]:
    """Fork the ranks of one life; gives their process ids, the group is the first's."""
    store.unlink(missing_ok=True)
    seen.memory[:] = bytes(len(seen.memory))
    pids: list[int] = []
    for r in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            be_rank(job, r, ranks, store, Seen(seen.memory, r))
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    return pids


def be_rank(job: Job, r: int, ranks: int, store: Path, seen: Seen) -> None:
    """The life of a rank; it never returns."""
    code = 1
    try:
        log = os.open(f"{job.folder}/errors-{r}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), ranks),
            rank=r,
            world_size=ranks,
            timeout=timedelta(seconds=20),
        )
        train(job, seen.tell)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            # as at a script's end: a save under way is written, or given up
            threading._shutdown()  # type: ignore[attr-defined]
        os._exit(code)


def ended(pids: list[int], seconds: float) -> dict[int, int]:
    """Exit statuses of those that end in time; negative for signals."""
    codes: dict[int, int] = {}
    until = time.monotonic() + seconds
    while len(codes) < len(pids) and time.monotonic() < until:
        for pid in set(pids) - codes.keys():
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return codes


class Broken(Exception):
    """A promise that was not kept."""


def expect(kept: bool, promise: str) -> None:
    if not kept:
        raise Broken(promise)


def newest(folder: Path) -> int:
    """The step of the checkpoint that `latest` names; all of its files are complete."""
    step = 0
    for path in indexes(folder):
        index = json.loads(path.read_bytes())["index"]
        for name, length, crc32 in index["files"]:
            data = (path.parent / name).read_bytes()
            expect(len(data) == length, f"{name} has {len(data)} bytes")
            expect(zlib.crc32(data) == crc32, f"{name} has another checksum")
        step = max(step, int(index["tag"].removeprefix("step")))
    if (folder / "latest").exists():
        named = int((folder / "latest").read_text().removeprefix("step"))
        expect(step in (named, named + 1, named + 2), f"latest is {named}, not {step}")
        step = named
    return step


def indexes(folder: Path) -> list[Path]:
    """Of every checkpoint that counts."""
    return [p for p in folder.glob("*/index.json") if ".tmp-" not in p.parent.name]


def check_folder(folder: Path, ranks: int) -> int:
    """No more files than checkpoints to keep, and of one save that was not finished.

    It was cut off by this kill, or by the one before if this life came to no save.
    Returns how many files there are.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]
    finished = (KEEP + 1) * (ranks + 1) + 1  # files, index; `latest`
    unfinished = ranks + 1  # files, and what is to be renamed
    listing = sorted(str(path.relative_to(folder)) for path in files)
    expect(len(files) <= finished + unfinished, f"{len(files)} files: {listing}")
    expect(len(indexes(folder)) <= KEEP + 1, f"too many checkpoints: {listing}")
    return len(files)


def check(job: Job, ranks: int, reference: dict[int, float]) -> tuple[int, int]:
    """What must hold whenever a run has ended; gives its newest step, and files."""
    folder, seen = Path(job.folder, "checkpoints"), history(job.folder)
    wrong = [step for step, loss in seen.losses.items() if loss != reference[step]]
    expect(not wrong and not seen.differing, f"other losses at steps {wrong}")
    step = newest(folder) if exists(folder) else 0
    expect(step >= seen.saved, f"step {seen.saved} was saved, and {step} is found")
    behind = len(seen.losses) - step
    allowed = job.every * (2 if job.background else 1)
    expect(behind <= allowed, f"{behind} steps are lost, of at most {allowed}")
    return step, check_folder(folder, ranks)


def a_moment(job: Job, seen: Seen, pids: list[int], chance: random.Random) -> None:
    """Wait until a random moment of a life."""
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0, 0.8))
        return
    # in a save: a number of saves from now, and as long into it as saves take
    skip, last = chance.randrange(4), -1
    until = time.monotonic() + 10
    while time.monotonic() < until:
        phase, step = seen.read()
        if phase == "save" and step != last:
            last, skip = step, skip - 1
            if skip < 0:
                break
        if phase == "end":
            break
        time.sleep(0.0005)
    time.sleep(chance.uniform(0, 0.06))


def references(runs: list[tuple[int, Job]], store: Path) -> Iterator[dict[int, float]]:
    """The losses of each run when nobody kills it."""
    for ranks, job in runs:
        job = replace(job, folder=f"{job.folder}-unbroken", every=STEPS + 1)
        Path(job.folder).mkdir()
        pids = live(job, ranks, store, Seen(mmap.mmap(-1, 8 * ranks)))
        codes = ended(pids, 240)
        errors = Path(job.folder, "errors-0").read_text()
        expect(list(codes.values()) == [0] * ranks, f"{codes} {errors}")
        yield history(job.folder).losses


def rampage(root: Path, kills: int, seed: int) -> Counter[str]:
    """Kill so many times; returns what was hit. Raises Broken."""
    chance, count = random.Random(seed), Counter[str]()
    store = root / "store"
    runs = [
        (ranks, Job(folder=str(root / f"run{i}"), steps=STEPS, keep=KEEP, **options))
        for i, (ranks, options) in enumerate(RUNS)
    ]
    unbroken = list(references(runs, store))
    number = 0
    while count["kills"] < kills:
        which = count["kills"] % len(runs)
        ranks, job = runs[which]
        Path(job.folder).mkdir(exist_ok=True)
        before = check(job, ranks, unbroken[which])[0]
        seen = Seen(mmap.mmap(-1, 8 * ranks))
        pids = live(job, ranks, store, seen)
        a_moment(job, seen, pids, chance)
        phase, step = seen.read()
        alone = ranks > 1 and chance.random() < 0.5
        victim = chance.randrange(ranks)
        if alone:
            os.kill(pids[victim], signal.SIGKILL)
        else:
            os.killpg(pids[0], signal.SIGKILL)
        codes = ended(pids, ENDING)
        for pid in set(pids) - codes.keys():
            os.kill(pid, signal.SIGUSR1)  # let it say where it hangs
            time.sleep(1)
        lives = history(job.folder)
        what = f"{ranks} ranks, {job}, {phase} {step}, {alone=}, {victim=}, {codes}"
        try:
            expect(len(codes) == ranks, "a rank has not ended")
            expect(all(codes.values()) or phase == "end", "nobody was killed")
            found, files = check(job, ranks, unbroken[which])
            begun = len(lives.starts) and phase not in ("start", "load")
            expect(not begun or lives.starts[-1] == before, "another start")
            expect(found >= before, f"from step {before} back to {found}")
        except Broken as error:
            left = [str(p.relative_to(root)) for p in Path(job.folder).rglob("*")]
            errors = [p.read_text() for p in Path(job.folder).glob("errors-*")]
            all_there_is = [str(error), what, *sorted(left), *errors]
            raise Broken("\n".join(all_there_is)) from None
        finally:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        count["kills"] += 1
        count["of one rank" if alone else "of the whole group"] += 1
        count[f"in phase {phase}"] += 1
        count[f"with {ranks} ranks"] += 1
        count["most files"] = max(count["most files"], files)
        if found == STEPS:
            count["runs that came to their end"] += 1
            expect(sorted(lives.losses) == list(range(STEPS)), "a step is missing")
            number += 1
            Path(job.folder).rename(root / f"done{number}")
    return count


def main() -> None:
    root, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    root.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    build(Job("unused", stage=0))  # imports what an optimizer needs, once for all
    print(json.dumps(rampage(root, kills, seed)))


if __name__ == "__main__":
    main()
