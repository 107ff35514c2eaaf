"""Reading a config: from a dict, a file or JSON text to a `Config`, with all errors."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .batch import MICRO, STEPS, TOTAL, batch_sizes
from .config import Config
from .ignored import ANY, IGNORED
from .schema import ZeroOptimization, walk

Source = str | os.PathLike[str] | Mapping[str, Any]
SIZES = (TOTAL, MICRO, STEPS)
OPTIONS = ("optimizer.params.", "scheduler.params.")
RESULTS = {"world_size", "warnings"}  # fields of a config that are no keys
KEYS = {where: inner for where, inner in walk(Config) if where not in RESULTS}
"""By dotted name: the section, or None where a key has another value."""


class ConfigError(ValueError):
    """What is wrong with a config: `problems` has a sentence for each error."""

    def __init__(self, problems: str | list[str], source: str = "") -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        begin = f"{source}: " if source else ""
        if len(self.problems) > 1:
            begin = f"{len(self.problems)} problems in {source or 'the config'}:\n- "
        super().__init__(begin + "\n- ".join(self.problems))


def read(source: Source, world_size: int = 1) -> Config:
    """A complete config for `world_size` ranks.

    `source`: a dict, the path of a JSON file, or JSON text. Raises ConfigError, with a
    sentence for each problem. (It looks for contradictions once all types are right.)
    """
    given, file = load(source)
    problems: list[str] = []
    warnings: list[str] = []
    values = _accepted(given, "", problems, warnings)
    update: dict[str, Any] = {}
    try:
        config = Config.model_validate(values | {"world_size": world_size})
        problems += config.contradictions()
        three = (getattr(config, name) for name in SIZES)
        update = dict(zip(SIZES, batch_sizes(world_size, *three), strict=True))
    except ValidationError as error:
        # a default that needs a key with an error is no error of its own
        found = [each for each in error.errors() if "default_" not in each["type"]]
        problems += map(_sentence, found)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(problems, file)
    update["warnings"] = (*warnings, *_unused(config.zero_optimization))
    return config.model_copy(update=update)


def _accepted(
    given: Mapping[str, Any], path: str, problems: list[str], warnings: list[str]
) -> dict[str, Any]:
    """A section's keys that are in the schema, without those that are null or "auto".

    `path`: the section's dotted name and a dot. Each other key adds a sentence to
    `problems` or `warnings`.
    """
    known: dict[str, Any] = {}
    for key, value in given.items():
        where = f"{path}{key}"
        if value == "auto" and where not in IGNORED:
            unfilled = "but nothing fills it here; the default is used"
            warnings.append(f'{where} is "auto", {unfilled}')
        if value is None or value == "auto":
            continue
        if where in IGNORED:
            _ignored(where, value, problems, warnings)
        elif where in KEYS or path in OPTIONS:
            is_section = KEYS.get(where) or f"{where}." in OPTIONS
            if is_section and isinstance(value, Mapping):
                value = _accepted(value, f"{where}.", problems, warnings)
            known[key] = os.fspath(value) if isinstance(value, os.PathLike) else value
        else:
            sentence, meant = _unknown_key(path[:-1], str(key))
            # a key at the top that resembles no other may be the script's own
            (problems if path or meant else warnings).append(sentence)
    return known


def _ignored(where: str, value: Any, problems: list[str], warnings: list[str]) -> None:
    """Add a sentence about a key without effect, unless its value asks for nothing."""
    reason, default, is_refused = IGNORED[where]
    is_section = isinstance(value, Mapping)
    disabled = is_section and (not value or value.get("enabled") is False)
    if default is ANY or value == default or disabled:
        return
    written = where if is_section else f"{where} = {_shown(value)}"
    if is_refused:
        problems.append(f"minizero does not support {written}: {reason}")
    else:
        warnings.append(f"{written} has no effect: {reason}")


def _unknown_key(section: str, key: str) -> tuple[str, bool]:
    """A sentence for a key that the schema lacks, and whether it resembles another."""
    names = known_keys()
    places = [place or "the top" for place in names if key in names[place]]
    meant = f"it belongs in {places[0]}" if places else _suggestion(key, names[section])
    other = f"its keys are {', '.join(names[section])}" if section else "it is not read"
    section = section or "the config"
    return f'{section} has no key "{key}"; {meant or other}', bool(meant)


def known_keys() -> dict[str, list[str]]:
    """The keys of each section, by the section's dotted name; "" is the top."""
    found: dict[str, list[str]] = {}
    for where in [*KEYS, *IGNORED]:
        section, _, key = where.rpartition(".")
        found.setdefault(section, []).append(key)
    return found


