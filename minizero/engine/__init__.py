"""DeepSpeed's interface: an engine that is driven by a config.

Read `step_loop`, `from_config`, `engine`, then the rest. `recording` and `tracing` are
beside it: a trace of what each rank did. Imports everything below.
"""

from .engine import Engine, initialize
from .tracing import trace

__all__ = ["Engine", "initialize", "trace"]
