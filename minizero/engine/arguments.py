"""What `initialize` is given: checked, before anything is made of it."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config
from ..config.sections import MuonParams
from ..config.source import Source
from ..kernels import optimizer_class
from ..ranks.launch import rank
from ..zero.construction import nets_of
from ..zero.elementwise import groups_of
from ..zero.flat_buffer import Layout, in_order
from ..zero.muon import Muon
from ..zero.muon_groups import muon_groups
from ..zero.units import Policy, assign, split, units_of
from .lr_schedules import SCHEDULES

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


def refuse(**given: Any) -> None:
    """Raise ValueError for arguments that nothing here stands for."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"minizero does not do {name}={value!r}: its ranks are all "
                "data-parallel, and find each other as torchrun says; leave "
                "it out"
            )


def overruled(config: Config, **given: Any) -> list[str]:
    """A sentence for each section that an argument takes the place of."""
    return [
        f"{name}.type = {json.dumps(getattr(config, name).type)} has no "
        f"effect: initialize was given another {name}"
        for name, value in given.items()
        if value is not None and getattr(config, name) is not None
    ]


def the_source(
    args: Any, config: Source | None, config_params: Source | None
) -> Source:
    """The one config that was given."""
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    found = {k: v for k, v in given.items() if v is not None}
    if len(found) != 1:
        those = " and ".join(found) or "none"
        raise ValueError(
            f"initialize takes one config, and got {those}; give "
            "config=..., a dict or the path of a JSON file"
        )
    return found.popitem()[1]


def take_over(model: nn.Module) -> str | None:
    """Take the model from another engine that has it; then a sentence says so."""
    if nets_of(model.parameters()):
        gc.collect()  # an engine that nobody holds any more
    nets = nets_of(model.parameters())
    for net in nets:
        net.let_go()
    return (
        "this model had an engine, which is over now: the new one has taken over its "
        "weights as they are, and has no optimizer state yet"
        if nets
        else None
    )


def freeze_others(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Freeze what the optimizer does not update; then a sentence says what.

    ValueError for an optimizer of other parameters than the model's.
    """
    updated = groups_of(model, optimizer)
    others = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and p not in updated
    }
    for p in others.values():
        p.requires_grad_(False)
    first = ", ".join([*others][:3]) + (", ..." if len(others) > 3 else "")
    return (
        f"{len(others)} parameters are in no group of the optimizer, which are frozen "
        f"now: {first}"
        if others
        else None
    )


def live_parameters(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Config,
    units: Policy | None,
) -> int:
    """`stage3_max_live_parameters`; at least the root and the largest unit."""
    zero = config.zero_optimization
    most = zero.stage3_max_live_parameters
    if zero.stage < 3 or not zero.overlap_comm:
        return most
    group_of = groups_of(model, optimizer)
    sizes = {
        name: sum(Layout(part, in_order).padded for _, part in split(named, group_of))
        for name, named in assign(model, units_of(model, units)).items()
    }
    least = sizes.pop("") + max(sizes.values(), default=0)
    if least > most and rank() == 0:
        warnings.warn(
            f"stage3_max_live_parameters = {most:,} is less than the root and the "
            f"largest unit need, {least:,}; no more than the units in use will be whole",
            stacklevel=4,
        )
    return max(least, most)


def make_optimizer(
    config: Config,
    given: torch.optim.Optimizer | MakeOptimizer | None,
    model: nn.Module,
    parameters: Parameters,
) -> torch.optim.Optimizer | None:
    """The optimizer: the client's, what its factory makes, or the config's.

    None if there is none. Raises TypeError if it is none of these,
    ValueError for a plan that shards what only an optimizer has.
    """
    if isinstance(given, torch.optim.Optimizer):
        return given
    if given is None and config.optimizer is not None:
        if isinstance(config.optimizer.params, MuonParams):
            halves = config.optimizer.params.halves()
            return Muon(muon_groups(model, parameters, *halves))
        name, options = config.optimizer.torch_call()
        return optimizer_class(name)(parameters, **options)
    if given is None and config.zero_optimization.stage in (1, 2):
        raise ValueError(
            "there is no optimizer; give one as optimizer=..., or name one "
            'in the config: {"optimizer": {"type": "AdamW"}}. To evaluate '
            "without one, take stage 0 or 3: the others shard only what it "
            "needs"
        )
    if given is None:
        return None
    made = given(parameters) if callable(given) else given
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "optimizer= takes a torch.optim.Optimizer, or a function that "
            f"makes one of parameters; this is, or makes, {made!r}"
        )
    return made


def make_scheduler(
    config: Config,
    given: Any,
    optimizer: torch.optim.Optimizer | None,
) -> Any:
    """The scheduler: the client's, what its factory makes, or the config's.

    None if there is none, or only the config's and no optimizer. Raises TypeError
    if it cannot step. It may move another optimizer, of which a warning tells.
    """
    if optimizer is None and given is not None:
        raise ValueError(
            "lr_scheduler= moves the rate of an optimizer, and there is "
            "none; leave it out, or give an optimizer"
        )
    if optimizer is None or (given is None and config.scheduler is None):
        return None
    if given is None:
        chosen = config.scheduler
        assert chosen is not None
        return SCHEDULES[chosen.type](optimizer, **vars(chosen.params))
    # objects of torch's schedulers are not callable
    made = given(optimizer) if callable(given) else given
    if not callable(getattr(made, "step", None)):
        raise TypeError(
            "lr_scheduler= takes an object with step(), or a function that "
            f"makes one of an optimizer; this is, or makes, {made!r}"
        )
    moved = getattr(made, "optimizer", optimizer)
    moved = getattr(moved, "optimizer", moved)  # in a wrapper
    if moved is not optimizer and rank() == 0:
        warnings.warn(
            f"the scheduler moves another optimizer, a {type(moved).__name__}, so the "
            "learning rate stays; make it of the one given as optimizer=..., or give a "
            "function that makes it",
            stacklevel=3,
        )
    return made
