"""What `Overlap` refuses: settings that count nothing, limits that are too small."""

from __future__ import annotations

from ..zero.flat import Unit


def check_settings(settings: dict[str, int]) -> None:
    """Each must count elements, and a limit at least one."""
    for name, value in settings.items():
        least = int(name == "max_live_parameters")
        if isinstance(value, bool) or value < least or value % 1:
            what = f"a whole number of at least {least}, not {value!r}"
            raise ValueError(f"{name} counts elements: it must be {what}")


def does_not_fit(unit: Unit, used: dict[Unit, int], limit: int) -> ValueError:
    """The error when a unit does not fit beside the others that are in use."""
    size, total = used[unit], sum(used.values())
    return ValueError(
        f"unit {unit.name!r} has {size:,} elements, and {total - size:,} of other units "
        f"are in use {[u.name for u in used if u is not unit]}, but "
        f"max_live_parameters is {limit:,}; set it to {total:,} or more, or make "
        "smaller units"
    )
