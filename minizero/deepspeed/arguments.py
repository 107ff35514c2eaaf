"""The options that a DeepSpeed script adds to its own."""

from __future__ import annotations

import os
from argparse import SUPPRESS, ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Let a script take `--deepspeed` and `--deepspeed_config FILE`.

    A `--local_rank` that it has already is by default what torchrun says, which sets
    the environment where DeepSpeed's launcher gives the option.
    """
    if "LOCAL_RANK" in os.environ and parser.get_default("local_rank") is not None:
        parser.set_defaults(local_rank=int(os.environ["LOCAL_RANK"]))
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--deepspeed",
        action="store_true",
        help="for the script's own use; the engine does not look at it",
    )
    # its first name, which BingBertGlue still asks for
    group.add_argument("--deepscale", action="store_true", help=SUPPRESS)
    group.add_argument(
        "--deepspeed_config",
        "--deepscale_config",
        metavar="FILE",
        help="the config, a JSON file",
    )
    return parser
