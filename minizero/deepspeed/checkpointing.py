"""`deepspeed.checkpointing`: functions computed again in backward."""

from __future__ import annotations

import warnings
from typing import Any

from ..activations import functions
from ..activations.functions import checkpoint, reset
from ..config import read
from ..config.keys import keys
from ..config.sections import ActivationCheckpointing
from ..config.source import Source
from ..ranks.launch import world_size

__all__ = ["Source", "checkpoint", "configure", "is_configured", "reset", "use"]


def use(section: ActivationCheckpointing) -> None:
    """From now on `checkpoint` keeps arguments as a config's section says.

    A `configure` that comes later overrules that, and so does an engine's config.
    """
    functions.use(section.cpu_checkpointing)


def configure(
    mpu_: Any = None,
    deepspeed_config: Source | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how `checkpoint` keeps arguments, for the whole process.

    `deepspeed_config`: a config, of which `activation_checkpointing` is
    taken. The other arguments are DeepSpeed's names of its keys, and go
    first; what neither gives is at its default. Only `checkpoint_in_cpu`
    has an effect here, and a warning names the others that ask for one.
    `mpu_` may not ask for tensor parallelism: ValueError.
    """
    _check_unit(mpu_)
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    on_host = bool(checkpoint_in_cpu)
    if deepspeed_config is not None:
        section = read(deepspeed_config, world_size()).activation_checkpointing
        if checkpoint_in_cpu is None:
            on_host = section.cpu_checkpointing
    known = keys(ActivationCheckpointing)
    for key, value in given.items():
        if value:
            why = known[key].ignored
            warnings.warn(f"{key} has no effect: {why}", stacklevel=2)
    functions.use(on_host)
    functions.configured = True


def _check_unit(mpu: Any) -> None:
    """Refuse an object of Megatron's that splits layers over ranks."""
    for name in (
        "get_tensor_model_parallel_world_size",
        "get_model_parallel_world_size",
    ):
        size = getattr(mpu, name, int)() or 1
        if size > 1:
            raise ValueError(
                f"mpu_ says that {size} ranks share a layer, and here each "
                "rank computes whole layers; leave mpu_ out"
            )


def is_configured() -> bool:
    """Whether `configure` was called."""
    return functions.configured
