"""DeepSpeed's interface: an engine that is driven by a config.

Read `step_loop` (what a micro-batch does), `from_config` (keys become objects), `engine`
(what a script holds) and `start` (how it is made); beside them `optimizer`, `data`,
`lr_schedules`, `muon_groups`, and `recording`: what each rank did, in a trace. Imports
everything below.
"""

from .engine import Engine
from .start import initialize
from .recording import trace

__all__ = ["Engine", "initialize", "trace"]
