"""How heavy each chapter is: words of prose, lines of code shown, the longest stretch.

`python tests/test_weight.py` prints the table.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
WORDS, LINES, STRETCH = 3_000, 500, 45
PAUSE = 25
"""Words of prose that end a stretch of code and output."""
HEAVIER: dict[str, tuple[int, int, int]] = {}
"""Chapters that are still heavier: they may grow no more."""
FOLDED = {"hide-input", "hide-cell", "remove-input", "remove-cell"}


def prose(cell: dict[str, Any]) -> int:
    """Words of a Markdown cell outside of blocks of code."""
    blocks = re.compile(r"^```[a-z]*$.*?^```$", re.M | re.S)
    text = blocks.sub("", "".join(cell["source"]))
    return len(re.findall(r"\w+", text))


def shown(cell: dict[str, Any]) -> tuple[int, int]:
    """Lines of code and lines of output that a reader sees; a figure is one line."""
    tags = set(cell["metadata"].get("tags", []))
    code = [line for line in "".join(cell["source"]).splitlines() if line.strip()]
    lines = 0
    for output in cell["outputs"] if not tags & {"hide-cell", "remove-cell"} else ():
        data = output.get("data", {})
        text = output.get("text", data.get("text/plain", ""))
        is_figure = {"image/png", "image/svg+xml", "text/html"} & set(data)
        lines += 1 if is_figure else len("".join(text).splitlines())
    return 0 if tags & FOLDED else len(code), lines


def weight(path: Path) -> tuple[int, int, int]:
    """Words, lines of code, and the longest stretch of code and output, in lines."""
    words = lines = longest = stretch = 0
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "markdown":
            count = prose(cell)
            words += count
            stretch = 0 if count >= PAUSE else stretch
        elif cell["cell_type"] == "code":
            code, output = shown(cell)
            lines += code
            stretch += code + output
            longest = max(longest, stretch)
    return words, lines, longest


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_is_light(path: Path) -> None:
    words, lines, longest = weight(path)
    limits = HEAVIER.get(path.stem, (WORDS, LINES, STRETCH))
    for found, limit in zip((words, lines, longest), limits, strict=True):
        assert found <= limit, (
            f"{words} words, {lines} lines of code, a stretch of {longest}"
        )


if __name__ == "__main__":
    print(f"{'chapter':20}{'words':>8}{'code':>8}{'stretch':>8}")
    for path in NOTEBOOKS:
        print(f"{path.stem:20}" + "".join(f"{n:8,}" for n in weight(path)))
