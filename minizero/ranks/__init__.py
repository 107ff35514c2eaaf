"""Processes that train together, and how they find each other.

Read `launch` (start ranks, ask who one is), `pool` (ranks that stay), `worker` (what runs
in them), `reports` (why they are stuck) and `rendezvous` (how they meet). Imports no
other part of minizero.
"""

from .launch import device, launch, rank, world_size
from .pool import Pool, RankError, default_ranks
from .rendezvous import TIMEOUT, init_distributed
from .reports import report

__all__ = ["Pool", "RankError", "TIMEOUT", "default_ranks", "device"]
__all__ += ["init_distributed", "launch", "rank", "report", "world_size"]
