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

from .child import LEAVE
from .faults import RankError
from .processes import Processes
from .worker import pack, report

__all__ = ["LEAVE", "Processes", "RankError", "pack", "report"]
