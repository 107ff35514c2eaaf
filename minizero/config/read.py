"""Reads a config: from a dict, a file or JSON text to a `Config`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from .batch import batch_sizes
from .checks import errors, shown, warnings
from .unsupported import REFUSED
from .schema import Entry, entries, walk
from .source import ConfigError, load
from .top import Config
from .values import Misfit, expected, fit, hint


def read(
    source: str | os.PathLike[str] | Mapping[str, Any],
    world_size: int = 1,
    auto: Mapping[str, Any] | None = None,
) -> Config:
    """A complete config for `world_size` ranks.

    `source`: a dict, the path of a JSON file, or JSON text. `auto`: for an
    integration, what each key that stands at "auto" becomes, by its dotted
    name. Raises ConfigError, with a sentence for each problem.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size!r}")
    given, name = load(source)
    reader = Reader(auto or {})
    config = reader.section(Config, given)
    if config is None:
        raise ConfigError(reader.problems, name)
    try:
        config = _complete(config, world_size)
        problems = list(errors(config))
    except ValueError as error:
        problems = [str(error)]
    if problems:
        raise ConfigError(problems, name)
    return dataclasses.replace(config, warnings=tuple(warnings(config)))


def _complete(config: Config, ranks: int) -> Config:
    """With the batch sizes and the switches that follow from others."""
    total, micro, steps = batch_sizes(
        ranks,
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    zero = config.zero_optimization
    if zero.overlap_comm is None:
        zero = dataclasses.replace(zero, overlap_comm=zero.stage == 3)
    return dataclasses.replace(
        config,
        train_batch_size=total,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
        zero_optimization=zero,
        world_size=ranks,
    )


class Reader:
    """Makes sections from objects of JSON; collects `problems`."""

    def __init__(self, auto: Mapping[str, Any]) -> None:
        self.auto = auto
        self.problems: list[str] = []

    def section(self, cls: type, given: Mapping[str, Any], path: str = "") -> Any:
        """A section, a dataclass; None if there is a problem in it."""
        before = len(self.problems)
        known = entries(cls)
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                self._stranger(known, str(name), value, path)
            elif not known[name].about.variants:
                self._add(values, known[name], value, path)
        for name, entry in known.items():
            variant = entry.about.variants.get(values.get("type", ""))
            if variant is not None:
                chosen = dataclasses.replace(entry, kind=variant)
                options = given.get(name)
                options = {} if options is None else options
                self._add(values, chosen, options, path)
            if entry.required and name not in given:
                self.problems.append(f"{path}{name} is missing; give {expected(entry)}")
        return None if len(self.problems) > before else cls(**values)

    def _add(self, values: dict[str, Any], entry: Entry, value: Any, path: str) -> None:
        """Put the value of a key among `values`, as what it must be."""
        where = f"{path}{entry.name}"
        if value == "auto":
            if where not in self.auto:
                leave = "" if entry.required else ", or leave it out"
                self.problems.append(
                    f'{where} is "auto", but nothing fills it here; give '
                    f"{expected(entry)}{leave}"
                )
                return
            value = self.auto[where]
        if value is None and (entry.section or entry.default is None):
            return
        if entry.section and isinstance(value, Mapping):
            values[entry.name] = self.section(entry.section, value, f"{where}.")
            return
        try:
            values[entry.name] = fit(entry.kind, entry.about, value)
        except Misfit:
            self.problems.append(
                f"{where} must be {expected(entry)}, not {shown(value)}"
                f"{hint(entry, value)}"
            )

    def _stranger(
        self, known: Mapping[str, Entry], name: str, value: Any, path: str
    ) -> None:
        """A key that is refused, misplaced or misspelt."""
        where = f"{path}{name}"
        if where in REFUSED:
            refused = REFUSED[where]
            if refused.asks(value):
                said = "" if isinstance(value, dict) else f" = {shown(value)}"
                self.problems.append(
                    f"minizero does not do {where}{said}: {refused.instead}"
                )
            return
        place = path.rstrip(".") or "the config"
        self.problems.append(
            f'{place} has no key "{name}"; {_meant(known, name, path)}'
        )


def _meant(known: Mapping[str, Entry], name: str, path: str) -> str:
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
