"""The main job's checkpoints: when they are made, and how a killed job goes on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minizero import comm
from minizero.checkpoint import exists, load, read_extra, save
from minizero.ranks.launch import device, world_size
from minizero.zero.data_parallel import DataParallel

if TYPE_CHECKING:
    from minizero.lab.training.job import Job

# what a job that goes on may change: not what its losses depend on
FREE = {"stage", "offload_optimizer", "offload_param", "nvme", "overlap"}
FREE |= {"precision", "checkpointing", "out", "save_every", "keep", "resume"}


class Keeper:
    """Saves a job every `job.save_every` steps, and brings back where it was.

    `before`: mean losses of the steps that earlier lives of the job made.
    """

    def __init__(self, net: DataParallel, schedule: Any, job: Job) -> None:
        self.net, self.schedule, self.job = net, schedule, job
        self.before = torch.empty(0)

    def restore(self) -> int:
        """Load the newest checkpoint, if the job resumes; the step to go on with."""
        folder = checkpoints_of(self.job)
        if not self.job.resume or not exists(folder):
            return 0
        extra = load(self.net, folder).extra
        self.schedule.load_state_dict(extra["schedule"])
        self.before = extra["losses"]
        return len(self.before)

    def losses(self, made: list[torch.Tensor]) -> torch.Tensor:
        """Means over the ranks of all losses: of earlier lives, and of this one's."""
        mean = torch.stack(made).float().to(device())
        comm.all_reduce(mean)
        return torch.cat([self.before, mean.cpu() / world_size()])

    def stepped(self, made: list[torch.Tensor]) -> None:
        """Called after each step with this life's losses; saves when it is time."""
        step, every = len(self.before) + len(made), self.job.save_every
        if every is None or step % every or step == self.job.steps:
            return
        with comm.phase("checkpoint"):
            extra = {
                "losses": self.losses(made),
                "schedule": self.schedule.state_dict(),
                "job": asdict(self.job),
            }
        folder = checkpoints_of(self.job)
        save(self.net, folder, f"step-{step}", extra=extra, keep=self.job.keep)


def checkpoints_of(job: Job) -> Path:
    """Where a job keeps its checkpoints."""
    return Path(job.out, "checkpoints")


def check(job: Job) -> None:
    """Find bad options before anything has started; raises ValueError.

    A job may go on under another plan, but not with what its losses depend on.
    """
    if job.save_every is not None and job.save_every < 1:
        raise ValueError(f"save_every must be at least 1, not {job.save_every}")
    if job.keep < 1:
        raise ValueError(f"keep must be at least 1, not {job.keep}")
    folder = checkpoints_of(job)
    if not exists(folder):
        return
    if job.save_every and not job.resume:
        raise ValueError(
            f"{folder} has checkpoints of another run; go on from them with --resume, "
            "give another folder with --out, or delete them"
        )
    if job.resume:
        saved = read_extra(folder).get("job")
        if not isinstance(saved, dict):
            raise ValueError(
                f"{folder} has checkpoints of another program; give another --out"
            )
        for name, value in asdict(job).items():
            if name not in FREE and saved.get(name) != value:
                raise ValueError(
                    f"the run in {folder} has {name} {saved.get(name)}, not {value}; "
                    "resume it with the same, or start another one with --out"
                )
