"""Where a config comes from: a dict, a file, or JSON text."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

Source = str | os.PathLike[str] | Mapping[str, Any]


class ConfigError(ValueError):
    """What is wrong with a config: `problems` has a sentence for each."""

    def __init__(self, problems: str | Sequence[str], source: str = "") -> None:
        self.problems = [problems] if isinstance(problems, str) else [*problems]
        if len(self.problems) == 1:
            text = f"{source}: {self.problems[0]}" if source else self.problems[0]
        else:
            count = f"{len(self.problems)} problems in {source or 'the config'}:"
            text = "\n- ".join([count, *self.problems])
        super().__init__(text)


def load(source: Source) -> tuple[Mapping[str, Any], str]:
    """The object as given, and the name of the file it came from, or ""."""
    if isinstance(source, Mapping):
        return source, ""
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"a config is a dict, the path of a JSON file or JSON text, not {source!r}"
        )
    # a file's mark of its encoding, if the text was read without that
    text = os.fspath(source).removeprefix("\ufeff")
    if not text.strip():
        raise ConfigError(
            "the config is empty; give a dict, the path of a JSON file or JSON text"
        )
    if text.lstrip()[:1] in ("{", "["):
        return _parsed(text, ""), ""
    found = _contents(Path(text))
    if not found.strip():
        raise ConfigError(f"the config file {text} is empty")
    return _parsed(found, text), text


def _contents(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        error = ConfigError(_missing(path))
    except IsADirectoryError:
        error = ConfigError(f"{path} is a folder; give the JSON file in it")
    except UnicodeDecodeError as bad:
        error = ConfigError(
            f"it is not UTF-8 text: byte {bad.start} is {bad.reason}", str(path)
        )
    except OSError as bad:
        why = f"the config file cannot be read: {bad.strerror}"
        error = ConfigError(why, str(path))
    except ValueError as bad:  # a null byte in the path
        error = ConfigError(f"{str(path)!r} is no path of a config file: {bad}")
    raise error


def _missing(path: Path) -> str:
    sentence = f"there is no config file {path}"
    folder = path.parent
    if not folder.is_dir():
        return f"{sentence}, and no folder {folder}"
    names = sorted(p.name for p in folder.glob("*.json"))
    close = get_close_matches(path.name, names, n=1)
    if close:
        return f"{sentence}; did you mean {folder / close[0]}?"
    return f"{sentence} (looked in {folder.absolute()})"


def _parsed(text: str, name: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        line = "".join(text.splitlines()[error.lineno - 1 : error.lineno])
        raise ConfigError(
            f"{name or 'the config'} is not JSON: line {error.lineno}, column "
            f"{error.colno}: {error.msg} in {line.strip()!r} (comments and trailing "
            "commas, which DeepSpeed reads, are not JSON)"
        ) from None
    except ValueError as error:
        raise ConfigError(str(error), name) from None
    except RecursionError:
        raise ConfigError("braces are nested too deeply", name) from None
    if not isinstance(found, dict):
        kind = "a list" if isinstance(found, list) else json.dumps(found)
        raise ConfigError(f"a config is an object in braces, not {kind}", name)
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Without this, the last of two equal keys would win in silence."""
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f'"{key}" is there {count} times; keep one')
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON; give a finite one")
