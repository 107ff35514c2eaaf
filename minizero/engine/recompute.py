"""Functions computed again in backward: how, for the whole process.

A model calls `checkpoint`, and knows neither the config nor the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..activations.checkpointing import Checkpointing
from ..activations.stores import Offloaded

# whether `use` was called by the script, which overrules configs
by_script = False
_on_host = False
_how = Checkpointing("full")


def use(on_host: bool) -> None:
    """From now on `checkpoint` keeps arguments in host memory, or does not."""
    global _on_host, _how
    _on_host = on_host
    _how = Checkpointing("full", Offloaded() if on_host else None)


def reset() -> None:
    """Forget the forwards that no backward will follow."""
    use(_on_host)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, of which only the arguments are kept.

    The rest is computed again in backward, with the same random numbers
    (Chen et al. 2016). In an evaluation nothing is kept.
    """
    return _how(function, *args, **kwargs)
