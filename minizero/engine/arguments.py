"""What `initialize` is given: looked at before anything is made of it."""

from __future__ import annotations

import gc
import json
from argparse import ArgumentParser
from typing import Any

from torch import nn

from ..config import Config
from ..config.source import Source as Source
from ..zero.construction import nets_of


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


def check_model(model: Any) -> None:
    """Raise unless it is a module that no engine has taken over."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model= takes a torch.nn.Module, not {model!r}")
    if nets_of(model.parameters()):
        gc.collect()  # an engine that nobody holds any more
    if nets_of(model.parameters()):
        raise ValueError(
            "another engine, or parallelize, has taken over the parameters "
            "of this model; go on with that one, or make a new model"
        )


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Let a script take `--deepspeed` and `--deepspeed_config FILE`."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--deepspeed",
        action="store_true",
        help="for the script's own use; the engine does not look at it",
    )
    group.add_argument(
        "--deepspeed_config",
        metavar="FILE",
        help="the config, a JSON file",
    )
    return parser
