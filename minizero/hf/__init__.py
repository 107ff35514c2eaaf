"""Hugging Face's `Trainer`, and `accelerate`'s loop, with the engine below them.

Read `config` ("auto"), `accelerator` (what takes the place of DDP), `trainer`, then
`adapters`. Imports the engine; and transformers, accelerate and peft, which nothing
else here imports.
"""

from .accelerator import Accelerator
from .adapters import get_peft_model
from .config import ZeroConfig
from .trainer import (
    ArgumentsMixin,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerMixin,
    TrainingArguments,
)

__all__ = [
    "Accelerator",
    "ArgumentsMixin",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainerMixin",
    "TrainingArguments",
    "ZeroConfig",
    "get_peft_model",
]
