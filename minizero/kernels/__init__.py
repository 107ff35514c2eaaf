"""Triton kernels that read and write memory once: Adam, norms, the loss over words.

Read `triton_kernels`, `launching`, `adam`, `ops`, and `optimizers`, which finds the
optimizer of a config. Triton is imported when a kernel is first launched.
"""

from .adam import FusedAdam
from .optimizers import muon_options, optimizer_call
from .launching import launched, runs_on
from .ops import cross_entropy, layer_norm, rms_norm

__all__ = ["FusedAdam", "cross_entropy", "launched", "layer_norm", "muon_options"]
__all__ += ["optimizer_call", "rms_norm", "runs_on"]
