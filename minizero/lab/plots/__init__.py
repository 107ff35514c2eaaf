"""Figures in one palette: memory by category, collectives over time, losses.

Every function returns a Figure, so it is a cell's last line or is given to
`display`. In a notebook they are PNG of two pixels to one, which is sharp and small,
and which every viewer shows: JupyterLab hides the SVG of a notebook that is not yet
trusted, and LaTeX takes none. Their background is clear and their text mid-grey, so
that one file serves a light page, a dark page and paper.
"""

from __future__ import annotations

import matplotlib as mpl  # noqa: F401  chapters draw with it

from minizero.lab.plots.bars import memory_bars as memory_bars
from minizero.lab.plots.bars import saved_bars as saved_bars
from minizero.lab.plots.charts import loss_curves as loss_curves
from minizero.lab.plots.memory import memory_over_step as memory_over_step
from minizero.lab.plots.narrow import use as use
from minizero.lab.plots.spans import timeline as timeline
from minizero.lab.plots.style import DASHES as DASHES
from minizero.lab.plots.style import GREY as GREY
from minizero.lab.plots.style import LINES as LINES
from minizero.lab.plots.style import STYLE as STYLE
from minizero.lab.plots.style import WIDTH as WIDTH
