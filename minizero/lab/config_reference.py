"""The tables of book/config-reference.md, made from the schema of a config.

    python -m minizero.lab.config_reference book/config-reference.md

writes them anew between the page's two marks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from minizero.config import Config
from minizero.config.checks import shown
from minizero.config.schema import Entry, entries
from minizero.config.unsupported import ON, REFUSED

BEGIN = "<!-- made from the schema: begin -->"
END = "<!-- made from the schema: end -->"


def tables() -> str:
    """All keys: one heading and one table for each section."""
    return "\n\n".join([*_sections(Config, "The top"), *_refused()])


def _sections(section: type, title: str, path: str = "") -> Iterator[str]:
    assert section.__doc__ is not None
    doc = section.__doc__.partition("\n\n")[0]
    rows = [_row(entry) for entry in entries(section).values()]
    yield f"### {title}\n\n{doc}\n\n{_table(COLUMNS, rows)}"
    for name, entry in entries(section).items():
        where = f"{path}{name}"
        if entry.section:
            yield from _sections(entry.section, f"`{where}`", f"{where}.")
        for kind in dict.fromkeys(entry.about.variants.values()):
            types = [t for t, k in entry.about.variants.items() if k is kind]
            whose = f"`{where}` of {' and '.join(types)}"
            yield from _sections(kind, whose, f"{where}.")


COLUMNS = ("key", "default", "what it does")


def _row(entry: Entry) -> tuple[str, ...]:
    about = entry.about
    status = f"*Done:* {about.maps}."
    if about.ignored:
        status = f"*No effect:* {about.ignored}."
    return (
        f"`{entry.name}`<br>{_kind(entry)}",
        _default(entry),
        f"{about.does}<br>{status}",
    )


def _kind(entry: Entry) -> str:
    kind, about = entry.kind, entry.about
    if entry.section or about.variants or get_origin(kind) is dict:
        return "object"
    if kind is bool:
        return "true or false"
    if kind is str:
        return " ".join(f"`{name}`" for name in about.one_of) or "string"
    unit = f" of {about.unit}" if about.unit else ""
    names = {int: f"whole number{unit}", float: "number"}
    name = names.get(kind, "number, or one for each group")
    if get_origin(kind) is tuple:
        name = f"{len(get_args(kind))} numbers"
    if about.most is not None:
        return f"{name}, {about.least} to {about.most}"
    return name if about.least is None else f"{name}, at least {about.least}"


def _default(entry: Entry) -> str:
    if entry.required:
        return "must be given"
    if entry.default is None:
        return entry.about.unset
    return "" if entry.section else _value(entry.default)


def _value(value: Any) -> str:
    if value == sys.maxsize:
        return "no bound"
    if type(value) is int:
        return f"{value:,}"
    return f"`{shown(value)}`"


def _refused() -> Iterator[str]:
    yield (
        "### Refused\n\nDeepSpeed has these keys and minizero has not. One "
        "that asks for nothing is accepted."
    )
    rows: dict[str, list[tuple[str, ...]]] = {}
    for where, refused in REFUSED.items():
        off = "not enabled" if refused.off is ON else _value(refused.off)
        if refused.off in ({}, None):
            off = "left out"
        place, _, name = where.rpartition(".")
        row = (f"`{name}`", off, refused.instead)
        rows.setdefault(place, []).append(row)
    for place, found in rows.items():
        at = f"in `{place}`" if place else "at the top"
        yield _table((f"key {at}", "accepted if", "what to use"), found)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(text: str) -> str:
    """The page with its tables made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
