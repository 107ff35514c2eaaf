"""Weights of an engine: handed out whole, and taken over as a whole."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import CheckpointError
from ..comm.agreement import agreeing
from ..ranks.launch import rank
from ..zero.data_parallel import DataParallel
from ..zero.absent import owners


class Weights:
    """Whole state dicts of a model whose parameters may be sharded.

    A `state_dict` of the model or of one of its modules raises where
    parameters are sharded and not gathered: they would be NaNs.

    `gathers`: whether `save_16bit_model` may gather sharded parameters.
    """

    def __init__(self, module: nn.Module, net: DataParallel, gathers: bool) -> None:
        self.module, self.net, self.gathers = module, net, gathers
        self._gathering = False
        this = weakref.ref(self)
        for inner in module.modules():
            inner.register_state_dict_pre_hook(lambda inner, *_: _look(this(), inner))
        module.register_load_state_dict_post_hook(lambda *_: _refresh(this()))

    def state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The model's whole state dict, without the prefix "module.".

        Where parameters are sharded: copies in host memory on rank 0, made
        unit by unit, and {} on other ranks. Else, on every rank, the model's
        own tensors. All ranks must call it: an update may be under way.
        """
        self.net.synchronize()
        with self.gathering():
            sharded = self.net.plan.parameters.sharded
            whole = (self.net if sharded else self.module).state_dict()
        frozen = {
            name
            for name, p in self.module.named_parameters(remove_duplicate=False)
            if exclude_frozen_parameters and not p.requires_grad
        }
        return {k: v for k, v in whole.items() if k not in frozen}

    def save(
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
        if self.net.plan.parameters.sharded and not self.gathers:
            if rank() == 0:
                warnings.warn(
                    "the model is not saved: its parameters are sharded, and "
                    "stage3_gather_16bit_weights_on_model_save is false",
                    stacklevel=3,
                )
            return False
        weights = self.state_dict(exclude_frozen_parameters)
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

    def check_in_place(self, moves: Any) -> None:
        """Raise RuntimeError if a function of tensors would not keep them."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        if any(moves(t) is not t for t in tensors):
            raise RuntimeError(
                "the model's parameters are views of flat buffers, which "
                f"rest on {self.net.units[0].flats[0].full.device}; move or "
                "cast the model before minizero.initialize, or choose its "
                "dtype in the config (fp16, bf16)"
            )


def _look(weights: Weights | None, module: nn.Module) -> None:
    """Raise RuntimeError rather than hand out NaNs."""
    if weights is None or weights._gathering:
        return
    if any(not flat.whole for flat in owners(module.parameters(False))):
        raise RuntimeError(
            f"the parameters of this {type(module).__name__} are sharded; "
            "call engine.module_state_dict() on every rank, or gather them "
            "with minizero.zero.GatheredParameters"
        )


def _refresh(weights: Weights | None) -> None:
    """Masters would undo what has been loaded."""
    if weights is not None:
        weights.net.refresh()


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
