"""Names that scripts import for what is not done here, and use without it."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import nn


LAMB_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER = "lamb", "onebitlamb"  # what no optimizer is


class PipelineModule:
    """Layers on several ranks: not done here. A model can be asked whether it is one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        from .names import why_not

        raise ImportError(why_not("pipe.PipelineModule"))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: int | None = None,
) -> list[dict[str, Any]]:
    """The groups as they are: no experts are spread over ranks.

    ValueError for a parameter that says it is one of such an expert.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else [*param_groups]
    for group in groups:
        group["params"] = [*group["params"]]
        if not all(getattr(p, "allreduce", True) for p in group["params"]):
            raise ValueError(
                "a parameter has allreduce=False: it is one rank's own, and here all "
                "gradients are averaged over all ranks; leave the mark out"
            )
    return groups


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """What is under a name with dots, such as "layers.0.weight"."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Put something else there."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)
