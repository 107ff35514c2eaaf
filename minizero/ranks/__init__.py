"""Processes that train together, and how they find each other.

Read `rendezvous` (how a process becomes a rank, and asks who it is), `pool` (start
ranks, run functions on them), `worker` (what runs in them) and `reports` (why they are
stuck). Imports no other part of minizero.
"""

from .pool import Pool, RankError, default_ranks, launch
from .rendezvous import TIMEOUT, device, init_distributed, rank, world_size
from .reports import Report, report

__all__ = ["Pool", "RankError", "Report", "TIMEOUT", "default_ranks", "device"]
__all__ += ["init_distributed", "launch", "rank", "report", "world_size"]
