"""The options that a DeepSpeed script adds to its own."""

from __future__ import annotations

from argparse import ArgumentParser


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
