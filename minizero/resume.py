"""An engine's checkpoints: all that a run needs to go on."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .agree import agreeing, broadcast_bytes
from .checkpoint import finish, load, save
from .config import Config
from .data import Loader
from .folder import exists
from .launch import rank
from .loop import Loop

Folder = str | os.PathLike[str]


class Resume(Loop):
    """Saves and loads all that a training run consists of."""

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        training_dataloader: Loader | None,
    ) -> None:
        super().__init__(config, model, optimizer, lr_scheduler)
        self.training_dataloader = training_dataloader

    def save_checkpoint(
        self,
        save_dir: Folder,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        *,
        keep: int | None = None,
        background: int = 0,
    ) -> bool:
        """Save the run as `save_dir/tag`; every rank calls it. Returns True.

        Weights, optimizer states and options, loss scale, scheduler,
        counters, the place in the data, random states of every rank, and
        rank 0's `client_state`: numbers, strings, tensors, and lists and
        dicts of them. Nothing is pickled.

        `tag`: default "global_step" and the number. `save_latest`: whether
        `load_checkpoint` without a tag shall find it. `keep`, `background`:
        see `minizero.checkpoint.save`.

        Raises RuntimeError in the middle of accumulation, CheckpointError
        if it cannot be written: then on all ranks, and the checkpoints that
        there were are as before.
        """
        self._mend()
        if self.net.has_gradients:
            of = self.gradient_accumulation_steps()
            raise RuntimeError(
                "a checkpoint holds no gradients, and this step has some "
                f"(it is at micro-batch {self.micro_steps % of + 1} of {of}"
                "); save after the step() at the boundary, or give them up "
                "by zero_grad()"
            )
        scheduler, loader = self.lr_scheduler, self.training_dataloader
        engine = {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "scheduler": scheduler and scheduler.state_dict(),
            "data": loader and loader.state_dict(),
        }
        extra = {"engine": engine, "client": client_state or {}}
        if tag is None:
            tag = f"global_step{self.global_steps}"
        with self.gathering():
            save(
                self.net,
                save_dir,
                str(tag),
                extra=extra,
                keep=keep,
                background=background,
                latest=save_latest,
            )
        return True

    def finish_checkpoint(self) -> None:
        """Wait for a save in the background; raises its error."""
        finish(self.net)

    def load_checkpoint(
        self,
        load_dir: Folder,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` saved, on any ranks under any plan.

        Every rank calls it. Returns the checkpoint's folder and the
        client's state; None and None, and a warning, if `load_dir` has no
        checkpoint and no tag is given. Gradients are zero afterwards.

        Raises CheckpointError, on all ranks, for what is damaged, missing
        or of another model; the run is then as it was.
        """
        if tag is None and _is_empty(Path(load_dir)):
            if rank() == 0:
                warnings.warn(
                    f"there is no checkpoint in {load_dir}, so nothing is "
                    "loaded",
                    stacklevel=2,
                )
            return None, None
        whole = load_optimizer_states and not load_module_only
        with self.gathering():
            loaded = load(
                self.net,
                load_dir,
                tag,
                strict=load_module_strict,
                optimizer=whole,
            )
        self._torn = self.optimizer.overflow = False
        self.optimizer.norm = None
        engine = loaded.extra.get("engine")
        if engine is None:  # saved by `minizero.checkpoint.save` itself
            return str(loaded.path), loaded.extra
        if not load_module_only:
            self._restore(engine, load_lr_scheduler_states)
        return str(loaded.path), loaded.extra["client"]

    def _restore(self, saved: dict[str, Any], with_scheduler: bool) -> None:
        self.global_steps = saved["global_steps"]
        self.global_samples = saved["global_samples"]
        micro_batches = self.gradient_accumulation_steps()
        self.micro_steps = self.global_steps * micro_batches
        rates, place = saved["scheduler"], saved["data"]
        if with_scheduler and rates and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(rates)
        if place and self.training_dataloader is not None:
            self.training_dataloader.load_state_dict(place)

    def save_16bit_model(
        self,
        save_dir: Folder,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model's weights, in their dtype, into one file.

        Every rank calls it; rank 0 writes: a safetensors file if the name
        ends so, else one for `torch.load`. Returns whether it did: sharded
        parameters are gathered only if the config has
        `stage3_gather_16bit_weights_on_model_save`.
        """
        zero = self.config.zero_optimization
        gathers = zero.stage3_gather_16bit_weights_on_model_save
        if self.config.plan.parameters.sharded and not gathers:
            if rank() == 0:
                warnings.warn(
                    "the model is not saved: its parameters are sharded, and "
                    "stage3_gather_16bit_weights_on_model_save is false",
                    stacklevel=2,
                )
            return False
        weights = self.module_state_dict(exclude_frozen_parameters)
        with agreeing():
            if rank() == 0:
                _write(Path(save_dir) / save_filename, weights)
        return True


def _is_empty(folder: Path) -> bool:
    """Whether rank 0 finds that nothing was ever saved in a folder."""
    found = rank() == 0 and exists(folder)
    return broadcast_bytes(b"1" if found else b"0") == b"0"


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
