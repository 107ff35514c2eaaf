"""Processes that train together, and how they find each other.

Read `launch` (start ranks, ask who one is), `pool` (ranks that stay), `rendezvous` (how
they meet), and then `processes/`, what is beneath. Imports nothing of minizero.
"""

from .launch import (
    TIMEOUT,
    Pool,
    RankError,
    default_ranks,
    device,
    init_distributed,
    launch,
    rank,
    report,
    world_size,
)

__all__ = [
    "Pool",
    "RankError",
    "TIMEOUT",
    "default_ranks",
    "device",
    "init_distributed",
    "launch",
    "rank",
    "report",
    "world_size",
]
