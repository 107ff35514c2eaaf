"""An explorable: what a transformer keeps for backward, by mode of checkpointing."""

from __future__ import annotations

from typing import Any

import traitlets

from minizero.lab.explorables.base import Explorable, look, module, table
from minizero.lab.plots.style import CATEGORY_COLOURS, GREY, amount
from minizero.memory.plan import estimate_activations

MODES = ("none", "selective", "full")
PALETTE = {
    "kept by all layers": look(CATEGORY_COLOURS["activations"]),
    "one layer, computed again": look("transparent", GREY),
}


class ActivationExplorer(Explorable):
    """Bytes that are kept for backward under each mode of checkpointing.

    16 bit, without tensor parallelism (Korthikanti et al. 2022, sec. 4 and 5), and at
    the peak one layer whole, which backward computes again.

    layers: 1 to 256. hidden: 256 to 65,536. heads: 1 to 256. sequence: 128 to 131,072
    tokens. micro_batch: sequences, 1 to 256.
    """

    kind = "activations"
    _esm = module(kind)

    layers = traitlets.Int(32, min=1, max=256).tag(sync=True)
    hidden = traitlets.Int(4096, min=256, max=65_536).tag(sync=True)
    heads = traitlets.Int(32, min=1, max=256).tag(sync=True)
    sequence = traitlets.Int(2048, min=128, max=131_072).tag(sync=True)
    micro_batch = traitlets.Int(1, min=1, max=256).tag(sync=True)
    palette = traitlets.Dict(PALETTE).tag(sync=True)

    def numbers(self) -> list[list[Any]]:
        """By mode: bytes of what all layers keep, and of what one makes again."""
        sizes = (self.hidden, self.heads, self.sequence, self.micro_batch)
        whole = estimate_activations(1, *sizes)
        return [
            [
                mode,
                estimate_activations(self.layers, *sizes, mode),
                whole - estimate_activations(1, *sizes, mode),
            ]
            for mode in MODES
        ]

    def fallback(self) -> str:
        rows = {mode: amount(kept + again) for mode, kept, again in self.numbers()}
        return table(self._title(), ("checkpointing", "bytes at the peak"), rows)

    def describe(self) -> str:
        peaks = ", ".join(f"{m} {amount(k + again)}" for m, k, again in self.numbers())
        return f"{self._title()}: {peaks}."

    def _title(self) -> str:
        return (
            f"Activations of {self.layers} layers of {self.hidden}, "
            f"{self.micro_batch} x {self.sequence:,} tokens"
        )
