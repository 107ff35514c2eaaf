"""Collectives, and the ledger in which each call is entered.

Read `groups` (which ranks), `transport` (messages), `algorithms` (the direct exchange),
`quantized` (rows in 8 or 4 bits), `backend` (its own collectives), `ledger`,
`collectives` (what everybody calls) and `agreement` (objects and errors).
Imports `ranks` and `memory`. No other part of the package calls a collective of torch.
"""

from ..ranks.launch import rank as get_rank  # as DeepSpeed's module has them
from ..ranks.launch import world_size as get_world_size
from .agreement import agreeing, check_sequence, gather_objects
from .algorithms import ordered_sum
from .collectives import (
    Work,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    reduce_scatter,
)
from .groups import Group, Groups, everyone
from .ledger import Call, Ledger, enter, ledger, phase
from .quantized import Quantized
from .transport import ALGORITHMS, algorithm, current_algorithm, exchange, reachable

__all__ = [
    "ALGORITHMS",
    "Call",
    "Group",
    "Groups",
    "Ledger",
    "Quantized",
    "Work",
    "agreeing",
    "algorithm",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "check_sequence",
    "current_algorithm",
    "enter",
    "everyone",
    "exchange",
    "gather_objects",
    "get_rank",
    "get_world_size",
    "ledger",
    "ordered_sum",
    "phase",
    "reachable",
    "reduce_scatter",
]