def _sentence(error: Any) -> str:
    """One of pydantic's errors as a sentence: the key, what it must be, its value."""
    where, kind, value = ".".join(map(str, error["loc"])), error["type"], error["input"]
    if kind == "missing":
        return f"{where} is missing; give it a value"
    must = error["msg"].removeprefix("Input should be ").split(", unable")[0]
    must, hint = must.replace("'", '"'), ""
    if kind in ("model_type", "dict_type"):  # where a section belongs
        must = "an object in braces"
        switch = {bool: "enabled", str: "device" if "." in where else "type"}
        if name := switch.get(type(value)):
            hint = f'; write {{"{name}": {json.dumps(value)}}}'
    elif where in ("optimizer.type", "scheduler.type"):
        hint = "; construct any other and pass it to initialize"
    return f"{where} must be {must}, not {_shown(value)}{hint}"


def check_options(
    function: Callable[..., Any], options: Mapping[str, Any], where: str
) -> None:
    """Raise ConfigError unless a function or class takes these options.

    Its first argument (parameters, or an optimizer) is not among them. `where`: the
    dotted name of the options, as "optimizer.params".
    """
    signature = inspect.signature(function)
    _, *names = signature.parameters
    try:
        signature.bind(None, **options)
    except TypeError as error:
        strange = next((name for name in options if name not in names), "")
        meant = _suggestion(strange, names) or f"its keys are {', '.join(names)}"
        raise ConfigError(f"{where}: {error}; {meant}") from None
    for name, value in options.items():
        option = signature.parameters[name]
        is_text = isinstance(option.default, str) or "str" in str(option.annotation)
        if isinstance(value, str) and not is_text:
            raise ConfigError(f"{where}.{name} must be a number, not {_shown(value)}")


def _suggestion(key: str, names: Iterable[str]) -> str:
    """'did you mean "..."?', or "" if no name resembles the key."""
    spelt, lower = {name.lower(): name for name in names}, key.lower()
    close = get_close_matches(lower, spelt, n=1, cutoff=0.8)
    close = close or [name for name in spelt if lower and name.startswith(lower)]
    return f'did you mean "{spelt[close[0]]}"?' if close else ""


def _unused(zero: ZeroOptimization) -> Iterator[str]:
    """A sentence for each key, not at its default, that has no effect at this stage."""
    parameters = ("offload_param", "stage3_", "zero_hpz", "zero_quantized_w")
    states = ("offload_optimizer", "mics_", "zero_quantized_g")
    for first, names, why in (
        (3, parameters, "parameters are sharded at stage 3 only"),
        (1, states, "optimizer states are sharded from stage 1 on"),
    ):
        for key, field in ZeroOptimization.model_fields.items():
            idle = zero.stage < first and key.startswith(names)
            if idle and getattr(zero, key) != field.default:
                where = f"zero_optimization.{key}"
                yield f"{where} has no effect at stage {zero.stage}: {why}"


def _shown(value: Any) -> str:
    """A value as JSON writes it, cut to 60 characters."""
    written = json.dumps(value, default=repr)
    return written if len(written) <= 60 else f"{written[:57]}..."


def load(source: Source) -> tuple[Mapping[str, Any], str]:
    """The object as given, and the name of the file it came from, or ""."""
    if isinstance(source, Mapping):
        return source, ""
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"a config is a dict, a path or JSON text, not {source!r}")
    text, name = os.fspath(source), ""
    try:
        if text.lstrip()[:1] not in ("{", "[", ""):
            name = text
            text = Path(name).read_text(encoding="utf-8-sig")
        found = json.loads(text)
    except FileNotFoundError:
        folder = Path(name).absolute().parent
        names = [path.name for path in folder.glob("*.json")]
        meant = _suggestion(Path(name).name, names) or f"the folder is {folder}"
        raise ConfigError(f"there is no config file {name}; {meant}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config cannot be read as JSON: {error}", name) from None
    if not isinstance(found, dict):
        raise ConfigError(f"a config is an object in braces, not {_shown(found)}", name)
    return found, name
