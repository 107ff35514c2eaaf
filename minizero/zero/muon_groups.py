"""Which parameters of a model are Muon's: the matrices inside, as DeepSpeed divides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

OUTSIDE = ("embed", "lm_head")
"""In the name of what is an embedding or the output layer, for DeepSpeed too."""


def muon_groups(
    model: nn.Module,
    params: Iterable[Tensor] | Iterable[dict[str, Any]],
    muon: Mapping[str, Any],
    adamw: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The groups of `Muon`: of each that is given its matrices, and what AdamW updates.

    params: of the model, or groups of them, whose own options win over `muon` and
        `adamw`, the options of the one and the other.

    ValueError if none is Muon's.
    """
    every: list[Any] = list(params)
    given = every if every and isinstance(every[0], dict) else [{"params": every}]
    inside = matrices(model)
    found = []
    for group in given:
        trained = [p for p in group["params"] if p.requires_grad]
        for use_muon, options, other in ((True, muon, adamw), (False, adamw, muon)):
            own = {k: v for k, v in group.items() if k in options or k not in other}
            part = [p for p in trained if (p in inside) is use_muon]
            if part:
                found.append({**options, **own, "params": part, "use_muon": use_muon})
    if not any(group["use_muon"] for group in found):
        raise ValueError(
            "Muon updates the matrices inside a model, and this one trains none; use "
            "AdamW, or set use_muon = True on a parameter that Muon should have"
        )
    return found


def matrices(model: nn.Module) -> set[Tensor]:
    """What has two dimensions and is no embedding and not the output layer.

    These two are known by `nn.Embedding`, by `OUTSIDE` and, as a module, by the name
    "head", under any name that a tied parameter has. An attribute `use_muon` of a
    parameter, as DeepSpeed sets it, says otherwise.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    outside: set[Tensor] = {
        p
        for name, p in named
        if p.ndim != 2
        or any(word in name.lower() for word in OUTSIDE)
        or name.split(".")[-2:-1] == ["head"]
    }
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            outside.add(module.weight)
    return {p for _, p in named if getattr(p, "use_muon", p not in outside)}
