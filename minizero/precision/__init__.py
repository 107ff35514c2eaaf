"""The dtypes of a run: master weights, loss scale, 8-bit products.

Read `mixed`, `settings`, then `float8`. Imports `zero` and what is below it.
"""

from .float8 import Float8Linear, use_float8
from .mixed import MixedPrecision
from .settings import DynamicLossScale, LossScale

__all__ = ["DynamicLossScale", "Float8Linear", "LossScale", "MixedPrecision"]
__all__ += ["use_float8"]
