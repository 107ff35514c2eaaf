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
from ..ranks.launch import rank, world_size
from .batches import BatchFeeder, place
from .step_loop import StepLoop

Folder = str | os.PathLike[str]


class RunCheckpoint:
    """Saves and loads all that a training run consists of.

    `trains`: False if there are no optimizer states.
    """

    def __init__(self, loop: StepLoop, feeder: BatchFeeder, trains: bool) -> None:
        self.loop, self.feeder = loop, feeder
        self.net, self.steps, self.trains = loop.net, loop.steps, trains

    def save(
        self,
        save_dir: Folder,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep: int | None = None,
        background: int = 0,
    ) -> bool:
        """Save the run as `save_dir/tag`; every rank calls it. Returns True.

        Weights, optimizer states and options, loss scale, scheduler,
        counters, the place in the data, random states of every rank, the
        gradients of a step whose micro-batches have not all had their
        `step()`, and rank 0's `client_state`: numbers, strings, tensors, and
        lists and dicts of them. Nothing is pickled.

        `tag`: default "global_step" and the number. `save_latest`: whether
        `load_checkpoint` without a tag shall find it. `exclude_frozen_parameters`
        has no effect, and a warning says so. `keep`, `background`:
        see `minizero.checkpoint.save`; what fails in the background is
        raised by the next save, `finish_checkpoint` or `destroy`.

        Raises ValueError without a folder, RuntimeError between a backward and
        its step, CheckpointError if it cannot be written: then on all ranks, and
        the checkpoints that there were are as before.
        """
        if not save_dir:
            raise ValueError(f"save_dir is a folder for checkpoints, not {save_dir!r}")
        self.loop.begin()
        if exclude_frozen_parameters and rank() == 0:
            warnings.warn(
                "exclude_frozen_parameters has no effect: a checkpoint is the whole "
                "model's, so that it loads anywhere; engine.save_16bit_model(folder, "
                "exclude_frozen_parameters=True) writes what is trained alone",
                stacklevel=3,
            )
        under_way = self.net.has_gradients
        if under_way and self.loop.pending:
            raise RuntimeError(
                f"{place(self.steps)} has had its backward() and not its step(); "
                "save after step(), or give the gradients up by zero_grad()"
            )
        scheduler, loader = self.loop.scheduler, self.feeder.loader
        engine = {
            "global_steps": self.steps.global_steps,
            "global_samples": self.steps.global_samples,
            "position": self.steps.position() if under_way else 0,
            "micro_batches": self.steps.config.gradient_accumulation_steps,
            "ranks": world_size(),
            "data": None if loader is None else loader.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scheduler_type": _name(scheduler),
        }
        if tag is None:
            tag = f"global_step{self.steps.global_steps}"
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
        checkpoint and no tag is given. Gradients are the saved ones; a step
        under way begins anew, with a warning, where its micro-batches are not
        as many whole ones on this number of ranks. An engine without an
        optimizer takes the weights and the counters.

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
        position = self._position(engine) if loaded.gradients else 0
        if not position:
            self.net.zero_grad()
        if engine is None:
            return str(loaded.path), loaded.extra
        if not load_module_only:
            counts = engine["global_steps"], engine["global_samples"]
            self.steps.resume(*counts, position)
        if engine["scheduler"] and scheduler is not None:
            scheduler.load_state_dict(engine["scheduler"])
        if engine["data"] and loader is not None:
            loader.load_state_dict(engine["data"])
        return str(loaded.path), loaded.extra["client"]


    def _position(self, engine: dict[str, Any] | None) -> int:
        """How many of this engine's micro-batches the loaded gradients are of."""
        of = self.steps.config.gradient_accumulation_steps * world_size()
        if engine is not None and engine["micro_batches"] * engine["ranks"] == of:
            position, rest = divmod(engine["position"] * engine["ranks"], world_size())
            if not rest:
                return int(position)
        if rank() == 0:
            warnings.warn(
                "the checkpoint was saved in the middle of a step that cannot go on "
                "here, with other ranks or sizes of batches; it begins anew",
                stacklevel=4,
            )
        return 0


_COUNTS = ("global_steps", "global_samples", "position", "micro_batches", "ranks")


def _check(scheduler: Any, loader: Any, loaded: Loaded) -> None:
    """Raise CheckpointError unless both can go on from it; changes nothing."""
    engine = saved_by_engine(loaded)
    if engine is None:
        return
    kind, before = _name(scheduler), engine["scheduler_type"]
    try:
        for name in _COUNTS:
            if type(engine[name]) is not int or engine[name] < 0:
                raise ValueError(f"{name} is {engine[name]!r}")
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
    parts = {"scheduler", "scheduler_type", "data", *_COUNTS}
    ours = isinstance(engine, dict) and parts <= engine.keys()
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
