"""What a mixin is mixed with: any class of trainers, any class of arguments.

Only a type checker is told so, which a mixin's `super()` needs. The bases come from the
class that mixes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Trainer as AnyTrainer
    from transformers import TrainingArguments as AnyArguments
else:
    AnyArguments = AnyTrainer = object

__all__ = ["AnyArguments", "AnyTrainer"]
