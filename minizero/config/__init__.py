"""What a `ds_config.json` says, checked: `read` makes a `Config` of it."""

from .read import read
from .source import ConfigError
from .top import Config

__all__ = ["Config", "ConfigError", "read"]
