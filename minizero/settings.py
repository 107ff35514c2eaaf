"""A module inside an engine, and the config under DeepSpeed's names."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from .config import Config
from .launch import rank, world_size


class Settings(nn.Module):
    """What a script asks an engine about its config.

    `config`: complete; see the config reference.
    """

    module: nn.Module

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.global_rank, self.world_size = rank(), world_size()
        self.dp_world_size = world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank()))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)

    def train_batch_size(self) -> int:
        """Samples of all ranks in a step."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one rank in a forward."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a step."""
        return self.config.gradient_accumulation_steps

    def gradient_clipping(self) -> float:
        """Largest norm of all gradients; 0 does not clip."""
        return self.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.config.plan.optimizer.sharded

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.config.bf16.enabled
