"""One way to write bytes and numbers: figures, tables and errors share it."""

from __future__ import annotations


def amount(nbytes: float) -> str:
    """Bytes in words, in decimal units and four digits at most: "38.5 GB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= size:
            return f"{short(nbytes / size)} {unit}"
    return f"{short(nbytes)} B"


def short(number: float) -> str:
    """At most four digits and no trailing zero: "112", "26.25", "0.4"."""
    decimals = max(0, 4 - len(str(int(abs(number)))))
    text = f"{number:,.{min(decimals, 2)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
