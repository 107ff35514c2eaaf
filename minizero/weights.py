"""Weights of an engine: handed out whole, and taken over as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .config import Config
from .ddp import DataParallel
from .settings import Settings
from .zero import GatheredParameters
from .zero3 import owners


class Weights(Settings):
    """A module whose parameters are views of flat buffers.

    `state_dict`, of the engine and of its modules, raises where parameters
    are sharded and not gathered: they would be NaNs. `module_state_dict`
    gathers them.
    """

    def __init__(
        self, config: Config, model: nn.Module, net: DataParallel
    ) -> None:
        super().__init__(config)
        self.module, self.net = model, net
        self._gathering = False
        this = weakref.ref(self)
        for module in model.modules():
            module.register_state_dict_pre_hook(
                lambda module, *_: _look(this(), module)
            )
        model.register_load_state_dict_post_hook(
            lambda *_: _refresh(this())
        )

    def module_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """The model's whole state dict, without the prefix "module.".

        Where parameters are sharded: copies in host memory on rank 0, made
        unit by unit, and {} on other ranks; all ranks must call it. Else, on
        every rank, the model's own tensors.
        """
        self._gathering = True
        try:
            sharded = self.config.plan.parameters.sharded
            whole = (self.net if sharded else self.module).state_dict()
        finally:
            self._gathering = False
        frozen = {
            name
            for name, p in self.module.named_parameters(
                remove_duplicate=False
            )
            if exclude_frozen_parameters and not p.requires_grad
        }
        return {k: v for k, v in whole.items() if k not in frozen}

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Take over weights, names with the prefix "module."; rank 0's count.

        All ranks must call it. The whole model is gathered meanwhile; to go
        on with training, `load_checkpoint` needs less memory.
        """
        if assign:
            raise ValueError(
                "parameters are views of flat buffers, so values are copied; "
                "leave assign=True out"
            )
        with GatheredParameters(self.module.parameters(), modifier_rank=0):
            return super().load_state_dict(state_dict, strict)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> Weights:
        """What `to`, `half`, `cuda` call: only if there is nothing to do."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        if any(fn(t) is not t for t in tensors):
            raise RuntimeError(
                "the model's parameters are views of flat buffers, which "
                f"rest on {self.net.units[0].flats[0].full.device}; move or "
                "cast the model before minizero.initialize, or choose its "
                "dtype in the config (fp16, bf16)"
            )
        return self


def _look(engine: Weights | None, module: nn.Module) -> None:
    """Raise RuntimeError rather than hand out NaNs."""
    if engine is None or engine._gathering:
        return
    if any(not flat.whole for flat in owners(module.parameters(False))):
        raise RuntimeError(
            f"the parameters of this {type(module).__name__} are sharded; "
            "call engine.module_state_dict() on every rank, or gather them "
            "with minizero.zero.GatheredParameters"
        )


def _refresh(engine: Weights | None) -> None:
    """Masters would undo what has been loaded."""
    if engine is not None:
        engine.net.refresh()
