"""Drop-in `Trainer` and `Accelerator`, on the engine: read `calls` (of a micro-batch),
`accelerator` (the engine in the place of DDP) and `trainer`.
"""

from .accelerator import Accelerator
from .trainer import ArgumentsMixin, Trainer, TrainerMixin, TrainingArguments
from .trainer import ZeroConfig

__all__ = ["Accelerator", "ArgumentsMixin", "Trainer", "TrainerMixin"]
__all__ += ["TrainingArguments", "ZeroConfig"]
