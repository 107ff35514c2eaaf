"""What scripts print with, and seed."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterable

import torch

from ..ranks.launch import rank

logger = logging.getLogger("minizero")
if not logger.handlers:  # as DeepSpeed's, it prints by itself
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_dist(
    message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO
) -> None:
    """Log on these ranks; -1 stands for all of them, and so does None."""
    chosen = [*(ranks or [-1])]
    if rank() in chosen or -1 in chosen:
        logger.log(level, "[Rank %d] %s", rank(), message)


def set_random_seed(seed: int) -> None:
    """Of Python, NumPy if the script uses it, and torch."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
