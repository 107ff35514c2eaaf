"""Any function computed again in backward, in one way for the whole process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .recompute import Recompute
from .stores import Offloaded

how = Recompute("full")
# whether a script has called DeepSpeed's `configure`; only `is_configured` asks
configured = False


def use(on_host: bool) -> None:
    """From now on `checkpoint` keeps arguments in host memory, or on the device."""
    global how
    how = Recompute("full", Offloaded() if on_host else None)


def reset() -> None:
    """Forget the forwards that no backward will follow."""
    global how
    how = Recompute("full", type(how.store)() if how.store else None)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, of which only the arguments are kept.

    The rest is computed again in backward, with the same random numbers
    (Chen et al. 2016). In an evaluation nothing is kept.
    """
    return how(function, *args, **kwargs)
