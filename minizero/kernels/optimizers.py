"""From the optimizer that a config names to a class and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .adam import FusedAdam


def optimizer_call(
    name: str, params: Mapping[str, Any]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class that a config's `optimizer.type` names, and its keyword arguments.

    DeepSpeed's `Adam` is AdamW unless `adam_w_mode` is false. Both are torch's fused ones
    unless `torch_adam` is true, and decay no weights by default; torch's AdamW does, if
    that is true. For Muon use `muon_options`.
    """
    options = dict(params)
    if name in ("FusedAdam", "CPUAdam"):  # on the host both are torch's fused Adam
        return FusedAdam, options
    if name in ("Adam", "AdamW"):
        torch_adam = options.pop("torch_adam", False)
        decoupled = options.pop("adam_w_mode", True) or name == "AdamW"  # as DeepSpeed
        if not torch_adam:
            options.setdefault("fused", True)
        if not (torch_adam and decoupled):
            options.setdefault("weight_decay", 0.0)
        name = "AdamW" if decoupled else "Adam"
    return getattr(torch.optim, name), options


def muon_options(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of Muon's groups (matrices) and of AdamW's (everything else).

    `lr` is the learning rate of both, `muon_lr` and `adam_lr` that of one.
    """
    muon = {"weight_decay": 0.0, **params}
    lr = muon.pop("lr", None)
    adam = {
        "lr": muon.pop("adam_lr", 3e-4 if lr is None else lr),
        "weight_decay": muon["weight_decay"],
        "betas": muon.pop("betas", (0.9, 0.95)),
        "eps": muon.pop("eps", 1e-10),
    }
    muon["lr"] = muon.pop("muon_lr", 0.02 if lr is None else lr)
    return muon, adam
