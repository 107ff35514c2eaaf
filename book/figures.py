"""Gives each page that has an explorable the script that draws it.

The directive `plans` draws the landing figure, in a page that is no notebook. A phone
gets the narrow drawing of a picture, of a notebook's if one is stored beside it.

The script stands in the page's head and is not deferred: an explorable draws itself
before what follows it is laid out, so nothing moves. And the list
of references is none to a screen reader, since its entries have a role of their own.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from hashlib import sha256
from pathlib import Path
from typing import Any

from docutils import nodes
from draw import stages
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from minizero.lab.explorables.base import script
from minizero.lab.explorables.plans import Plans
from minizero.lab.plots.narrow import drawn

FILE = "explorables.js"
NARROW: dict[str, dict[str, Any]] = {}
"""By what its wide picture is called: a narrow one, and its size."""
IMAGE = re.compile(r'<img [^>]*src="([^"]*_images/)(\w+)\.(?:png|svg)"[^>]*>')


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


def draw_narrow(app: Sphinx) -> None:
    """Write the narrow pictures, each under the wide one's name."""
    folder = Path(app.outdir) / "_images"
    folder.mkdir(parents=True, exist_ok=True)
    for path in Path(app.srcdir).glob("*/*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            for output in cell.get("outputs", []):
                about = output.get("metadata", {}).get("image/png", {})
                if "narrow" in about:
                    wide = sha256(b64decode("".join(output["data"]["image/png"])))
                    NARROW[wide.hexdigest()] = about["narrow"]
    NARROW["stages"] = drawn(stages())
    for name, about in NARROW.items():
        (folder / f"{name}-narrow.png").write_bytes(b64decode(about["png"]))


def picture(found: re.Match[str]) -> str:
    """An image, and where a page is narrow the narrow one."""
    image, name = found[0], found[2]
    if name not in NARROW:
        return image
    width, height = (NARROW[name][side] for side in ("width", "height"))
    return (
        f'<picture><source media="(max-width: 600px)" width="{width}" '
        f'height="{height}" srcset="{found[1]}{name}-narrow.png 2x">{image}</picture>'
    )


def load(
    app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Load it in pages with an explorable."""
    body = context.get("body", "")
    if "<explorable-" in body:
        app.add_js_file(FILE)
    body = IMAGE.sub(picture, body)
    context["body"] = body.replace('<div role="list" class="cit', '<div class="cit')


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("plans", Figure)
    app.connect("builder-inited", write)
    app.connect("builder-inited", draw_narrow)
    app.connect("html-page-context", load)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
