"""Drop-in `Trainer` and `Accelerator`, on the engine: read `config` (fills in "auto"),
`accelerator` (the engine in the place of DDP) and `trainer`.
"""

from .accelerator import Accelerator
from .config import ZeroConfig
from .trainer import ArgumentsMixin, Trainer, TrainerMixin, TrainingArguments

__all__ = ["Accelerator", "ArgumentsMixin", "Trainer", "TrainerMixin"]
__all__ += ["TrainingArguments", "ZeroConfig"]
