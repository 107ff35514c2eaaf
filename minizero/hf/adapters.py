"""Adapters of `peft` on a base model whose parameters may be sharded."""

from __future__ import annotations

from typing import Any

import peft
from torch import nn

from ..zero.absent import owners


def get_peft_model(model: nn.Module, peft_config: Any, **options: Any) -> Any:
    """peft's own; ValueError for adapters that read a base that is absent.

    LoRA does not look at the base. DoRA, PiSSA and others read or change it.
    """
    plain = not getattr(peft_config, "use_dora", True)
    plain &= getattr(peft_config, "init_lora_weights", "") in (True, False, "gaussian")
    if not plain and owners(model.parameters()):
        raise ValueError(
            f"this {type(peft_config).__name__} makes adapters of the base model's "
            "weights, which are sharded, and so absent; build the base outside of "
            "zero.Init: the engine shards it afterwards"
        )
    return peft.get_peft_model(model, peft_config, **options)
