"""Kernels that read and write memory once: Adam, norms, the loss over a vocabulary.

Read `launching`; `adam_kernel`, `kernel_adam`, `cpp_adam` with `adam.cpp`, `optimizers`;
then `norm_kernels`, `norms`, `loss_kernels`, `loss`. Imports nothing of the package. Triton
is imported when a kernel is first launched, and a compiler started when the first
`CPUAdam` is made.
"""

from .launching import launched, runs_on
from .loss import cross_entropy
from .norms import layer_norm, rms_norm
from .choose import muon_options, optimizer_call
from .optimizers import CPUAdam, FusedAdam

__all__ = [
    "CPUAdam",
    "FusedAdam",
    "cross_entropy",
    "launched",
    "layer_norm",
    "muon_options",
    "optimizer_call",
    "rms_norm",
    "runs_on",
]
