"""An explorable: the shards and buckets of a small flat buffer."""

from __future__ import annotations

from typing import Any

import traitlets

from minizero.lab.explorables.base import Explorable, look, module
from minizero.lab.plots.style import LINES


class Shards(Explorable):
    """A flat buffer as it is cut for some ranks, and reduced in buckets.

    sizes: elements of each parameter, by its name; at most as many as there are
        colours.
    ranks: 1 to 8. bucket: elements of a bucket, 1 to 32.
    """

    kind = "shards"
    _esm = module(kind)

    sizes = traitlets.Dict({"embed": 5, "up": 9, "down": 6, "norm": 4}).tag(sync=True)
    ranks = traitlets.Int(4, min=1, max=8).tag(sync=True)
    bucket = traitlets.Int(8, min=1, max=32).tag(sync=True)
    palette = traitlets.Dict().tag(sync=True)

    @traitlets.default("palette")
    def _palette(self) -> dict[str, Any]:
        colours = zip(self.sizes, LINES, strict=False)
        return {name: look(colour) for name, colour in colours}

    def sent(self) -> float:
        """Elements that each rank sends in an all-reduce of the padded buffer."""
        size = -(-sum(self.sizes.values()) // self.ranks)
        return 2 * size * (self.ranks - 1)

    def numbers(self) -> list[list[Any]]:
        """How the buffer lies, and what reducing it sends."""
        size = -(-sum(self.sizes.values()) // self.ranks)
        width = max(1, self.bucket // self.ranks)
        return [
            ["elements with padding", size * self.ranks],
            ["all-reduces", -(-size // width)],
            ["elements of the largest", min(width, size) * self.ranks],
            ["elements a rank sends", self.sent()],
        ]

    def describe(self) -> str:
        return (
            f"{sum(self.sizes.values())} elements on {self.ranks} ranks, in buckets of "
            f"{self.bucket}: each rank sends {self.sent():g}."
        )
