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
FOLDED = {"hide-input", "hide-cell", "remove-input", "remove-cell"}
NO_PROSE = re.compile(  # solutions, which a page closes; code; marks of directives
    r"(?:^```)?\{solution-start\}.*?(?:\{solution-end\}|\Z)"
    r"|^(`{3,})[a-z]+$.*?^\1$|^[`:]{3,}.*?$|^:\w+:.*?$",
    re.M | re.S,
)


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
    start, end = "{solution-start}", "{solution-end}"
    solving = False
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "markdown":
            text = start * solving + "".join(cell["source"])
            solving = text.rfind(start) > text.rfind(end)
            count = len(re.findall(r"\w+", NO_PROSE.sub("", text)))
            words += count
            stretch = 0 if count >= PAUSE else stretch
        elif not solving:
            code, output = shown(cell)
            lines += code
            stretch += code + output
            longest = max(longest, stretch)
    return words, lines, longest


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_is_light(path: Path) -> None:
    words, lines, longest = weight(path)
    assert words <= WORDS and lines <= LINES and longest <= STRETCH, (
        f"{words} words, {lines} lines of code, a stretch of {longest}"
    )


if __name__ == "__main__":
    print(f"{'chapter':20}{'words':>8}{'code':>8}{'stretch':>8}")
    for path in NOTEBOOKS:
        print(f"{path.stem:20}" + "".join(f"{n:8,}" for n in weight(path)))
