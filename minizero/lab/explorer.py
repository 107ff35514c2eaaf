"""Explorables: figures to play with, live in Jupyter and in a static page.

An explorable is an anywidget whose output also carries text/html: its JavaScript
module inline, with its state and a stand-in for the widget's model. JupyterLab draws
the widget, with Python at the other end; a rendered page draws the html, with no
kernel, no widget manager and no network.
"""

from __future__ import annotations

import html
import json
from itertools import product
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from minizero.memory import OPTIMIZERS, Breakdown, estimate

from .style import CATEGORY_COLOURS, CATEGORY_HATCHES, amount, ink

CATEGORIES = ("parameters", "gradients", "optimizer")
PRECISIONS = ("bf16", "fp32")
DEVICE_MEMORIES = (24, 40, 80, 141)
"""Gigabytes of a GPU that can be chosen."""

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


class Explorable(anywidget.AnyWidget):
    """A widget that draws itself in a static page too.

    A subclass sets ``_esm``, the path of a module with a function ``render`` that
    needs nothing but its model and its element, and may say in `fallback` what a page
    without JavaScript shows. The state of a page is that at the time of display.
    """

    def fallback(self) -> str:
        """HTML for a page that runs no JavaScript."""
        return ""

    def static_html(self) -> str:
        """The explorable as a piece of a page, complete in itself."""
        inherited = anywidget.AnyWidget.class_trait_names()
        state = {
            name: getattr(self, name)
            for name in self.trait_names(sync=True)
            if name not in inherited and not name.startswith("_")
        }
        data = html.escape(json.dumps(state, sort_keys=True))
        module = str(self._esm).replace("</script", "<\\/script")
        return (
            f"<style>{PAGE_STYLE}</style>\n"
            f'<div class="explorable" data-state="{data}">{self.fallback()}</div>\n'
            f'<script type="module">\n{module}{MOUNT}</script>'
        )

    def _repr_mimebundle_(
        self, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/html": self.static_html()}, metadata


class MemoryExplorer(Explorable):
    """How much of a GPU the model states take, for the four stages side by side.

    Every control is an attribute: reading it gives what the reader chose, setting it
    moves the control, and ``observe`` calls back on a change.

    n_params: parameters of the model, 1e8 to 1e12.
    world_size: GPUs, a power of two from 1 to 1,024.
    stage: 0 to 3, the one that is described in words.
    precision: "bf16" or "fp32"; optimizer: "adam", "momentum" or "sgd".
    offload_optimizer, offload_param: keep these states in host memory, in the stages
        that shard them.
    device_memory: gigabytes (10^9 bytes) of a GPU, one of :data:`DEVICE_MEMORIES`.
    """

    _esm = Path(__file__).with_suffix(".js")

    n_params = traitlets.Float(7e9).tag(sync=True)
    world_size = traitlets.Int(8).tag(sync=True)
    stage = traitlets.Enum([0, 1, 2, 3], 3).tag(sync=True)
    precision = traitlets.Enum(PRECISIONS, "bf16").tag(sync=True)
    optimizer = traitlets.Enum(list(OPTIMIZERS), "adam").tag(sync=True)
    offload_optimizer = traitlets.Bool(False).tag(sync=True)
    offload_param = traitlets.Bool(False).tag(sync=True)
    device_memory = traitlets.Enum(DEVICE_MEMORIES, 80).tag(sync=True)
    device_memories = traitlets.List(list(DEVICE_MEMORIES)).tag(sync=True)
    coefficients = traitlets.Dict().tag(sync=True)
    palette = traitlets.Dict().tag(sync=True)

    def __init__(self, **controls: Any) -> None:
        unknown = set(controls) - set(self.class_trait_names(sync=True))
        if unknown:
            raise TypeError(f"The explorer has no control {min(unknown)!r}.")
        super().__init__(coefficients=coefficients(), palette=palette(), **controls)

    @traitlets.validate("n_params")
    def _valid_n_params(self, proposal: Any) -> float:
        value: float = proposal.value
        if not 1e8 <= value <= 1e12:
            raise traitlets.TraitError(
                f"n_params is {value:g}; choose from 1e8 to 1e12."
            )
        return value

    @traitlets.validate("world_size")
    def _valid_world_size(self, proposal: Any) -> int:
        value: int = proposal.value
        if value not in [2**i for i in range(11)]:
            raise traitlets.TraitError(
                f"world_size is {value}; choose a power of two, 1 to 1024."
            )
        return value

    def breakdown(self, stage: int | None = None) -> Breakdown:
        """The estimate that the explorer shows for a stage, else for the chosen one.

        State that the stage does not shard stays on the device, offloaded or not.
        """
        stage = self.stage if stage is None else stage
        return estimate(
            self.n_params,
            self.world_size,
            stage,
            self.precision,
            self.optimizer,
            offload_optimizer="cpu" if self.offload_optimizer and stage >= 1 else None,
            offload_param="cpu" if self.offload_param and stage >= 3 else None,
        )

    def fallback(self) -> str:
        rows = "".join(
            f"<tr><td>{stage}</td><td>{amount(self.breakdown(stage).total)}</td></tr>"
            for stage in range(4)
        )
        return (
            f"<table><caption>{self._title()}</caption>"
            f"<tr><th>ZeRO stage</th><th>bytes per GPU</th></tr>{rows}</table>"
        )

    def _title(self) -> str:
        return (
            f"Model states of {self.n_params / 1e9:g}B parameters, "
            f"{self.precision}, {self.optimizer}, on {self.world_size} GPUs"
        )

    def __repr__(self) -> str:
        totals = ", ".join(amount(self.breakdown(stage).total) for stage in range(4))
        return f"{self._title()}: stages 0 to 3 take {totals} each."


def explorer(**controls: Any) -> MemoryExplorer:
    """The memory explorer, with any of its controls set."""
    return MemoryExplorer(**controls)


def coefficients() -> dict[str, dict[str, tuple[float, float]]]:
    """What `estimate` says, as two numbers a category, so that a page can multiply.

    A key is "stage/precision/optimizer/oo", the last two 1 where the optimizer state
    and the parameters are offloaded. Its bytes on N GPUs are
    ``n_params * (whole + split / N)``, on the device for the categories and off it
    for "host". What a stage refuses to offload has no key.
    """
    table = {}
    choices = product(range(4), PRECISIONS, OPTIMIZERS, (0, 1), (0, 1))
    for stage, precision, optimizer, state, param in choices:
        offload = {"offload_optimizer": state, "offload_param": param}
        options = {name: "cpu" for name, chosen in offload.items() if chosen}
        try:
            one, two = (
                # A power of two as n_params, so that every division is exact.
                estimate(2**30, gpus, stage, precision, optimizer, **options)
                for gpus in (1, 2)
            )
        except ValueError:
            continue
        table[f"{stage}/{precision}/{optimizer}/{state}{param}"] = {
            name: ((2 * b - a) / 2**30, 2 * (a - b) / 2**30)
            for name, a, b in (
                *((c, getattr(one, c), getattr(two, c)) for c in CATEGORIES),
                ("host", one.host.total, two.host.total),
            )
        }
    return table


def palette() -> dict[str, dict[str, Any]]:
    """Colour, text colour and stripes of each category of model state."""
    return {
        name: {
            "colour": CATEGORY_COLOURS[name],
            "ink": ink(CATEGORY_COLOURS[name]),
            "striped": bool(CATEGORY_HATCHES[name]),
        }
        for name in CATEGORIES
    }
