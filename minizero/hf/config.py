"""A DeepSpeed config whose "auto" values Hugging Face's own code fills in."""

from __future__ import annotations

import copy
import json
from typing import Any

from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ..config.source import Source


class ZeroConfig(HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
    """What `deepspeed=` is given: a dict, the path of a file, or JSON text.

    `config`: a copy, filled in as far as is known. `mismatches`: a line for
    each value that contradicts the arguments.
    """

    def __init__(self, source: Source) -> None:
        if isinstance(source, str) and source.lstrip().startswith("{"):
            source = json.loads(source)
        # not the one of transformers, which asks for a package deepspeed
        HfDeepSpeedConfig.__init__(self, source)
        self._dtype = None
        self.mismatches: list[str] = []

    def fill(self, key: str, value: Any) -> None:
        """Set a key that is missing, or "auto"."""
        self.config.setdefault(key, "auto")
        self.fill_only(key, value)

    def trainer_config_process(self, args: Any, *more: Any) -> None:
        """Fill in what the arguments say, and the sections they ask for."""
        for name in ("fp16", "bf16"):
            if getattr(args, name):
                self.config.setdefault(name, {"enabled": True})
        for ours, theirs in (
            ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
            ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ):
            self.fill(ours, getattr(args, theirs))
        super().trainer_config_process(args, *more)

    def finished(
        self, args: Any, model: Any, steps: int | None = None
    ) -> dict[str, Any]:
        """The whole config, for so many updates.

        Of a copy: an evaluation, which comes without `steps`, gets one that
        has no scheduler, and the training after it another. ValueError lists
        what contradicts the arguments.
        """
        done = copy.deepcopy(self)
        if steps is None:
            done.config.pop("scheduler", None)
        done.trainer_config_finalize(args, model, steps or 0)
        return done.for_engine()

    def for_engine(self) -> dict[str, Any]:
        """What the engine reads: inf, which Accelerate writes, is never."""
        config = copy.deepcopy(self.config)
        if config.get("steps_per_print") == float("inf"):
            del config["steps_per_print"]
        return config
