"""DeepSpeed's interface: an engine that is driven by a config.

Read `step_loop`, `from_config`, `engine`, `start`, then the rest. `recording` is beside
it: what each rank did, in a trace. Imports everything below.
"""

from .engine import Engine
from .start import initialize
from .recording import trace

__all__ = ["Engine", "initialize", "trace"]
