"""Any function computed again in backward, in one way for the whole process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .recompute import Recompute
from .stores import Offloaded

how = Recompute("full")
configured = False


def use(on_host: bool, *, by_script: bool = False) -> None:
    """From now on `checkpoint` keeps arguments in host memory, or on the device.

    What a script has set itself, an engine's config does not change.
    """
    global how, configured
    if by_script or not configured:
        how = Recompute("full", Offloaded() if on_host else None)
    configured = configured or by_script


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
