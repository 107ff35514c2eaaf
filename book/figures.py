"""Gives each page that has an explorable the script that draws it.

The script stands in the page's head and is not deferred: an explorable draws itself
before what follows it is laid out, so nothing moves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from minizero.lab.explorables.base import script

FILE = "explorables.js"


def write(app: Sphinx) -> None:
    """Put the script where the pages find it."""
    folder = Path(app.outdir) / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(script(), encoding="utf-8")


def load(
    app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Load it in pages with an explorable."""
    if "<explorable-" in context.get("body", ""):
        app.add_js_file(FILE)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", write)
    app.connect("html-page-context", load)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
