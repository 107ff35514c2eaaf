"""Makes an engine from what a script passes to `initialize`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..activations import CHECKPOINT, Offloaded
from ..config import Config, Source, check_options, read
from ..kernels import muon_options, optimizer_call
from ..ranks import init_distributed, rank, world_size
from ..zero.build import Policy, groups_of
from ..zero.muon import Muon
from .data import Collate, Loader
from .engine import Engine
from .from_config import wrap
from .lr_schedules import SCHEDULES
from .muon_groups import muon_groups
from .optimizer import EngineOptimizer

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    model_parameters: Parameters | None = None,
    training_data: Any = None,
    lr_scheduler: Any | MakeScheduler | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Collate | None = None,
    config: Source | None = None,
    mesh_param: Any = None,
    config_params: Source | None = None,
    units: Policy | None = None,
) -> tuple[Engine, EngineOptimizer | None, Loader | None, Any]:
    """Returns an engine for `model`, its optimizer, its data loader, its scheduler.

    The arguments are DeepSpeed's, in its order, and `units`. What is neither given nor
    in the config is None. Without an optimizer the engine evaluates: parameters are
    frozen, and at stage 3 they are sharded.

    Args:
        model: any module; parameters and buffers get rank 0's values.
        optimizer: an element-wise `torch.optim` optimizer over the model's parameters,
            or a function that makes one of `model_parameters`; default: the config's.
        model_parameters: parameters, or groups (dicts) of them; default: all.
        training_data: a dataset with `len` and `[index]`; each rank sees its part.
        lr_scheduler: a scheduler, or a function that makes one of the optimizer;
            default: the config's. `engine.step` steps it.
        collate_fn: makes a batch of a list of samples.
        config, config_params, args.deepspeed_config: one of them is the config, a dict,
            the path of a JSON file, or JSON text.
        units: whether a module communicates as one unit; default: the members of
            `nn.ModuleList` and `nn.Sequential`.
        dist_init_required: no effect: ranks connect if they have not yet.

    ConfigError has a sentence for each problem of the config.
    """
    if (distributed_port, mpu, mesh_param) != (None, None, None):
        raise ValueError(
            "leave out mpu, mesh_param, distributed_port: all ranks are data-parallel"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model= takes a torch.nn.Module, not {model!r}")
    sources = [config, config_params, getattr(args, "deepspeed_config", None)]
    found = [source for source in sources if source is not None]
    if len(found) != 1:
        raise ValueError(f"initialize takes one config, config=..., not {len(found)}")
    init_distributed()
    settings = read(found[0], world_size())
    inner = make_optimizer(settings, optimizer, model, model_parameters)
    scheduler = make_scheduler(settings, lr_scheduler, inner)
    loader = None
    if training_data is not None:
        size = settings.train_micro_batch_size_per_gpu
        loader = Loader(training_data, size, collate_fn, settings.dataloader_drop_last)
    if settings.activation_checkpointing.model_fields_set:  # else `configure` decides
        in_host = settings.activation_checkpointing.cpu_checkpointing
        CHECKPOINT.store = Offloaded() if in_host else None
    notes = [*settings.warnings]
    if inner is not None and (frozen := ", ".join(_freeze(model, inner))):
        notes.append(f"frozen, for the optimizer has no group with them: {frozen}")
    if settings.optimizer is not None and optimizer is not None:
        notes.append("the config's optimizer has no effect: initialize got another")
    if settings.scheduler is not None and (lr_scheduler is not None or inner is None):
        why = "there is no optimizer" if inner is None else "initialize got another"
        notes.append(f"the config's scheduler has no effect: {why}")
    scheduled = getattr(scheduler, "optimizer", inner)  # accelerate's is a wrapper
    if getattr(scheduled, "optimizer", scheduled) is not inner:
        notes.append("the lr_scheduler moves another optimizer, so the rate stays")
    if notes and rank() == 0:
        warnings.warn("\n".join(notes), stacklevel=2)
    net = wrap(model, inner, settings, units)
    outer = None if inner is None else EngineOptimizer(net, settings)
    engine = Engine(settings, net, outer, scheduler, loader)
    return engine, outer, loader, scheduler


def _freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Freeze each parameter that the optimizer has no group with; yields its name."""
    updated = groups_of(model, optimizer)
    for name, p in model.named_parameters():
        if p.requires_grad and p not in updated:
            p.requires_grad_(False)
            yield name


def make_optimizer(
    config: Config,
    given: torch.optim.Optimizer | MakeOptimizer | None,
    model: nn.Module,
    parameters: Parameters | None,
) -> torch.optim.Optimizer | None:
    """What is given or what the given function makes; else the config's, or None."""
    parameters = [*(model.parameters() if parameters is None else parameters)]
    if given is not None:
        made = given(parameters) if callable(given) else given
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(
                "optimizer= takes a torch.optim.Optimizer, or a function that makes "
                f"one of parameters, not {made!r}"
            )
        return made
    if (chosen := config.optimizer) is None:
        return None
    if chosen.type == "Muon":
        muon, adam = muon_options(chosen.params)
        check_options(torch.optim.Muon, muon, "optimizer.params")
        return Muon(muon_groups(model, parameters, muon, adam))
    kind, options = optimizer_call(chosen.type, chosen.params)
    check_options(kind, options, "optimizer.params")
    return kind(parameters, **options)


def make_scheduler(
    config: Config, given: Any, optimizer: torch.optim.Optimizer | None
) -> Any:
    """What is given or what the given function makes; else the config's, or None."""
    if given is None:
        if (chosen := config.scheduler) is None or optimizer is None:
            return None
        kind = SCHEDULES[chosen.type]
        check_options(kind, chosen.params, "scheduler.params")
        return kind(optimizer, **chosen.params)
    if optimizer is None:
        raise ValueError("lr_scheduler= needs an optimizer, and there is none")
    made = given(optimizer) if callable(given) else given  # torch's are not callable
    if not callable(getattr(made, "step", None)):
        raise TypeError(
            "lr_scheduler= takes an object with step(), or a function that makes one "
            f"of an optimizer, not {made!r}"
        )
    return made
