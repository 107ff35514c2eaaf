"""Explorables: figures to play with, live in Jupyter and in a static page.

An explorable is an anywidget whose output also carries text/html: an element with its
state, and inside it a sentence for a page without scripts. JupyterLab draws the widget,
with Python at the other end. In a rendered page :func:`script` draws the element, with
no kernel, no widget manager and no network, and keeps its setting in the address.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from minizero.lab.plots.style import ink

FIGURES = {
    "memory": ("memory_chart.js", "memory.js"),
    "exchanges": ("exchanges.js",),
    "shards": ("shards.js",),
    "formats": ("formats.js",),
    "link": ("link.js",),
    "interval": ("interval.js",),
    "config": ("config.js",),
    "timeline": ("trace.js", "own_trace.js", "timeline_picture.js", "timeline.js"),
    "plans": ("trace.js", "plans.js"),
    "predict": ("predict_curve.js", "predict.js"),
}
"""The kinds of explorables, and the files of each."""

STRIPES = "rgb(0 0 0 / 0.32)"
"""Stripes over a colour."""


def _read(*names: str) -> str:
    """Files without comments, empty lines, and the space before lines."""
    folder = Path(__file__).parent
    whole = "\n".join((folder / name).read_text(encoding="utf-8") for name in names)
    return re.sub(r"(?m)^ *(//.*|/\*\*(?s:.*?)\*/)?\n|^ +|  // .*$", "", whole)


def module(kind: str) -> str:
    """The JavaScript of an explorable in Jupyter: what all share, then its own files.

    Its default export has ``render``, and ``numbers``, which gives what is drawn for
    a setting.
    """
    return _read("base.js", *FIGURES[kind])


def script(kinds: Iterable[str] = FIGURES) -> str:
    """What draws these explorables in a page; it stands before the first of them."""
    own = "\n".join(
        f'define("{kind}", (() => {{\n{_read(*FIGURES[kind])}}})());'.replace(
            "export default", "return"
        )
        for kind in kinds
    )
    whole = f"(() => {{\n{_read('base.js', 'page.js')}\n{own}\n}})();\n"
    return re.sub(r"(?<=[;{,(])\n", "", whole)  # where a line's end says nothing


def look(colour: str, stripes: str | None = None) -> dict[str, str | None]:
    """An entry of an explorable's palette: its fill, and the text that reads on it."""
    text = None if colour == "transparent" else ink(colour)
    return {"colour": colour, "ink": text, "stripes": stripes}


class Amount(traitlets.Float[float, float | int]):
    """A number from `least` to `most`."""

    def __init__(self, default: float, least: float, most: float) -> None:
        super().__init__(default)
        self.least, self.most = least, most

    def validate(self, obj: Any, value: Any) -> float:
        number: float = super().validate(obj, value)
        if not self.least <= number <= self.most:  # as not-a-number is not
            raise traitlets.TraitError(
                f"{self.name} is {number:g}; choose from {self.least:g} to "
                f"{self.most:g}."
            )
        return number


class Computed(traitlets.Any):
    """What a page needs to know and no reader sets: what a function gives.

    It is called once for each explorable, when its state is first asked for.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.function = function

    def default(self, obj: Any = None) -> Any:
        return self.function()


class Explorable(anywidget.AnyWidget):
    """A widget that draws itself in a page without a kernel too.

    A subclass sets ``kind``, its name among :data:`FIGURES`, and ``_esm`` to the
    :func:`module` of it. Its controls, and what it needs to know, are synced traits:
    reading a control gives what the reader chose, setting it moves it, and ``observe``
    calls back on a change. The state in a page is that at the time of display.
    """

    kind: str

    def __init__(self, **controls: Any) -> None:
        unknown = set(controls) - set(self.class_trait_names(sync=True))
        if unknown:
            name = type(self).__name__
            raise TypeError(f"{name} has no control {min(unknown)!r}.")
        super().__init__(**controls)

    def numbers(self) -> list[list[Any]]:
        """What the figure draws for its setting: rows of a name and its numbers.

        The page computes the same with the ``numbers`` of its JavaScript.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """What it shows, in a sentence."""
        return f"{type(self).__name__}, to be seen in a browser."

    def fallback(self) -> str:
        """HTML for a page that runs no JavaScript."""
        return f"<p>{html.escape(self.describe())}</p>"

    def state(self) -> dict[str, Any]:
        """What the page needs to know: the synced traits that are not Jupyter's."""
        inherited = anywidget.AnyWidget.class_trait_names()
        return {
            name: getattr(self, name)
            for name in self.trait_names(sync=True)
            if name not in inherited and not name.startswith("_")
        }

    def limits(self) -> dict[str, dict[str, Any]]:
        """What a control may be, by its name: its choices, or its least and most."""
        found: dict[str, dict[str, Any]] = {}
        for name in self.state():
            trait = self.traits()[name]
            if isinstance(trait, traitlets.Enum):
                found[name] = {"choices": list(trait.values or ())}
            elif isinstance(trait, Amount):
                found[name] = {"least": trait.least, "most": trait.most}
            elif isinstance(trait, traitlets.Int):
                ends = {"least": trait.min, "most": trait.max}
                found[name] = {**ends, "whole": True}
        return found

    def element(self) -> str:
        """The explorable as an element of a page, which :func:`script` draws."""
        state, limits = (
            html.escape(json.dumps(part)) for part in (self.state(), self.limits())
        )
        tag = f"explorable-{self.kind}"
        return (
            f'<{tag} class="explorable-frame" data-state="{state}" '
            f'data-limits="{limits}">{self.fallback()}</{tag}>'
        )

    def static_html(self) -> str:
        """The element and what draws it: a piece of a page, complete in itself."""
        source = script([self.kind]).replace("</script", "<\\/script")
        return f"<script>\n{source}</script>\n{self.element()}"

    def __repr__(self) -> str:
        return self.describe()

    def _repr_mimebundle_(
        self, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/html": self.element()}, metadata
