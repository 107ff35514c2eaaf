"""What a value must be, and the value as that."""

from __future__ import annotations

import json
import math
import os
from numbers import Integral, Real
from types import UnionType
from typing import Any, get_args, get_origin

from .schema import Entry, Key, entries


class Misfit(ValueError):
    """The value is not what it must be."""


def fit(kind: Any, about: Key, value: Any) -> Any:
    """The value as `kind`; raises Misfit."""
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int:
        return _whole(about, value)
    if kind is float:
        return _number(about, value)
    if kind is str and isinstance(value, (str, os.PathLike)):
        return _text(about, os.fspath(value))
    if get_origin(kind) is dict and isinstance(value, dict):
        return value
    if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        return _numbers(kind, about, value)
    if get_origin(kind) is UnionType:
        a_list = isinstance(value, (list, tuple))
        return fit(get_args(kind)[a_list], about, value)
    raise Misfit


def _number(about: Key, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise Misfit
    try:
        number = float(value)
    except OverflowError:
        raise Misfit from None
    least = -math.inf if about.least is None else about.least
    most = math.inf if about.most is None else about.most
    if not math.isfinite(number) or not least <= number <= most:
        raise Misfit
    return number


def _whole(about: Key, value: Any) -> int:
    """Also of 5e8, which JSON reads as a float."""
    number = _number(about, value)
    if not number.is_integer():
        raise Misfit
    # float would round large whole numbers
    return int(value) if isinstance(value, Integral) else int(number)


def _numbers(kind: Any, about: Key, value: Any) -> tuple[float, ...]:
    kinds = get_args(kind)
    if not value or (... not in kinds and len(value) != len(kinds)):
        raise Misfit
    return tuple(_number(about, v) for v in value)


def _text(about: Key, value: str) -> str:
    if not about.one_of:
        return value
    for known in about.one_of:
        if value.lower() == known.lower():
            return known
    raise Misfit


def expected(entry: Entry) -> str:
    """What the value of a key must be, as the end of a sentence."""
    kind, about = entry.kind, entry.about
    if entry.section or entry.about.variants or get_origin(kind) is dict:
        return "an object in braces"
    if kind is bool:
        return "true or false"
    if kind is str:
        *most, last = [f'"{name}"' for name in about.one_of] or ["a string"]
        return f"{', '.join(most)} or {last}" if most else last
    if kind is int:
        unit = f" of {about.unit}" if about.unit else ""
        return f"a whole number{unit}{_range(about)}"
    if kind is float:
        return f"a number{_range(about)}"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers{_range(about)}"
    return f"a number{_range(about)}, or a list with one for each group"


def _range(about: Key) -> str:
    if about.most is not None:
        return f" from {about.least} to {about.most}"
    return "" if about.least is None else f", at least {about.least}"


def hint(entry: Entry, value: Any) -> str:
    """What may have gone wrong."""
    if value is None and not entry.required:
        return "; leave it out for the default"
    if entry.section and isinstance(value, (bool, str)):
        return _wrapped(entry.section, value)
    if not isinstance(value, str):
        return ""
    if entry.about.advice:
        advice = entry.about.advice
        meant = advice.get(value.lower(), advice.get(""))
        return f"; {meant}" if meant else ""
    try:
        if entry.kind in (int, float):
            fit(entry.kind, entry.about, float(value))
        elif entry.kind is not bool or value.lower() not in ("true", "false"):
            return ""
    except ValueError:
        return ""
    return "; write it without quotes"


def _wrapped(section: type, value: bool | str) -> str:
    """What `"fp16": true` and `"offload_param": "cpu"` stand for."""
    for name, kind in (("enabled", bool), ("device", str), ("type", str)):
        if name in entries(section) and isinstance(value, kind):
            return f'; write {{"{name}": {json.dumps(value)}}}'
    return ""
