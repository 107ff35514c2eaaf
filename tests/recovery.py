"""A training job that outlives its ranks: it restores or starts, trains, saves.

    torchrun --max-restarts 3 tests/recovery.py '{"folder": "run"}'

`folder/losses` gets a line for each event, in the order in which they happen:
"life 6 2" when the job begins at step 6, on 2 ranks; "loss 6 0x1.6..." when it has made
that step; "saved 8" when the checkpoint before step 8 is known to be complete.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from minizero import Plan, checkpoint, comm, parallelize
from minizero.lab.models.gpt import GPT, Block, GPTConfig, decay_groups
from minizero.precision import MixedPrecision
from minizero.ranks import init_distributed, rank, world_size
from minizero.zero import DataParallel

ROWS, VOCABULARY, SEQUENCE = 12, 19, 8  # 12 sequences divide over 1, 2, 3, 4 ranks


@dataclass(frozen=True)
class Job:
    """What to train, how often to save it.

    folder: for checkpoints and losses.
    every: steps between two checkpoints. keep: how many of them stay.
    background: whether a save is written while training goes on.
    dropout: draws on each rank's random state. On another number of ranks other
        numbers are drawn, so losses can be compared there only without it.
    hold: a step that waits until the folder has a file named "go".
    """

    folder: str
    stage: int = 3
    steps: int = 12
    every: int = 2
    keep: int = 2
    background: bool = False
    dropout: float = 0.0
    fp16: bool = False
    hold: int | None = None


@dataclass
class History:
    """What a job has written down: of each life its first step and its ranks; of each
    step all its losses; the step before which the newest complete save was made."""

    lives: list[tuple[int, int]]
    losses: dict[int, set[float]]
    saved: int = 0


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
    net = parallelize(model, optimizer, Plan.stage(job.stage), precision=precision)
    torch.manual_seed(1 + rank())
    return net


def batch(step: int) -> Tensor:
    """This rank's sequences of a step: a function of the step, so it needs no state."""
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS, SEQUENCE + 1)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    return tokens.chunk(world_size())[rank()]


def train(job: Job, at: Callable[[str], object] = lambda moment: None) -> None:
    """Train to the end, from the newest checkpoint if there is one.

    at: called on each rank with "load", "step" or "save", as each begins.
    """
    folder = Path(job.folder)
    saves, first = folder / "checkpoints", 0
    at("load")
    net = build(job)
    schedule = torch.optim.lr_scheduler.ExponentialLR(net.optimizer, 0.99)
    if checkpoint.exists(saves):
        extra = checkpoint.load(net, saves).extra
        schedule.load_state_dict(extra["schedule"])
        first = extra["step"]
    note(folder, f"life {first} {world_size()}")
    saving: checkpoint.Saving | None = None
    for step in range(first, job.steps):
        at("step")
        while step == job.hold and not (folder / "go").exists():
            time.sleep(0.05)
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
            complete(folder, saving)
            at("save")
            saving = checkpoint.save(
                net,
                saves,
                f"step{step + 1}",
                extra={"step": step + 1, "schedule": schedule.state_dict()},
                keep=job.keep,
                background=job.background,
            )
            if not job.background:
                complete(folder, saving)
    complete(folder, saving)


def complete(folder: Path, saving: checkpoint.Saving | None) -> None:
    """Wait for a save, and write down that it is complete."""
    if saving is not None:
        saving.wait()
        note(folder, f"saved {saving.path.name.removeprefix('step')}")


def note(folder: Path, line: str) -> None:
    """Add a line to the log. One write: a kill leaves all of it or nothing."""
    if rank() == 0:
        with open(folder / "losses", "ab", buffering=0) as log:
            log.write(f"{line}\n".encode())


def history(folder: str | Path) -> History:
    """What the job in `folder` has written down so far."""
    seen, path = History([], {}), Path(folder, "losses")
    for line in path.read_text().splitlines() if path.exists() else ():
        what, step, *value = line.split()
        if what == "loss":
            seen.losses.setdefault(int(step), set()).add(float.fromhex(value[0]))
        elif what == "saved":
            seen.saved = int(step)
        else:
            seen.lives.append((int(step), int(value[0])))
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    init_distributed("gloo", options.pop("timeout", None))
    train(Job(**options))
