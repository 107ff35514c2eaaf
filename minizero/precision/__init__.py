"""The dtypes of a run: master weights, loss scale, 8-bit products.

Read `loss_scale`, `settings`, `mixed`, `float8`. Imports `zero` and what is below it.
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
    Masters,
    MixedPrecision,
)

__all__ = [
    "DynamicLossScale",
    "E4M3",
    "E5M2",
    "Float8Linear",
    "LossScale",
    "Masters",
    "MixedPrecision",
    "Where",
    "has_float8",
    "product",
    "quantise",
    "use_float8",
]
