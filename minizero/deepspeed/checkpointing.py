"""`deepspeed.checkpointing`: functions computed again in backward."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ..activations.checkpointing import Checkpointing
from ..config import read
from ..config.schema import entries
from ..config.train import ActivationCheckpointing
from ..ranks.launch import world_size
from ..activations.stores import Offloaded

Source = str | os.PathLike[str] | Mapping[str, Any]

_section = ActivationCheckpointing()
_how = Checkpointing("full")
_configured = False


def use(section: ActivationCheckpointing) -> None:
    """From now on `checkpoint` keeps arguments as a config's section says.

    The engine calls it with its own; a later `configure` overrules that.
    """
    global _section, _how
    _section = section
    store = Offloaded() if section.cpu_checkpointing else None
    _how = Checkpointing("full", store)


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
    global _configured
    _check_unit(mpu_)
    options = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    given = {key: v for key, v in options.items() if v is not None}
    section = ActivationCheckpointing()
    if deepspeed_config is not None:
        config = read(deepspeed_config, world_size())
        section = config.activation_checkpointing
    known = entries(ActivationCheckpointing)
    for key, value in given.items():
        if value and (why := known[key].about.ignored):
            warnings.warn(f"{key} has no effect: {why}", stacklevel=2)
    use(ActivationCheckpointing(**(vars(section) | given)))
    _configured = True


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
    return _configured


def reset() -> None:
    """Forget the forwards that no backward will follow."""
    use(_section)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, of which only the arguments are kept.

    The rest is computed again in backward, with the same random numbers
    (Chen et al. 2016). In an evaluation nothing is kept.
    """
    return _how(function, *args, **kwargs)
