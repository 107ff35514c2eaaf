"""Reads a config: from a dict, a file or JSON text to a `Config`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from .batch import MICRO, STEPS, TOTAL, batch_sizes
from .checks import errors, warnings
from .config import Config
from .keys import Key, Section, expected, keys, lenient, shown, walk
from .source import ConfigError, Source, load
from .unsupported import ADVICE, OLD, REFUSED

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
    said: list[str] = []
    given, problems = _respelt(given, said)
    config, wrong = section(Config, given, auto or {}, said)
    problems += wrong
    if config is not None and not problems:
        try:
            config = _complete(config, world_size)
            problems = list(errors(config))
        except ValueError as error:
            problems = [str(error)]
    if config is None or problems:
        raise ConfigError(problems, name)
    return config.model_copy(update={"warnings": (*said, *warnings(config))})


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


def _respelt(
    given: Mapping[str, Any], said: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """What is given, in today's spelling; a sentence for each key that is there twice.

    `said` gets a sentence for each old spelling that asks for something.
    """

    def copied(x: Any) -> Any:
        return {k: copied(v) for k, v in x.items()} if isinstance(x, Mapping) else x

    def holder(where: str) -> tuple[Any, str]:
        *path, name = where.split(".")
        at: Any = found
        for part in path:
            at = at.get(part) if isinstance(at, dict) else None
        return at, name

    found, problems = copied(given), []
    for old, (new, on) in OLD.items():
        (at, name), (to, key) = holder(old), holder(new)
        if not isinstance(at, dict) or name not in at:
            continue
        value = at.pop(name)
        if not value or value == "auto":
            continue  # it asks for nothing
        value = on if on is not None else value
        if key in to and to[key] != value:
            problems.append(
                f"{old} is an old spelling of {new}, which is there too; "
                "leave the old one out"
            )
        to[key] = value
        said.append(f"{old} is an old spelling; write {new} = {shown(value)}")
    return found, problems


def section(
    cls: type[S],
    given: Mapping[str, Any],
    auto: Mapping[str, Any],
    said: list[str] | None = None,
    path: str = "",
) -> tuple[S | None, list[str]]:
    """A section of what is given; or None, and a sentence for each problem.

    `said` gets a sentence for what is read as something else, or not at all.
    """
    notes = [] if said is None else said
    given = {
        name: auto.get(f"{path}{name}", value) if value == "auto" else value
        for name, value in given.items()
    }
    known, given = _chosen(keys(cls), given)
    values: dict[str, Any] = {}
    wrong: dict[str, list[str]] = {name: [] for name in given}
    for name, value in given.items():
        key, where = known.get(name), f"{path}{name}"
        if key is None:
            wrong[name] = _stranger(known, str(name), value, path, notes)
        elif value == "auto":
            wrong[name] = [_not_filled(key, where)]
        elif key.section and isinstance(value, Mapping):
            inner = section(key.section, value, auto, notes, f"{where}.")
            values[name], wrong[name] = inner
        elif value is not None or not (key.section or key.default is None):
            values[name] = lenient(key, value)
    made, names = cls.of({n: value for n, value in values.items() if not wrong[n]})
    for name in names:
        key, where = known[name], f"{path}{name}"
        if name in values:
            must = f"{where} must be {expected(key)}, not {shown(given[name])}"
            wrong[name] = [f"{must}{_hint(key, where, given[name])}"]
        elif name not in given:
            wrong[name] = [f"{where} is missing; give {expected(key)}"]
    notes += [
        f"{path}{name} = {shown(given[name])} is read as {shown(value)}; write that"
        for name, value in values.items()
        if shown(value) != shown(given[name]) and not known[name].section
    ]
    problems = [sentence for each in wrong.values() for sentence in each]
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


def _hint(key: Key, where: str, value: Any) -> str:
    """What may have gone wrong with the value of a key, if one can tell."""
    if value is None and not key.required:
        return "; leave it out for the default"
    if key.section:
        # what `"fp16": true` and `"offload_param": "cpu"` stand for
        for name, kind in (("enabled", bool), ("device", str), ("type", str)):
            if name in keys(key.section) and isinstance(value, kind):
                return f'; write {{"{name}": {json.dumps(value)}}}'
    if not isinstance(value, str):
        return ""
    advice = ADVICE.get(where, {})
    meant = advice.get(value.lower(), advice.get(""))
    return f"; {meant}" if meant else ""


def _stranger(
    known: Mapping[str, Key], name: str, value: Any, path: str, notes: list[str]
) -> list[str]:
    """What to say of a key that is refused, misplaced or misspelt.

    A script may keep keys of its own at the top: those are only noted.
    """
    where = f"{path}{name}"
    if where not in REFUSED:
        place, meant = path.rstrip(".") or "the config", _meant(known, name, path)
        sentence = f'{place} has no key "{name}"; {meant or "nothing reads it"}'
        if not meant:
            notes.append(sentence)
        return [sentence] if meant else []
    refused = REFUSED[where]
    if not refused.asks(value):
        return []
    said = "" if isinstance(value, dict) else f" = {shown(value)}"
    return [f"minizero does not do {where}{said}: {refused.instead}"]


def _meant(known: Mapping[str, Key], name: str, path: str) -> str:
    """What was meant by a key that there is not; "" for one at the top like no other."""
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
    if not path:
        return ""
    if len(known) > 10:
        return "remove it, or look for it in the config reference"
    return f"its keys are {', '.join(known)}"


def _in(section: str, where: str) -> str:
    """The name of a key if it is of the section, else ""."""
    place, _, name = where.rpartition(".")
    return name if place == section else ""
