"""Live processes that run functions together: the machinery below `minizero.launch`.

It knows nothing of tensors or process groups. In the order to read it:

- `worker`: what runs in a rank, and `tasks`, the functions it is sent;
- `starting`: how its process comes to be, and `preload`, what is loaded only once;
- `child`: one rank, seen from its parent;
- `output`: what the ranks print, in rank order;
- `status_board`: what each rank is doing, readable while it is blocked;
- `failures`: what can go wrong, told in one error;
- `pool`: all the ranks together.
"""

from minizero.ranks.processes.child import LEAVE
from minizero.ranks.processes.failures import RankError
from minizero.ranks.processes.pool import Processes
from minizero.ranks.processes.tasks import pack
from minizero.ranks.processes.worker import report

__all__ = ["LEAVE", "Processes", "RankError", "pack", "report"]
