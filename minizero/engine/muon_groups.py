"""Which parameters Muon updates, and which AdamW does, as in DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


def muon_groups(
    model: nn.Module,
    params: Iterable[Tensor] | Iterable[dict[str, Any]],
    muon: Mapping[str, Any],
    adamw: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Groups for `Muon`: the matrices inside the model, and what AdamW updates.

    `params`: the model's, or groups of them, whose own options win over `muon` and
    `adamw`. As in DeepSpeed, embeddings and the output layer are AdamW's: an
    `nn.Embedding`, a module named "head", and names with "embed" or "lm_head", under any
    name that a tied parameter has. A parameter's attribute `use_muon` overrules this.

    ValueError if none is Muon's.
    """
    every: list[Any] = list(params)
    given = every if every and isinstance(every[0], dict) else [{"params": every}]
    outside = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, p in model.named_parameters(remove_duplicate=False):
        named = "embed" in name.lower() or "lm_head" in name.lower()
        if p.ndim != 2 or named or name.split(".")[-2:-1] == ["head"]:
            outside.add(p)

    found = []
    for group in given:
        trained = [p for p in group["params"] if p.requires_grad]
        muons = {p for p in trained if getattr(p, "use_muon", p not in outside)}
        for use_muon, options, other in ((True, muon, adamw), (False, adamw, muon)):
            own = {k: v for k, v in group.items() if k in options or k not in other}
            part = [p for p in trained if (p in muons) is use_muon]
            if part:
                found.append({**options, **own, "params": part, "use_muon": use_muon})
    if not any(group["use_muon"] for group in found):
        raise ValueError(
            "Muon updates the matrices inside a model, and this one trains none; use "
            "AdamW, or set use_muon = True on a parameter that Muon should have"
        )
    return found
