"""Collectives that are under way while a rank computes.

Read `deferred_reduce`, `order`, `limits`, `prefetch`; then `machine`, `simulated_rank`,
`simulated_home` and `simulator`, which predict when it pays. Imports `zero` and what is
below it.
"""

from .prefetch import Overlap, exposed

__all__ = ["Overlap", "exposed"]
