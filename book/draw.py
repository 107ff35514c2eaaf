"""Draws the pictures of the README and of the book: `make picture`.

Their numbers come from `minizero.estimate`, their colours from the laboratory. The step
that the timeline has recorded is recorded anew.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

from minizero.lab.explorables.steps import one_step
from minizero.lab.explorables.timeline import RECORDED, packed
from minizero.lab.plots import memory_bars, use
from minizero.lab.plots.style import CATEGORY_COLOURS
from minizero.memory.plan import estimate
from minizero.memory.trace import joined
from minizero.ranks import launch

ASSETS = Path(__file__).parent / "assets"
LABELS = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def main() -> None:
    """Write every picture; the same code gives the same bytes, but for times."""
    use()
    stages().savefig(ASSETS / "stages.svg", metadata={"Date": None})
    (ASSETS / "logo.svg").write_text(ring(width=14))
    (ASSETS / "favicon.svg").write_text(ring(width=20))
    RECORDED.write_text(json.dumps(packed(joined(launch(one_step, 2)))))


def stages() -> Figure:
    """The model states of the landing page."""
    bars = {label: estimate(7e9, 8, stage) for stage, label in enumerate(LABELS)}
    return memory_bars(bars, budget=80e9)


def ring(width: int, shards: int = 4, gap: float = 4) -> str:
    """The digit zero in equal shards, one colour each; `width` is that of the stroke.

    Lengths along the ring are percent of it.
    """
    colours = list(CATEGORY_COLOURS.values())[:shards]
    share = 100 / shards
    arcs = "\n".join(
        f'<ellipse cx="50" cy="50" rx="32" ry="40" stroke="{colour}" pathLength="100"'
        f' stroke-dasharray="{share - gap:g} {100 - share + gap:g}"'
        f' stroke-dashoffset="{-(shard * share + gap / 2):g}"/>'
        for shard, colour in enumerate(colours)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 100" fill="none"'
        f' stroke-width="{width}">\n{arcs}\n</svg>\n'
    )


if __name__ == "__main__":
    main()
