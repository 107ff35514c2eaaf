"""DeepSpeed's interface: an engine that is driven by a config.

Read `step_loop`, `from_config`, `engine`, then the rest. Imports everything below.
"""

from .engine import Engine, initialize

__all__ = ["Engine", "initialize"]
