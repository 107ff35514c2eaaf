"""Every word of the book is in the dictionary, or in tests/words.txt.

`python tests/test_spelling.py` prints the words that are in neither.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OWN_WORDS = ROOT / "tests/words.txt"
PAGES = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "book").glob("*.md"),
        *(ROOT / "book").glob("*.ipynb"),
        *(ROOT / "notebooks").glob("[0-9]*.ipynb"),
    ]
)
NOT_PROSE = re.compile(
    r"```[a-z]*\n.*?\n```"  # blocks of code
    r"|^[`:]{3,}\{.*$|^:[\w-]+:.*$"  # heads and options of directives
    r"|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$"  # code and formulas
    r"|\{[\w:-]+\}`[^`]*`|\]\([^)]*\)|<[^>]*>|https?://\S+",
    re.M | re.S,
)


def prose(path: Path) -> str:
    """What a page says, without code, formulas and addresses."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        parts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        text = "\n\n".join(parts)
    return NOT_PROSE.sub(" ", text)


def unknown(path: Path) -> set[str]:
    """Words of a page that no list has; names, with a capital, are left out."""
    from spellchecker import SpellChecker

    own = set(OWN_WORDS.read_text().split()) if OWN_WORDS.exists() else set()
    words = set(re.findall(r"\b[a-z]{3,}(?:'[a-z]+)?\b", prose(path)))
    words = {word.removesuffix("'s") for word in words}
    return SpellChecker(distance=1).unknown(words - own)


@pytest.mark.thorough
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_spelling(path: Path) -> None:
    assert not unknown(path)


@pytest.mark.thorough
def test_a_misspelt_word_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("The optimizer's parametres are `shardded` and gathered.\n")
    assert unknown(page) == {"parametres"}


if __name__ == "__main__":
    print(*sorted(set().union(*map(unknown, PAGES))), sep="\n")
