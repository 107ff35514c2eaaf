"""What a key of a config is: its type and bounds, its default, and what it does.

A section is a pydantic model whose types and docstrings say all that: the reference and
the errors are made from them. Below a key stands what it does; after `Unset:` what the
default None stands for; and either after `Done:` which part of minizero does it, or
after `No effect:` why it is accepted all the same, so that a config can stay as it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce
from numbers import Integral, Real
from operator import or_
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
)

from annotated_types import Ge, Le, MinLen
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
)

if TYPE_CHECKING:
    from typing import Self

# What a number counts is a string beside its bounds.
Samples = Annotated[int, "samples", Ge(1)]
Elements = Annotated[int, "elements", Ge(0)]
Steps = Annotated[int, "steps", Ge(1)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
# One for all parameter groups, or one for each.
Rates = NotNegative | Annotated[tuple[NotNegative, ...], MinLen(1)]
Shares = Share | Annotated[tuple[Share, ...], MinLen(1)]

# The default of what has a value by the time that a config is complete.
UNSET: Any = None


class Anyway(NamedTuple):
    """The value that comes true although the key has no effect."""

    value: Any


class Section(BaseModel):
    """Part of a config. It takes what JSON has, and turns nothing into something else.

    `variants`: which section `params` is, by the `type` beside it.
    """

    variants: ClassVar[dict[str, type[Section]]] = {}
    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _as_python(cls, value: Any, info: ValidationInfo) -> Any:
        key = keys(cls).get(info.field_name or "")
        return _as_python(value, key.one_of if key else ())

    @classmethod
    def of(cls, values: dict[str, Any]) -> tuple[Self | None, list[str]]:
        """One of these values; or None, and the names that are missing or wrong."""
        try:
            return cls.model_validate(values), []
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False)
            return None, [*dict.fromkeys(str(each["loc"][0]) for each in found)]


def _as_python(value: Any, names: tuple[str, ...] = ()) -> Any:
    """5e8, which JSON reads as a float, as a whole number; names in any letters."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):
        return next((n for n in names if n.lower() == value.lower()), value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_as_python, value))
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(str(error)) from None
    if isinstance(value, Integral):  # which a float would round, if it is large
        return int(value)
    return int(number) if number.is_integer() else number


@dataclass(frozen=True, kw_only=True)
class Key:
    """All that is known of a key; see the words of this module.

    `kind`: its type, without None. `section`: the same, if it holds keys.
    `unit`: what a number counts. `least`, `most`: its bounds.
    `one_of`: the strings it may be, in any case of letters.
    `anyway`: the value that comes true although the key is ignored, or None.
    """

    name: str
    kind: Any
    default: Any
    required: bool
    section: type[Section] | None
    variants: dict[str, type[Section]]
    unit: str
    least: float | None
    most: float | None
    one_of: tuple[str, ...]
    anyway: Any
    does: str
    unset: str
    maps: str
    ignored: str


TOLD = re.compile(r"(.+?)(?: Unset: (.+?)\.)? (?:Done: (.+)|No effect: (.+))\.")


@cache
def keys(section: type[Section]) -> dict[str, Key]:
    """The keys of a section, by name, in their order; only they have a docstring."""
    found = {}
    for name, field in section.model_fields.items():
        if field.description is None:
            continue
        told = TOLD.fullmatch(" ".join(field.description.split()))
        assert told, f"the docstring of {name} lacks Done: or No effect:"
        does, unset, maps, ignored = (part or "" for part in told.groups())
        kind, notes = _bare(field.annotation), [*field.metadata]
        notes += _notes(field.annotation)
        found[name] = Key(
            name=name,
            kind=kind,
            default=field.get_default(call_default_factory=True),
            required=field.is_required(),
            section=kind if is_section(kind) else None,
            variants=section.variants if name == "params" else {},
            unit=next((note for note in notes if isinstance(note, str)), ""),
            least=next((n.ge for n in notes if isinstance(n, Ge)), None),  # type: ignore[arg-type]
            most=next((n.le for n in notes if isinstance(n, Le)), None),  # type: ignore[arg-type]
            one_of=get_args(kind) if get_origin(kind) is Literal else (),
            anyway=next((n.value for n in notes if isinstance(n, Anyway)), None),
            does=does,
            unset=unset,
            maps=maps,
            ignored=ignored,
        )
    return found


def is_section(kind: Any) -> bool:
    """Whether a type, or the type of a value, holds keys."""
    return isinstance(kind, type) and issubclass(kind, Section)


def _bare(kind: Any) -> Any:
    """A type without None and without what it is annotated with."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    parts = get_args(kind)
    if NoneType not in parts:
        return kind
    return _bare(reduce(or_, (part for part in parts if part is not NoneType)))


def _notes(kind: Any) -> list[Any]:
    """All that a type and its parts are annotated with."""
    if get_origin(kind) is Annotated:
        first, *notes = get_args(kind)
        return [*notes, *_notes(first)]
    if get_origin(kind) is Literal:
        return []
    return [note for part in get_args(kind) for note in _notes(part)]


def walk(section: type[Section], path: str = "") -> Iterator[tuple[str, Key]]:
    """Every key and its dotted name, sections and variants before theirs."""
    for name, key in keys(section).items():
        yield f"{path}{name}", key
        inner = [key.section] if key.section else key.variants.values()
        for kind in dict.fromkeys(inner):
            yield from walk(kind, f"{path}{name}.")


def changed(section: Section, path: str = "") -> dict[str, tuple[Key, Any]]:
    """The keys that differ from their defaults: by dotted name, with their values."""
    found: dict[str, tuple[Key, Any]] = {}
    for name, key in keys(type(section)).items():
        value = getattr(section, name)
        if isinstance(value, Section):
            found |= changed(value, f"{path}{name}.")
        elif value != key.default:
            found[f"{path}{name}"] = key, value
    return found


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


def lenient(key: Key, value: Any) -> Any:
    """A number in quotes as a number; 0, 1 and words as what they say of a switch."""
    if isinstance(value, list | tuple):
        return [lenient(key, each) for each in value]
    if key.kind is bool and isinstance(value, int | str):
        words = {"true": True, "1": True, "false": False, "0": False}
        return words.get(str(value).lower(), value)
    if isinstance(value, str) and not (key.one_of or key.kind is str or key.section):
        try:
            return _as_python(float(value))
        except ValueError:
            pass
    return value
