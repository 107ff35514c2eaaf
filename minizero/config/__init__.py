"""Reading a `ds_config.json`: `read` checks it and makes a `Config` of it.

Read `batch` (sizes), `schema` (sections and keys), `config` (all keys, and what they
mean), `ignored` (keys without effect or refused) and `read` (errors as sentences).
"""

from .batch import MICRO, STEPS, TOTAL, batch_sizes
from .config import Config
from .read import ConfigError, Source, check_options, load, read

__all__ = [
    "MICRO", "STEPS", "TOTAL", "Config", "ConfigError", "Source", "batch_sizes",
    "check_options", "load", "read",
]  # fmt: skip
