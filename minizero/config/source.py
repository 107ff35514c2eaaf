"""Where a config comes from: a dict, a file, or JSON text."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

# Strings stay; comments, and commas before a closing brace, are hjson's, not JSON's.
_STRING = r'("(?:\\.|[^"\\])*")'
_COMMENT = re.compile(_STRING + r"|/\*.*?\*/|(?://|#)[^\n]*", re.DOTALL)
_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])")

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
        found = _decoded(text)
    except json.JSONDecodeError as error:
        line = "".join(text.splitlines()[error.lineno - 1 : error.lineno])
        raise ConfigError(
            f"{name or 'the config'} is not JSON: line {error.lineno}, column "
            f"{error.colno}: {error.msg} in {line.strip()!r}"
        ) from None
    except ValueError as error:
        raise ConfigError(str(error), name) from None
    except RecursionError:
        raise ConfigError("braces are nested too deeply", name) from None
    if not isinstance(found, dict):
        kind = "a list" if isinstance(found, list) else json.dumps(found)
        raise ConfigError(f"a config is an object in braces, not {kind}", name)
    return found


def _decoded(text: str) -> Any:
    """What JSON makes of it; or hjson, which DeepSpeed reads with, if it is installed."""
    try:
        return json.loads(_as_json(text), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        try:
            import hjson
        except ImportError:
            error.msg += " (if it is hjson: the package hjson is missing)"
            raise error from None
        with suppress(hjson.HjsonDecodeError):
            return hjson.loads(text, object_pairs_hook=_unique)
        raise


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Without this, the last of two equal keys would win in silence."""
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f'"{key}" is there {count} times; keep one')
    return dict(pairs)


def _as_json(text: str) -> str:
    """The text with blanks in place of what JSON has not; line by line the same."""
    text = _COMMENT.sub(lambda m: m[1] or re.sub(r"[^\n]", " ", m[0]), text)
    return _COMMA.sub(lambda m: m[1] or " ", text)
