"""What a key of a config is: its type, default, unit, and what it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

DTYPES = {
    "float32": ("fp32", "float32", "float", "torch.float32"),
    "bfloat16": ("bf16", "bfloat16", "torch.bfloat16"),
    "float16": ("fp16", "float16", "half", "torch.float16"),
}


def torch_name(dtype: str) -> str:
    """The name that torch has for a dtype, for any that a config has."""
    return next(name for name, also in DTYPES.items() if dtype in also)


@dataclass(frozen=True)
class Key:
    """All that is known of a key but its name, type and default.

    `does`: what it does, in a sentence. `maps`: which part of minizero does
    that. `ignored`: why it has no effect, for a key that is accepted so that
    a DeepSpeed config can stay as it is; one of the two is empty.
    `unit`: what a number counts. `least`, `most`: its bounds.
    `one_of`: the strings it may be, in any case of letters. `advice`: of
    other strings, in lower case, what to use instead.
    `unset`: what the default None stands for.
    `honours`: the value that comes true although the key is ignored.
    `variants`: which section it is, by the `type` beside it.
    """

    does: str
    maps: str = ""
    ignored: str = ""
    unit: str = ""
    least: float | None = None
    most: float | None = None
    one_of: tuple[str, ...] = ()
    advice: dict[str, str] = field(default_factory=dict)
    unset: str = ""
    honours: Any = None
    variants: dict[str, type] = field(default_factory=dict)


def key(default: Any, does: str, maps: str = "", **more: Any) -> Any:
    """A dataclass field for a key; `default=...` (the object) is required."""
    meta = {"key": Key(does, maps, **more)}
    if default is ...:
        return field(metadata=meta)
    if dataclasses.is_dataclass(default):
        return field(default_factory=type(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Entry:
    """A key with its place: `kind` is its type without None."""

    name: str
    kind: Any
    default: Any
    about: Key

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def section(self) -> type | None:
        """The dataclass of a key that holds keys, if it is one."""
        kind: type = self.kind
        return kind if dataclasses.is_dataclass(kind) else None


def entries(section: type) -> dict[str, Entry]:
    """The keys of a section, by name, in their order."""
    kinds = get_type_hints(section)
    found = {}
    for f in dataclasses.fields(section):
        if "key" in f.metadata:
            kind = _without_none(kinds[f.name])
            default = f.default if f.default_factory is MISSING else f.default_factory()
            about = f.metadata["key"]
            found[f.name] = Entry(f.name, kind, default, about)
    return found


def _without_none(kind: Any) -> Any:
    if get_origin(kind) is not UnionType:
        return kind
    kinds = [k for k in get_args(kind) if k is not type(None)]
    rest = kinds[0]
    for other in kinds[1:]:
        rest = rest | other
    return rest


def walk(section: type, path: str = "") -> Iterator[tuple[str, Entry]]:
    """Every key and its dotted name, sections and variants before theirs."""
    for name, entry in entries(section).items():
        yield f"{path}{name}", entry
        if entry.section is not None:
            yield from walk(entry.section, f"{path}{name}.")
        for kind in dict.fromkeys(entry.about.variants.values()):
            yield from walk(kind, f"{path}{name}.")


def changed(section: Any, path: str = "") -> dict[str, tuple[Entry, Any]]:
    """The keys of a section, a dataclass's instance, that differ from their
    defaults: by dotted name, with their values."""
    found: dict[str, tuple[Entry, Any]] = {}
    for name, entry in entries(type(section)).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            found |= changed(value, f"{path}{name}.")
        elif value != entry.default:
            found[f"{path}{name}"] = entry, value
    return found
