"""What is said of a value that is not what it must be."""

from __future__ import annotations

import json
from typing import Any, get_args, get_origin

from .keys import Key, Section, keys
from .unsupported import ADVICE


def shown(value: Any) -> str:
    """A value as JSON writes it, if it is short."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def expected(key: Key) -> str:
    """What the value of a key must be, as the end of a sentence."""
    kind = key.kind
    if key.section or key.variants or get_origin(kind) is dict:
        return "an object in braces"
    if kind is bool:
        return "true or false"
    if key.one_of:
        *most, last = [f'"{name}"' for name in key.one_of]
        return f"{', '.join(most)} or {last}"
    if kind is str:
        return "a string"
    bounds = "" if key.least is None else f", at least {key.least}"
    if key.most is not None:
        bounds = f" from {key.least} to {key.most}"
    if kind is int:
        return f"a whole number{f' of {key.unit}' if key.unit else ''}{bounds}"
    if kind is float:
        return f"a number{bounds}"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers{bounds}"
    return f"a number{bounds}, or a list with one for each group"


def hint(section: type[Section], key: Key, where: str, value: Any) -> str:
    """What may have gone wrong with the value of a section's key, if one can tell."""
    if value is None and not key.required:
        return "; leave it out for the default"
    if key.section:
        # what `"fp16": true` and `"offload_param": "cpu"` stand for
        for name, kind in (("enabled", bool), ("device", str), ("type", str)):
            if name in keys(key.section) and isinstance(value, kind):
                return f'; write {{"{name}": {json.dumps(value)}}}'
    if not isinstance(value, str):
        return ""
    if advice := ADVICE.get(where):
        meant = advice.get(value.lower(), advice.get(""))
        return f"; {meant}" if meant else ""
    meant_number = key.kind in (int, float) and _is_number(section, key, value)
    meant_switch = key.kind is bool and value.lower() in ("true", "false")
    return "; write it without quotes" if meant_number or meant_switch else ""


def _is_number(section: type[Section], key: Key, text: str) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    return key.name not in section.of({key.name: number})[1]
