"""Where the bytes of training are: the plan, the formulas, and what is measured.

Read `placement`, `plan` (plans, `estimate`), `labels` (what a storage is for; host
memory), `tracker` (live bytes over time) and `trace` (these beside what ranks did).
Imports nothing of minizero.
"""

from .labels import host_empty, label, labelled_bytes, mark
from .placement import Placement
from .plan import Plan, estimate, estimate_activations
from .tracker import Sample, Tracker, see_memory_usage

__all__ = ["Placement", "Plan", "Sample", "Tracker", "estimate", "estimate_activations"]
__all__ += ["host_empty", "label", "labelled_bytes", "mark", "see_memory_usage"]
