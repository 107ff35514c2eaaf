"""Explorables that a single formula draws: one class each, in the chapters' order."""

from __future__ import annotations

from typing import Any

import traitlets

from minizero.lab.explorables.base import STRIPES, Amount, Explorable, look, module
from minizero.lab.plots.style import LINES
from minizero.scale.machines import H100


class Exchanges(Explorable):
    """Three all-reduces step by step: which sums each rank has, what it has sent.

    way: "ring", "direct" or "rank 0", which adds everything itself.
    ranks: 2 to 8. step: from 0; beyond the last it stays at the last.
    """

    kind = "exchanges"
    _esm = module(kind)

    way = traitlets.Enum(("ring", "direct", "rank 0"), "ring").tag(sync=True)
    ranks = traitlets.Int(4, min=2, max=8).tag(sync=True)
    step = traitlets.Int(2, min=0).tag(sync=True)

    def numbers(self) -> list[list[Any]]:
        """What each rank has sent, as a share of the buffer."""
        n, last = self.ranks, 2 * (self.ranks - 1) if self.way == "ring" else 2
        step = min(self.step, last)
        if self.way == "rank 0":  # everybody to it, and it to everybody
            sent = [(n - 1.0) * (step == 2)] + [1.0 * (step > 0)] * (n - 1)
        else:
            sent = [step * (1 if self.way == "ring" else n - 1) / n] * n
        return [[f"rank {r}", share] for r, share in enumerate(sent)]

    def describe(self) -> str:
        return f"{self.way}, {self.ranks} ranks, after step {self.step}"


class Shards(Explorable):
    """The shards of a small flat buffer, and the buckets in which it is reduced.

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
        looks = (look(shade, s) for s in (None, STRIPES) for shade in LINES[:2])
        return dict(zip(self.sizes, looks, strict=False))

    def sent(self) -> float:
        """Elements that each rank sends in an all-reduce of the padded buffer."""
        size = -(-sum(self.sizes.values()) // self.ranks)
        return 2 * size * (self.ranks - 1)

    def numbers(self) -> list[list[Any]]:
        """The padded size, the buckets, and what reducing them sends."""
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


class LinkTime(Explorable):
    """A unit in bf16 against the tokens: computing it, and moving it over the link.

    tokens: of a micro-batch, 256 to 262,144.
    bandwidth: gigabytes a second that a rank sends, 1 to 1,000.
    latency: microseconds of a call, 1 to 1,000.
    unit: millions of parameters, 0.1 to 10,000; a page that knows the reader's model
        takes a block of it.
    speed: TFLOP/s of a rank, 10 to 2,000.

    It opens with an H100 and its network.
    """

    kind = "link"
    _esm = module(kind)

    tokens = Amount(8192, 256, 262_144).tag(sync=True)
    bandwidth = Amount(H100.network / 1e9, 1, 1000).tag(sync=True)
    latency = Amount(30, 1, 1000).tag(sync=True)
    unit = Amount(200, 0.1, 10_000).tag(sync=True)
    speed = Amount(round(H100.flops / 1e12), 10, 2000).tag(sync=True)

    def times(self) -> tuple[float, float, float]:
        """Seconds: of computing, and of what ZeRO-2 and ZeRO-3 send.

        Six operations per parameter and token; two calls of 2 bytes per parameter under
        ZeRO-2, three under ZeRO-3, (N - 1) / N taken as 1.
        """
        elements = self.unit * 1e6
        call = 2 * elements / (self.bandwidth * 1e9) + self.latency / 1e6
        work = 6 * elements * self.tokens / (self.speed * 1e12)
        return work, 2 * call, 3 * call

    def numbers(self) -> list[list[Any]]:
        """Seconds of computing, of sending, and of waiting once they overlap."""
        work, *sent = self.times()
        return [
            [name, work, moved, max(0.0, moved - work)]
            for name, moved in zip(("ZeRO-2", "ZeRO-3"), sent, strict=True)
        ]

    def least_tokens(self) -> float:
        """Tokens from which ZeRO-3's communication hides behind computation."""
        work, _, moved = self.times()
        return self.tokens * moved / work

    def describe(self) -> str:
        return (
            f"At {self.speed:g} TFLOP/s and {self.bandwidth:g} GB/s, ZeRO-3 hides its "
            f"communication from {self.least_tokens():,.0f} tokens on."
        )
