"""The tables of book/config-reference.md, made from the schema of a config.

    python book/config_reference.py book/config-reference.md

writes them anew between the page's two marks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minizero.config import Config
from minizero.config.keys import Key, Section, expected, keys, shown
from minizero.config.unsupported import ON, REFUSED

BEGIN = "<!-- made from the schema: begin -->"
END = "<!-- made from the schema: end -->"


def tables() -> str:
    """All keys: one heading and one table for each section."""
    return "\n\n".join([*_sections(Config, "The top"), *_refused()])


def _sections(section: type[Section], title: str, path: str = "") -> Iterator[str]:
    assert section.__doc__ is not None
    doc = section.__doc__.partition("\n\n")[0]
    rows = [_row(key) for key in keys(section).values()]
    yield f"### {title}\n\n{doc}\n\n{_table(COLUMNS, rows)}"
    for name, key in keys(section).items():
        where = f"{path}{name}"
        if key.section:
            yield from _sections(key.section, f"`{where}`", f"{where}.")
        for kind in dict.fromkeys(key.variants.values()):
            types = [t for t, k in key.variants.items() if k is kind]
            whose = f"`{where}` of {' and '.join(types)}"
            yield from _sections(kind, whose, f"{where}.")


COLUMNS = ("key", "default", "what it does")


def _row(key: Key) -> tuple[str, ...]:
    done = f"*No effect:* {key.ignored}." if key.ignored else f"*Done:* {key.maps}."
    names = f"`{key.name}`<br>{expected(key)}"
    return names, _default(key), f"{key.does}<br>{done}"


def _default(key: Key) -> str:
    if key.required:
        return "must be given"
    if key.default is None:
        return key.unset
    return "" if key.section else _value(key.default)


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
