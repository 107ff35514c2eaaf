"""A training job that outlives its ranks: it restores or starts, trains, saves.

    torchrun --max-restarts 3 tests/recovery.py FOLDER --kill 7:1

`FOLDER/losses` gets a line for each event, in the order in which they happen:
"start 0 2" or "resume 6 2" when the job begins at a step, on 2 ranks; "loss 6 0x1.6..."
when it has made one; "saved 8" when the checkpoint before step 8 is known to be whole.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minizero import checkpoint, comm
from minizero.checkpoint import Saving, exists
from minizero.lab.models.gpt import GPT, Block, GPTConfig, decay_groups
from minizero.memory.plan import Plan
from minizero.precision.mixed import MixedPrecision
from minizero.ranks.launch import init_distributed, rank, world_size
from minizero.zero.data_parallel import DataParallel
from minizero.zero.parallelize import parallelize

ROWS, VOCABULARY, SEQUENCE = 12, 19, 8  # 12 sequences divide over 1, 2, 3, 4 ranks


@dataclass(frozen=True)
class Job:
    """What to train and how often to save it.

    folder: for checkpoints and losses.
    every: steps between two checkpoints. keep: how many of them stay.
    background: whether a save is written while training goes on.
    dropout: draws on each rank's random state. At another number of ranks other
        numbers are drawn, so losses can be compared there only without it.
    """

    folder: str
    stage: int = 3
    steps: int = 12
    every: int = 2
    keep: int = 2
    background: bool = False
    dropout: float = 0.0
    fp16: bool = False


@dataclass
class History:
    """What a job has written down, over all its lives.

    losses: by step. starts: the step where each life began; the first is 0.
    ranks: of each life.
    saved: the step before which the newest checkpoint known to be whole was made.
    made: steps made in each life. differing: steps whose losses two lives disagree on.
    """

    losses: dict[int, float]
    starts: list[int]
    ranks: list[int]
    made: list[int]
    saved: int
    differing: list[int]


def build(job: Job) -> DataParallel:
    """A small GPT with dropout, under the plan."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(2, 16, 2, sequence=SEQUENCE, vocabulary=VOCABULARY))
    for block in model.blocks:
        assert isinstance(block, Block)
        dropping = nn.Sequential(block.mlp, nn.Dropout(job.dropout))
        block.register_module("mlp", dropping)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1e-2)
    precision = MixedPrecision(torch.float16) if job.fp16 else None
    plan = Plan.stage(job.stage)
    net = parallelize(model, optimizer, plan, precision=precision)
    torch.manual_seed(1 + rank())
    return net


def batch(step: int) -> Tensor:
    """This rank's sequences of a step: a function of the step, so it needs no state."""
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS, SEQUENCE + 1)
    return torch.randint(VOCABULARY, shape, generator=generator).chunk(world_size())[
        rank()
    ]


def train(job: Job, at: Callable[[str, int], None] = lambda what, step: None) -> None:
    """Train to the end, from the newest checkpoint if there is one.

    at: called on each rank with "load", "step" or "save" and the step, as each begins.
    """
    folder = Path(job.folder)
    at("load", 0)
    net = build(job)
    schedule = torch.optim.lr_scheduler.ExponentialLR(net.optimizer, 0.99)
    first = restore(net, schedule, folder)
    note(folder, f"{'resume' if first else 'start'} {first} {world_size()}")
    saving: Saving | None = None
    for step in range(first, job.steps):
        at("step", step)
        tokens = batch(step)
        loss = net(tokens[:, :-1], tokens[:, 1:])
        net.backward(loss)
        net.clip_grad_norm(1.0)
        if net.step():
            schedule.step()
        mean = loss.detach().clone().view(1)
        comm.all_reduce(mean)
        note(folder, f"loss {step} {(mean.item() / world_size()).hex()}")
        if (step + 1) % job.every == 0:
            at("save", step + 1)
            if saving:
                saving.wait()
                note(folder, f"saved {saving.path.name.removeprefix('step')}")
            saving = save(net, schedule, folder, step + 1, job)
    if saving:
        saving.wait()
        note(folder, f"saved {saving.path.name.removeprefix('step')}")
    at("end", job.steps)


def restore(net: DataParallel, schedule: Any, folder: Path) -> int:
    """The step to begin with: the newest checkpoint's, or 0."""
    if not exists(folder / "checkpoints"):
        return 0
    loaded = checkpoint.load(net, folder / "checkpoints")
    schedule.load_state_dict(loaded.extra["schedule"])
    step: int = loaded.extra["step"]
    return step


def save(net: DataParallel, schedule: Any, folder: Path, step: int, job: Job) -> Saving:
    """Begin a checkpoint of all that `step` and the ones after it depend on."""
    return checkpoint.save(
        net,
        folder / "checkpoints",
        f"step{step}",
        extra={"step": step, "schedule": schedule.state_dict()},
        keep=job.keep,
        background=job.background,
    )


def note(folder: Path, line: str) -> None:
    """Add a line to the log. One write: a kill leaves all of it or nothing."""
    if rank() == 0:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        log = os.open(folder / "losses", flags, 0o644)
        os.write(log, f"{line}\n".encode())
        os.close(log)


def history(folder: str | Path) -> History:
    """What the job in `folder` has written down so far."""
    seen = History({}, [], [], [], 0, [])
    path = Path(folder, "losses")
    for line in path.read_text().splitlines() if path.exists() else ():
        what, step, *value = line.split()
        if what == "loss":
            loss = float.fromhex(value[0])
            if seen.losses.setdefault(int(step), loss) != loss:
                seen.differing.append(int(step))
            seen.made[-1] += 1
        elif what == "saved":
            seen.saved = int(step)
        else:
            seen.starts.append(int(step))
            seen.ranks.append(int(value[0]))
            seen.made.append(0)
    return seen


def interruption(
    folder: Path, kills: Sequence[str], hold: int | None
) -> Callable[[str, int], None]:
    """What happens to this process as its steps begin.

    kills: "7:1" kills rank 1 at step 7, once: a file in the folder tells the ranks that
        come after.
    hold: a step that waits until the folder has a file named "go".
    """

    def at(what: str, step: int) -> None:
        if what != "step":
            return
        while step == hold and not (folder / "go").exists():
            time.sleep(0.05)
        if f"{step}:{rank()}" in kills:
            with contextlib.suppress(FileExistsError):
                (folder / f"killed-{step}-{rank()}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    return at


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, for torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    for name, default in Job.__dataclass_fields__.items():
        if name not in ("folder", "fp16", "background"):
            kind = type(default.default)
            parser.add_argument(f"--{name}", type=kind, default=default.default)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--kill", action="append", default=[], metavar="STEP:RANK")
    parser.add_argument("--hold", type=int, metavar="STEP", help="wait for FOLDER/go")
    parser.add_argument("--timeout", type=float, help="seconds for a collective")
    options = vars(parser.parse_args(arguments))
    kills, hold, timeout = (options.pop(name) for name in ("kill", "hold", "timeout"))
    torch.set_num_threads(1)
    init_distributed("gloo", timeout)
    job = Job(**options)
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    train(job, interruption(Path(job.folder), kills, hold))


if __name__ == "__main__":
    main()
