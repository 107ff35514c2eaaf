"""Gives each page that has an explorable the script that draws it.

The directive `plans` draws the landing figure, in a page that is no notebook.

The script stands in the page's head and is not deferred: an explorable draws itself
before what follows it is laid out, so nothing moves. And the list
of references is none to a screen reader, since its entries have a role of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from minizero.lab.explorables.base import script
from minizero.lab.explorables.plans import Plans

FILE = "explorables.js"


class Figure(SphinxDirective):
    """A step under data parallelism and ZeRO-1, 2 and 3."""

    def run(self) -> list[nodes.Node]:
        page = f'<div style="margin: 1.5rem 0">{Plans().element()}</div>'
        return [nodes.raw("", page, format="html")]


def write(app: Sphinx) -> None:
    """Put the script where the pages find it."""
    folder = Path(app.outdir) / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(script(), encoding="utf-8")


def load(
    app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Load it in pages with an explorable."""
    body = context.get("body", "")
    if "<explorable-" in body:
        app.add_js_file(FILE)
    context["body"] = body.replace('<div role="list" class="cit', '<div class="cit')


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("plans", Figure)
    app.connect("builder-inited", write)
    app.connect("html-page-context", load)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
