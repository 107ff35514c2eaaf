"""Weights of an engine: handed out whole, and taken over as a whole."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import CheckpointError
from ..comm.agreement import agreeing
from ..ranks.launch import device, rank
from ..zero.data_parallel import DataParallel


class Weights:
    """Whole state dicts of a model whose parameters may be sharded.

    `gathers`: whether `save_16bit_model` may gather sharded parameters.
    """

    def __init__(self, module: nn.Module, net: DataParallel, gathers: bool) -> None:
        self.module, self.net, self.gathers = module, net, gathers
        this = weakref.ref(self)
        for inner in module.modules():
            inner._apply = Stays(this, inner)  # type: ignore[method-assign]
        hook = module.register_load_state_dict_post_hook(lambda *_: _refresh(this()))
        net.handles.append(hook)

    def state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The model's whole state dict, without the prefix "module.".

        Where parameters are sharded: copies in host memory on rank 0, made
        unit by unit, and {} on other ranks. Else, on every rank, the model's
        own tensors. All ranks must call it: an update may be under way.
        """
        self.net.synchronize()
        if self.net.plan.parameters.sharded:
            return self.net.state_dict(frozen=not exclude_frozen_parameters)
        frozen = {
            name
            for name, p in self.module.named_parameters(remove_duplicate=False)
            if exclude_frozen_parameters and not p.requires_grad
        }
        whole = self.module.state_dict()
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

    def check_in_place(
        self, moves: Callable[[Tensor], Tensor], module: nn.Module
    ) -> None:
        """Raise RuntimeError if a function of its tensors would not keep them."""
        tensors = [*module.parameters(), *module.buffers()]
        if not all(_stays(t, moves(t)) for t in tensors):
            raise RuntimeError(
                "the model's parameters are views of flat buffers, which "
                f"rest on {device()}; move or "
                "cast the model before minizero.initialize, or choose its "
                "dtype in the config (fp16, bf16)"
            )


class Stays:
    """What `to`, `half`, `cuda` call of a module, in the place of its `_apply`.

    A copy of the module has nothing to stay for, and gets its own again.
    """

    def __init__(self, weights: weakref.ref[Weights], module: nn.Module) -> None:
        self.weights, self.module = weights, weakref.ref(module)

    def __call__(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        weights, module = self.weights(), self.module()
        assert module is not None
        if weights is None:
            return _apply(module, fn, recurse)
        weights.check_in_place(fn, module)
        return module

    def __reduce__(self) -> Any:
        return partial, (_apply, self.module())


def _apply(
    module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    return type(module)._apply(module, fn, recurse)


def _stays(t: Tensor, moved: Tensor) -> bool:
    """Whether it is where it was: "cpu:0" is "cpu", although `to` copies."""
    if moved is t:
        return True
    alike = moved.dtype is t.dtype and moved.device.type == t.device.type == "cpu"
    return alike and moved.is_contiguous()


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
