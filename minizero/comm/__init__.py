"""Collectives, and the ledger in which each call is entered.

Read `point_to_point` (send and receive), `offers` (large messages), `algorithms`
(collectives made of them), `backend` (its own, and the choice), `scope` (among which
ranks), `quantized` (rows in 8 or 4 bits), `ledger`, `sequence` (do all ranks make the
same calls?), `collectives` (what everybody calls), `all_to_all`, `grid` (a group as the
whole world), and `agreement` (one rank's bytes, anybody's error). Imports `ranks` and
`memory`. Nothing outside this folder calls a collective of torch.
"""

from ..ranks.launch import rank as get_rank  # as DeepSpeed's module has them
from ..ranks.launch import world_size as get_world_size
from .backend import ALGORITHMS, algorithm, beside, current_algorithm
from .collectives import (
    Work,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    reduce_scatter,
)
from .ledger import Call, Ledger, enter, ledger, phase
from .quantized import quantized
from .scope import Groups, Scope, among
from .sequence import check_sequence

__all__ = [
    "ALGORITHMS",
    "Call",
    "Groups",
    "Ledger",
    "Scope",
    "Work",
    "algorithm",
    "all_gather",
    "all_reduce",
    "among",
    "barrier",
    "beside",
    "broadcast",
    "check_sequence",
    "current_algorithm",
    "enter",
    "get_rank",
    "get_world_size",
    "ledger",
    "phase",
    "quantized",
    "reduce_scatter",
]
