"""Which stage, at what scale: a step predicted, rehearsed and chosen.

Read `machines` and `shapes` (what there is to run, and on what), `operators` (seconds of
a block), `memory`, `predict` (a step in simulated time), `published` (the predictions
against runs that others published), `dryrun` (the real engine, as one rank of many, on
nothing, as `rehearsal` has it), `fixes` (what would make it fit), `candidates`,
`planner` and `command`. Imports `engine` and what is below it.
"""

from .candidates import Job
from .machines import MACHINES, Machine
from .memory import Memory
from .planner import Choice, choose
from .predict import Prediction, predict
from .shapes import MODELS, Shape

__all__ = [
    "Choice",
    "Job",
    "MACHINES",
    "MODELS",
    "Machine",
    "Memory",
    "Prediction",
    "Shape",
    "choose",
    "predict",
]
