"""Live processes that run functions together: the machinery below `minizero.launch`.

It knows nothing of tensors or process groups. In the order to read it:

- `worker`: what runs in a rank;
- `server`: the process that ranks are forked from, and `forking`, its parent's side;
- `child`: one rank, seen from its parent;
- `output`: what the ranks print, in rank order;
- `board`: what each rank is doing, readable while it is blocked;
- `faults`: what can go wrong, told in one error;
- `processes`: all the ranks together.
"""

from minizero.ranks.processes.child import LEAVE
from minizero.ranks.processes.failures import RankError
from minizero.ranks.processes.pool import Processes
from minizero.ranks.processes.worker import pack, report

__all__ = ["LEAVE", "Processes", "RankError", "pack", "report"]
