"""Where one category of model state is stored, and the check of names like its."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PLACES = ("device", "cpu", "nvme")


def check(name: str, value: str, known: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of the known ones."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


@dataclass(frozen=True)
class Placement:
    """Where one category of state is stored between steps.

    `sharded`: each rank keeps 1/N of it (else every rank keeps all of it).
    `on`: "device", "cpu" (host memory) or "nvme" (files).
    `group`: how many neighbors share one copy (chapter 17); None: all ranks.
    """

    sharded: bool = False
    on: str = "device"
    group: int | None = None

    def __post_init__(self) -> None:
        check("on", self.on, PLACES)
        if self.on != "device" and not self.sharded:
            raise ValueError(
                f"state on {self.on!r} must be sharded, or every rank would write a "
                "copy; choose a stage that shards it"
            )

    def ranks(self, world_size: int) -> int:
        """How many ranks share one copy, in equal parts."""
        if not self.sharded:
            return 1
        group = world_size if self.group is None else self.group
        if group < 1 or world_size % group:
            raise ValueError(
                f"{world_size} ranks cannot form groups of {group}; choose a group that "
                "divides the number of ranks"
            )
        return group
