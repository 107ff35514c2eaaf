"""An engine's checkpoints: all that a run needs to go on."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from ..comm.agreement import broadcast_bytes
from ..checkpoint.api import finish, load, save
from .batches import Feeding
from ..checkpoint.directory import exists
from ..ranks.launch import rank
from ..checkpoint.restore import Loaded
from ..checkpoint.tensor_file import CheckpointError

Folder = str | os.PathLike[str]


class Resume(Feeding):
    """Saves and loads all that a training run consists of."""

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
        see `minizero.checkpoint.save`; what fails in the background is
        raised by the next save, `finish_checkpoint` or `destroy`.

        Raises RuntimeError in the middle of accumulation, CheckpointError
        if it cannot be written: then on all ranks, and the checkpoints that
        there were are as before.
        """
        self._check_alive()
        self._mend()
        if self.net.has_gradients:
            of = self.gradient_accumulation_steps()
            raise RuntimeError(
                "a checkpoint holds no gradients, and this step has some "
                f"(it is at micro-batch {self.position() + 1} of {of}); save "
                "after the step() at the boundary, or give them up by "
                "zero_grad()"
            )
        scheduler, loader = self.lr_scheduler, self.training_dataloader
        engine: dict[str, Any] = {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "scheduler": None,
            "data": None if loader is None else loader.state_dict(),
        }
        if scheduler is not None:
            engine["scheduler"] = scheduler.state_dict()
            engine["scheduler_type"] = type(scheduler).__name__
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
        checkpoint and no tag is given. Gradients are zero afterwards. An
        engine without an optimizer takes the weights and the counters.

        Raises CheckpointError, on all ranks, for what is damaged, missing
        or of another model, scheduler or data; the run is then as it was.
        """
        self._check_alive()
        if tag is None and _is_empty(Path(load_dir)):
            if rank() == 0:
                warnings.warn(
                    f"there is no checkpoint in {load_dir}, so nothing is loaded",
                    stacklevel=2,
                )
            return None, None
        parts = Parts(
            None if load_module_only else self.training_dataloader,
            self.lr_scheduler
            if load_lr_scheduler_states and not load_module_only
            else None,
        )
        whole = load_optimizer_states and not load_module_only
        with self.gathering():
            loaded = load(
                self.net,
                load_dir,
                tag,
                strict=load_module_strict,
                optimizer=whole and self.optimizer is not None,
                check=parts.check,
            )
        self._torn = False
        if self.optimizer is not None:
            self.optimizer.overflow, self.optimizer.norm = False, None
        engine = saved_by_engine(loaded)
        if engine is None:
            return str(loaded.path), loaded.extra
        if not load_module_only:
            self.global_steps = engine["global_steps"]
            self.global_samples = engine["global_samples"]
            micro_batches = self.gradient_accumulation_steps()
            self.micro_steps = self.global_steps * micro_batches
            self._first = self.micro_steps
            parts.load(engine)
        return str(loaded.path), loaded.extra["client"]


class Parts:
    """What of a run is no part of the net; None is not loaded."""

    def __init__(self, loader: Any, scheduler: Any) -> None:
        self.loader, self.scheduler = loader, scheduler

    def check(self, loaded: Loaded) -> None:
        """Raise CheckpointError unless `load` can do it; changes nothing."""
        engine = saved_by_engine(loaded)
        if engine is None:
            return
        place, state = engine["data"], engine["scheduler"]
        kind = type(self.scheduler).__name__
        before = engine.get("scheduler_type", kind)
        try:
            if place and self.loader is not None:
                self.loader.check_state(place)
            if state and self.scheduler is not None:
                if before != kind:
                    raise ValueError(f"the scheduler is {kind} here and was {before}")
                try_state(self.scheduler, state)
        except Exception as error:
            raise CheckpointError(
                f"{loaded.path}: this checkpoint does not fit: {error}; "
                "without its scheduler it loads with "
                "load_lr_scheduler_states=False, and without its place in "
                "the data once engine.training_dataloader is None"
            ) from error

    def load(self, engine: dict[str, Any]) -> None:
        """Take over what was checked."""
        if engine["scheduler"] and self.scheduler is not None:
            self.scheduler.load_state_dict(engine["scheduler"])
        if engine["data"] and self.loader is not None:
            self.loader.load_state_dict(engine["data"])


def saved_by_engine(loaded: Loaded) -> dict[str, Any] | None:
    """An engine's part; None if `minizero.checkpoint.save` saved it."""
    engine = loaded.extra.get("engine")
    ours = isinstance(engine, dict) and {"scheduler", "data"} <= engine.keys()
    return engine if ours and "client" in loaded.extra else None


def try_state(scheduler: Any, state: Any) -> None:
    """Raise what loading the state would, on a copy that moves nothing."""
    optimizer = getattr(scheduler, "optimizer", None)
    copies: dict[int, Any] = {}
    if isinstance(optimizer, torch.optim.Optimizer):
        # not a copy of the optimizer, which would be one of its states too
        groups = [{**g, "params": []} for g in optimizer.param_groups]
        stand_in = torch.optim.SGD([{"params": []}])
        stand_in.param_groups = copy.deepcopy(groups)
        copies[id(optimizer)] = stand_in
    try:
        trial = copy.deepcopy(scheduler, copies)
    except Exception:
        return  # it holds something that has no copy; then it is not tried
    trial.load_state_dict(copy.deepcopy(state))


def _is_empty(folder: Path) -> bool:
    """Whether rank 0 finds that nothing was ever saved in a folder."""
    found = rank() == 0 and exists(folder)
    return broadcast_bytes(b"1" if found else b"0") == b"0"
