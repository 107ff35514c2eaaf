"""A module inside an engine, and the config under DeepSpeed's names."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from ..config import Config
from ..ranks.launch import rank, world_size

# Methods of DeepSpeed's engine that there are not here, and what to do.
REFUSED = {
    "allreduce_gradients": "backward reduces them as the plan says; leave it out",
    "offload_states": "states rest where the config says; give it "
    "offload_optimizer or offload_param",
    "reload_states": "states rest where the config says; leave it out",
    "scale": "backward scales the loss; call engine.backward(loss) in place "
    "of engine.scale(loss).backward()",
    "set_data_post_process_func": "batches are not processed after loading; "
    "give initialize a collate_fn",
    "register_compile_pass": "nothing is compiled here",
}


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
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            if name in REFUSED:
                raise AttributeError(
                    f"minizero's engine has no {name}: {REFUSED[name]}"
                ) from None
            raise

    def train_batch_size(self) -> int:
        """Samples of all ranks in a step."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one rank in a forward."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a step."""
        return self.config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three sizes: of a step, of a micro-batch, and the steps."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def gradient_clipping(self) -> float:
        """Largest norm of all gradients; 0 does not clip."""
        return self.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.config.plan.optimizer.sharded

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.config.plan.gradients.sharded

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.config.plan.parameters.sharded

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` gathers sharded parameters."""
        zero = self.config.zero_optimization
        return zero.stage3_gather_16bit_weights_on_model_save

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.config.bf16.enabled
