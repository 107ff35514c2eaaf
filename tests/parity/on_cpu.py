"""Runs the script on a CPU, where DeepSpeed asks an Intel library for fast fp16.

Without that it refuses to train, though torch itself has all that the model needs.
"""

from __future__ import annotations

import logging

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from script import main

if get_accelerator().device_name() == "cpu":
    type(get_accelerator()).is_fp16_supported = lambda self: True
logger.setLevel(logging.ERROR)
main()
