"""An engine's checkpoints: all that a run needs to go on."""

from __future__ import annotations

import copy
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import CheckpointError, Loaded, exists, finish, load, save
from ..comm.agreement import broadcast_bytes
from ..ranks.launch import rank
from .batches import BatchFeeder, place
from .step_loop import StepLoop
from .weights import Weights

Folder = str | os.PathLike[str]


class RunCheckpoint:
    """Saves and loads all that a training run consists of.

    `trains`: False if there are no optimizer states.
    """

    def __init__(
        self, loop: StepLoop, feeder: BatchFeeder, weights: Weights, trains: bool
    ) -> None:
        self.loop, self.feeder, self.weights = loop, feeder, weights
        self.net, self.steps, self.trains = loop.net, loop.steps, trains

    def save(
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
        self.loop.begin()
        if self.net.has_gradients:
            raise RuntimeError(
                "a checkpoint holds no gradients, and this step has some "
                f"(it is at {place(self.steps)}); save after the step() at the "
                "boundary, or give them up by zero_grad()"
            )
        scheduler, loader = self.loop.scheduler, self.feeder.loader
        engine = {
            "global_steps": self.steps.global_steps,
            "global_samples": self.steps.global_samples,
            "data": None if loader is None else loader.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scheduler_type": _name(scheduler),
        }
        if tag is None:
            tag = f"global_step{self.steps.global_steps}"
        with self.weights.gathering():
            save(
                self.net,
                save_dir,
                str(tag),
                extra={"engine": engine, "client": client_state or {}},
                keep=keep,
                background=background,
                latest=save_latest,
            )
        return True

    def finish(self) -> None:
        """Wait for a save in the background; raises its error."""
        finish(self.net)

    def load(
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
        self.loop.begin()
        if tag is None and not _anything(Path(load_dir)):
            if rank() == 0:
                warnings.warn(
                    f"there is no checkpoint in {load_dir}, so nothing is loaded",
                    stacklevel=3,
                )
            return None, None
        scheduler, loader = self.loop.scheduler, self.feeder.loader
        if load_module_only:
            loader = None
        if load_module_only or not load_lr_scheduler_states:
            scheduler = None
        states = load_optimizer_states and not load_module_only
        with self.weights.gathering():
            loaded = load(
                self.net,
                load_dir,
                tag,
                strict=load_module_strict,
                optimizer=states and self.trains,
                check=partial(_check, scheduler, loader),
            )
        self.loop.optimizer.forget()
        engine = saved_by_engine(loaded)
        if engine is None:
            return str(loaded.path), loaded.extra
        if not load_module_only:
            self.steps.resume(engine["global_steps"], engine["global_samples"])
        if engine["scheduler"] and scheduler is not None:
            scheduler.load_state_dict(engine["scheduler"])
        if engine["data"] and loader is not None:
            loader.load_state_dict(engine["data"])
        return str(loaded.path), loaded.extra["client"]


def _check(scheduler: Any, loader: Any, loaded: Loaded) -> None:
    """Raise CheckpointError unless both can go on from it; changes nothing."""
    engine = saved_by_engine(loaded)
    if engine is None:
        return
    kind, before = _name(scheduler), engine["scheduler_type"]
    try:
        if engine["data"] and loader is not None:
            loader.check_state(engine["data"])
        if engine["scheduler"] and scheduler is not None:
            if before != kind:
                raise ValueError(f"the scheduler is {kind} here and was {before}")
            try_state(scheduler, engine["scheduler"])
    except Exception as error:
        raise CheckpointError(
            f"{loaded.path}: this checkpoint does not fit: {error}; "
            "without its scheduler it loads with "
            "load_lr_scheduler_states=False, and without its place in "
            "the data once engine.training_dataloader is None"
        ) from error


def _name(scheduler: Any) -> str:
    """DeepSpeed's name of its schedules, and of others that of their class."""
    return str(getattr(scheduler, "name", type(scheduler).__name__))


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


def _anything(folder: Path) -> bool:
    """Whether rank 0 finds that something was ever saved in a folder."""
    found = rank() == 0 and exists(folder)
    return broadcast_bytes(b"1" if found else b"0") == b"1"
