"""Reads a config: from a dict, a file or JSON text to a `Config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from .batch import MICRO, STEPS, TOTAL, batch_sizes
from .checks import errors, warnings
from .config import Config
from .keys import Key, Section, keys, walk
from .sentences import expected, hint, shown
from .source import ConfigError, Source, load
from .unsupported import REFUSED

S = TypeVar("S", bound=Section)


def read(
    source: Source, world_size: int = 1, auto: Mapping[str, Any] | None = None
) -> Config:
    """A complete config for `world_size` ranks.

    `source`: a dict, the path of a JSON file, or JSON text. `auto`: for an
    integration, what each key that stands at "auto" becomes, by its dotted name.
    Raises ConfigError, with a sentence for each problem.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size!r}")
    given, name = load(source)
    config, problems = section(Config, given, auto or {})
    if config is not None:
        try:
            config = _complete(config, world_size)
            problems = list(errors(config))
        except ValueError as error:
            problems = [str(error)]
    if config is None or problems:
        raise ConfigError(problems, name)
    return config.model_copy(update={"warnings": tuple(warnings(config))})


def _complete(config: Config, ranks: int) -> Config:
    """With the batch sizes and the switches that follow from others."""
    sizes = batch_sizes(
        ranks, *(getattr(config, name) for name in (TOTAL, MICRO, STEPS))
    )
    zero = config.zero_optimization
    if zero.overlap_comm is None:
        zero = zero.model_copy(update={"overlap_comm": zero.stage == 3})
    found: dict[str, Any] = dict(zip((TOTAL, MICRO, STEPS), sizes, strict=True))
    found |= {"zero_optimization": zero, "world_size": ranks}
    return config.model_copy(update=found)


def section(
    cls: type[S], given: Mapping[str, Any], auto: Mapping[str, Any], path: str = ""
) -> tuple[S | None, list[str]]:
    """A section of what is given; or None, and a sentence for each problem."""
    given = {
        name: auto.get(f"{path}{name}", value) if value == "auto" else value
        for name, value in given.items()
    }
    known, given = _chosen(keys(cls), given)
    values: dict[str, Any] = {}
    said: dict[str, list[str]] = {name: [] for name in given}
    for name, value in given.items():
        key, where = known.get(name), f"{path}{name}"
        if key is None:
            said[name] = _stranger(known, str(name), value, path)
        elif value == "auto":
            said[name] = [_not_filled(key, where)]
        elif key.section and isinstance(value, Mapping):
            values[name], said[name] = section(key.section, value, auto, f"{where}.")
        elif value is not None or not (key.section or key.default is None):
            values[name] = value
    made, wrong = cls.of({n: value for n, value in values.items() if not said[n]})
    for name in wrong:
        key, where = known[name], f"{path}{name}"
        if name in values:
            value = values[name]
            must = f"{where} must be {expected(key)}, not {shown(value)}"
            said[name] = [f"{must}{hint(cls, key, where, value)}"]
        elif name not in given:
            said[name] = [f"{where} is missing; give {expected(key)}"]
    problems = [sentence for each in said.values() for sentence in each]
    return None if problems else made, problems


def _chosen(
    known: Mapping[str, Key], given: Mapping[str, Any]
) -> tuple[Mapping[str, Key], Mapping[str, Any]]:
    """Keys and values with `params` as the section that the `type` beside it says."""
    params = known.get("params")
    if params is None:
        return known, given
    kinds = {name.lower(): kind for name, kind in params.variants.items()}
    kind = kinds.get(str(given.get("type")).lower())
    options = given.get("params")
    rest = {name: value for name, value in given.items() if name != "params"}
    if kind is None:
        return known, rest
    chosen = dataclasses.replace(params, section=kind)
    options = {} if options is None else options
    return {**known, "params": chosen}, {**rest, "params": options}


def _not_filled(key: Key, where: str) -> str:
    leave = "" if key.required else ", or leave it out"
    return f'{where} is "auto", but nothing fills it here; give {expected(key)}{leave}'


def _stranger(known: Mapping[str, Key], name: str, value: Any, path: str) -> list[str]:
    """What to say of a key that is refused, misplaced or misspelt."""
    where = f"{path}{name}"
    if where not in REFUSED:
        place = path.rstrip(".") or "the config"
        return [f'{place} has no key "{name}"; {_meant(known, name, path)}']
    refused = REFUSED[where]
    if not refused.asks(value):
        return []
    said = "" if isinstance(value, dict) else f" = {shown(value)}"
    return [f"minizero does not do {where}{said}: {refused.instead}"]


def _meant(known: Mapping[str, Key], name: str, path: str) -> str:
    """What was meant by a key that there is not."""
    everywhere = [*(where for where, _ in walk(Config)), *REFUSED]
    split = [where.rpartition(".") for where in everywhere]
    here = path.rstrip(".")
    places = {at for at, _, key in split if key == name and at != here}
    if places:
        names = " or ".join(place or "the top" for place in sorted(places))
        return f"it belongs in {names}"
    lower = {key.lower(): key for key in known}
    close = get_close_matches(name.lower(), lower, n=1) or [
        key for key in lower if name and key.startswith(name.lower())
    ]
    if not close:
        refused = [key for where in REFUSED if (key := _in(here, where))]
        lower = {key.lower(): key for key in refused}
        close = get_close_matches(name.lower(), lower, n=1, cutoff=0.8)
    if close:
        return f'did you mean "{lower[close[0]]}"?'
    if len(known) > 10:
        return "remove it, or look for it in the config reference"
    return f"its keys are {', '.join(known)}"


def _in(section: str, where: str) -> str:
    """The name of a key if it is of the section, else ""."""
    place, _, name = where.rpartition(".")
    return name if place == section else ""
