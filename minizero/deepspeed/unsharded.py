"""Names that scripts import for another parallelism, and do not use without it."""

from __future__ import annotations

from typing import Any


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
