"""Collectives, and the ledger that records each call.

Read `transport` (groups, rows, messages, the backend's own collectives), `algorithms`
(the direct exchange), `quantized` (rows in 8 or 4 bits), `ledger` and `collectives`
(what everybody calls).
Imports `ranks` and `memory`. No other part of the package calls a collective of torch.
"""

from ..ranks import rank as get_rank  # as DeepSpeed's module has them
from ..ranks import world_size as get_world_size
from .algorithms import ordered_sum
from .collectives import (
    Work,
    agreeing,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    check_sequence,
    gather_objects,
    reduce_scatter,
)
from .ledger import Call, Ledger, enter, ledger, phase
from .quantized import Quantized
from .transport import ALGORITHMS, Group, Groups, algorithm, current_algorithm
from .transport import everyone, exchange, reachable

__all__ = ["ALGORITHMS", "Call", "Group", "Groups", "Ledger", "Quantized", "Work"]
__all__ += ["agreeing", "algorithm", "all_gather", "all_reduce", "barrier", "broadcast"]
__all__ += ["check_sequence", "current_algorithm", "enter", "everyone", "exchange"]
__all__ += ["gather_objects", "get_rank", "get_world_size", "ledger", "ordered_sum"]
__all__ += ["phase", "reachable", "reduce_scatter"]
