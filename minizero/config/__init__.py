"""What a `ds_config.json` says, checked: `read` makes a `Config` of it.

Read `batch`, then `keys` (what a key is), `sections` and `zero` (the keys), `config`
(all of them together), `source`, `read` and `sentences`, `checks` (keys that contradict
each other), `unsupported`. Imports `memory`.
"""

from .config import Config
from .read import read
from .source import ConfigError

__all__ = ["Config", "ConfigError", "read"]
