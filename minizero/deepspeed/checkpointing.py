"""`deepspeed.checkpointing`: functions computed again in backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ..activations import CHECKPOINT, Offloaded
from ..config import read
from ..ranks.launch import world_size

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

_configured = False


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, of which only the arguments are kept.

    The rest is computed again in backward, with the same random numbers (Chen et al.
    2016). In an evaluation nothing is kept.
    """
    return CHECKPOINT(function, *args, **kwargs)


def configure(
    mpu_: Any = None,
    deepspeed_config: str | dict[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set where `checkpoint` keeps arguments, for the whole process.

    `deepspeed_config`: a config, of which `activation_checkpointing` is taken. The other
    arguments are DeepSpeed's and take precedence. Only `checkpoint_in_cpu` has an effect
    here; a warning names the others. `mpu_` may not ask for tensor parallelism.
    """
    global _configured
    size = getattr(mpu_, "get_tensor_model_parallel_world_size", None)
    size = size or getattr(mpu_, "get_model_parallel_world_size", int)
    if (size() or 1) > 1:
        raise ValueError(
            f"mpu_ says that {size()} ranks share a layer, and here each rank computes "
            "whole layers; leave mpu_ out"
        )
    for name, value in {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "synchronize": synchronize,
        "profile": profile,
    }.items():
        if value:
            warnings.warn(f"{name} has no effect", stacklevel=2)
    on_host = checkpoint_in_cpu
    if on_host is None and deepspeed_config is not None:
        section = read(deepspeed_config, world_size()).activation_checkpointing
        on_host = section.cpu_checkpointing
    CHECKPOINT.store = Offloaded() if on_host else None
    _configured = True


def reset() -> None:
    """Forget the forwards that no backward will follow."""
    CHECKPOINT.store = Offloaded() if CHECKPOINT.store else None


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _configured
