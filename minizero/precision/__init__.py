"""The dtypes of a run: master weights, loss scale, 8-bit products.

Read `loss_scale`, `mixed`, `float8`. Imports `zero` and what is below it.
"""

from .float8 import (
    E4M3,
    E5M2,
    Float8Linear,
    Where,
    has_float8,
    product,
    quantise,
    use_float8,
)
from .loss_scale import (
    DynamicLossScale,
    LossScale,
)
from .mixed import (
    Dtypes,
    MixedPrecision,
)

__all__ = [
    "Dtypes",
    "DynamicLossScale",
    "E4M3",
    "E5M2",
    "Float8Linear",
    "LossScale",
    "MixedPrecision",
    "Where",
    "has_float8",
    "product",
    "quantise",
    "use_float8",
]
