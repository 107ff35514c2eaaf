"""Which stage, at what scale: a step predicted, rehearsed, and chosen.

Read `machines` and `shapes` (the hardware and the models), `cost` (seconds of a block,
bytes of a rank), `predict` (a step in simulated time), `published` (predictions against
runs that others published), `planner`, and `dryrun` (the real engine, as one rank of
many, on tensors without memory). Imports `engine` and what is below it.
"""

from .cost import Candidate, Job, Memory
from .machines import MACHINES, Machine
from .planner import Choice, choose
from .predict import Prediction, predict
from .shapes import MODELS, Shape

__all__ = ["Candidate", "Choice", "Job", "MACHINES", "MODELS", "Machine", "Memory"]
__all__ += ["Prediction", "Shape", "choose", "predict"]
