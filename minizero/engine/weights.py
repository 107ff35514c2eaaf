"""Weights of an engine: handed out whole, and taken over as a whole."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.tensor_file import CheckpointError
from ..comm.agreement import agreeing
from ..config import Config
from ..zero.data_parallel import DataParallel
from ..ranks.launch import rank
from .getters import Settings
from ..zero.absent import owners
from ..zero.init import GatheredParameters


class Weights(Settings):
    """A module whose parameters are views of flat buffers.

    `state_dict`, of the engine and of its modules, raises where parameters
    are sharded and not gathered: they would be NaNs. `module_state_dict`
    gathers them.
    """

    def __init__(self, config: Config, model: nn.Module, net: DataParallel) -> None:
        super().__init__(config)
        self.module, self.net = model, net
        self._gathering = False
        this = weakref.ref(self)
        for module in model.modules():
            module.register_state_dict_pre_hook(
                lambda module, *_: _look(this(), module)
            )
        model.register_load_state_dict_post_hook(lambda *_: _refresh(this()))

    def module_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """The model's whole state dict, without the prefix "module.".

        Where parameters are sharded: copies in host memory on rank 0, made
        unit by unit, and {} on other ranks; all ranks must call it. Else, on
        every rank, the model's own tensors.
        """
        with self.gathering():
            sharded = self.config.plan.parameters.sharded
            whole = (self.net if sharded else self.module).state_dict()
        frozen = {
            name
            for name, p in self.module.named_parameters(remove_duplicate=False)
            if exclude_frozen_parameters and not p.requires_grad
        }
        return {k: v for k, v in whole.items() if k not in frozen}

    # under this name Hugging Face's Trainer and Accelerate ask for it
    _zero3_consolidated_16bit_state_dict = module_state_dict

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model's weights, in their dtype, into one file.

        Every rank calls it; rank 0 writes: a safetensors file if the name
        ends so, else one for `torch.load`. Returns whether it did: sharded
        parameters are gathered only if the config has
        `stage3_gather_16bit_weights_on_model_save`.
        """
        gathers = self.zero_gather_16bit_weights_on_model_save()
        if self.config.plan.parameters.sharded and not gathers:
            if rank() == 0:
                warnings.warn(
                    "the model is not saved: its parameters are sharded, and "
                    "stage3_gather_16bit_weights_on_model_save is false",
                    stacklevel=2,
                )
            return False
        weights = self.module_state_dict(exclude_frozen_parameters)
        with agreeing(CheckpointError):
            if rank() == 0:
                _write(Path(save_dir) / save_filename, weights)
        return True

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """What is inside knows that parameters may be absent."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Weights:
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


def _write(path: Path, weights: dict[str, Tensor]) -> None:
    """In one step: others see the old file, or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            # tied ones share memory, which the format has no name for
            apart = {k: v.detach().clone() for k, v in weights.items()}
            save_file(apart, temporary, metadata={"format": "pt"})
        else:
            torch.save(weights, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
