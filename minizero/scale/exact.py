"""What candidates take, by dry runs of the engine: where the formula is not sure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from ..activations import recompute_units
from .candidates import Candidate, Job
from .dryrun import dryrun
from .planner import Choice, Result, ds_config


def exactly(job: Job, model: Callable[[], nn.Module], device: str = "cuda") -> Job:
    """The same job, whose candidates near the limit are rehearsed: a second or more each.

    model: makes what is to be trained, from tokens and targets [batch, sequence] to a
        loss; see `dryrun`, also for `device`.
    """

    @cache
    def peak(candidate: Candidate) -> float:
        def build() -> nn.Module:
            net = model()
            recompute_units(net, candidate.recompute)
            return net

        config = ds_config(Choice(job, Result(job, candidate), []))
        tokens = torch.zeros(candidate.micro_batch, job.sequence, dtype=torch.long)
        found = dryrun(
            build, config, world_size=job.gpus, batch=(tokens, tokens), device=device
        )
        return found.peak

    return replace(job, peak=peak)
