"""What the main job is asked to do, checked before any rank is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minizero.activations.recompute import Recompute
from minizero.lab.models.corpus import Corpus, rows_per_rank
from minizero.lab.models.gpt import GPTConfig
from minizero.lab.training import keeper
from minizero.memory.plan import Plan, estimate


@dataclass(frozen=True)
class Job:
    """What to train, and how; the fields are the options of the command line.

    batch: sequences in the global batch, over all ranks.
    clip: largest global norm of the gradient.
    precision: "fp32", "bf16" or "fp16"; the last two with fp32 master weights.
    offload_optimizer, offload_param: "cpu" or "nvme", or None for the device.
    nvme: folder for what is on "nvme".
    overlap: communicate while computing. checkpointing: "none", "selective", "full".
    save_every: steps between two checkpoints in `out`; None for no checkpoints.
    keep: how many of them stay. resume: go on from the newest, if there is one.
    trace: file for the trace of the first updates.
    """

    stage: int = 3
    model: str = "1m"
    steps: int = 200
    batch: int = 16
    sequence: int = 128
    lr: float = 2e-3
    clip: float = 1.0
    weight_decay: float = 0.1
    precision: str = "fp32"
    offload_optimizer: str | None = None
    offload_param: str | None = None
    nvme: str | None = None
    overlap: bool = False
    checkpointing: str = "none"
    seed: int = 0
    data: str | None = None
    out: str = "runs/train"
    save_every: int | None = None
    keep: int = 2
    resume: bool = False
    trace: str | None = None

    def check(self, ranks: int) -> None:
        """Find bad input before any rank is started; raises ValueError or OSError."""
        estimate(1, ranks, self.plan(), self.precision)
        Recompute(self.checkpointing)
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if not self.lr > 0 or not self.clip > 0:
            raise ValueError(f"lr and clip must be above 0, not {self.lr}, {self.clip}")
        self.config()
        keeper.check(self)
        rows_per_rank(self.batch, ranks)
        Corpus(self.data).batch(0, 0, ranks, self.batch, self.sequence)
        Path(self.out).mkdir(parents=True, exist_ok=True)

    def plan(self) -> Plan:
        return Plan.stage(self.stage, self.offload_optimizer, self.offload_param)

    def config(self) -> GPTConfig:
        config = GPTConfig.named(self.model)
        if not 1 <= self.sequence <= config.sequence:
            raise ValueError(
                f"sequence must be between 1 and {config.sequence} for the model "
                f"{self.model!r}, not {self.sequence}"
            )
        return config
