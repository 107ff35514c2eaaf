"""Explorables: figures to play with, live in Jupyter and in a static page.

An explorable is an anywidget whose output also carries text/html: its JavaScript
module inline, with its state and a stand-in for the widget's model. JupyterLab draws
the widget, with Python at the other end; a rendered page draws the html, with no
kernel, no widget manager and no network.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anywidget

from minizero.lab.plots.style import ink

# The theme puts html outputs on a light card when the page is dark. An explorable
# takes the page's own colours instead.
PAGE_STYLE = """
html[data-theme] .text_html:has(> .explorable) {
  background: none !important; padding: 0 !important;
  color: var(--pst-color-text-base) !important;
}
"""

# Deferred scripts run in the order of the page, so each finds its own element.
MOUNT = """
{
  const el = document.querySelector(".explorable:not([data-mounted])");
  el.dataset.mounted = "";
  const state = JSON.parse(el.dataset.state);
  const listeners = {};
  const model = {
    get: (name) => state[name],
    set: (name, value) => {
      state[name] = value;
      listeners[`change:${name}`]?.forEach((listener) => listener());
    },
    on: (names, listener) => names.split(" ").forEach(
      (name) => (listeners[name] ??= []).push(listener)),
    off: () => {},
    save_changes: () => {},
  };
  el.replaceChildren();
  render({ model, el });
}
"""

STRIPES = "rgb(0 0 0 / 0.32)"
"""Stripes over a colour."""


def module(*names: str) -> str:
    """The JavaScript of an explorable: what all share, then these files of the lab."""
    folder = Path(__file__).parent
    return "\n".join(
        (folder / name).read_text(encoding="utf-8") for name in ("base.js", *names)
    )


def look(colour: str, stripes: str | None = None) -> dict[str, str | None]:
    """An entry of an explorable's palette: its fill, and the text that reads on it."""
    text = None if colour == "transparent" else ink(colour)
    return {"colour": colour, "ink": text, "stripes": stripes}


def table(caption: str, head: tuple[str, str], rows: Mapping[str, str]) -> str:
    """A table of two columns, for a page without JavaScript."""
    lines = "".join(f"<tr><td>{a}</td><td>{b}</td></tr>" for a, b in rows.items())
    return (
        f"<table><caption>{caption}</caption>"
        f"<tr><th>{head[0]}</th><th>{head[1]}</th></tr>{lines}</table>"
    )


class Explorable(anywidget.AnyWidget):
    """A widget that draws itself in a static page too.

    A subclass sets ``_esm`` to a module with a function ``render`` that needs nothing
    but its model and its element: most take :func:`module` of a file. Its controls,
    and what it needs to know, are synced traits: reading a control gives what the
    reader chose, setting it moves it, and ``observe`` calls back on a change. The
    state of a page is that at the time of display.
    """

    def __init__(self, **controls: Any) -> None:
        unknown = set(controls) - set(self.class_trait_names(sync=True))
        if unknown:
            name = type(self).__name__
            raise TypeError(f"{name} has no control {min(unknown)!r}.")
        super().__init__(**controls)

    def describe(self) -> str:
        """What it shows, in a sentence."""
        return f"{type(self).__name__}, to be seen in a browser."

    def fallback(self) -> str:
        """HTML for a page that runs no JavaScript."""
        return f"<p>{html.escape(self.describe())}</p>"

    def static_html(self) -> str:
        """The explorable as a piece of a page, complete in itself."""
        inherited = anywidget.AnyWidget.class_trait_names()
        state = {
            name: getattr(self, name)
            for name in self.trait_names(sync=True)
            if name not in inherited and not name.startswith("_")
        }
        data = html.escape(json.dumps(state))
        module = str(self._esm).replace("</script", "<\\/script")
        return (
            f"<style>{PAGE_STYLE}</style>\n"
            f'<div class="explorable" data-state="{data}">{self.fallback()}</div>\n'
            f'<script type="module">\n{module}{MOUNT}</script>'
        )

    def __repr__(self) -> str:
        return self.describe()

    def _repr_mimebundle_(
        self, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/html": self.static_html()}, metadata
