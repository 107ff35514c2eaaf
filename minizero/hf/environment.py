"""What an integration meets: devices, models that were built, a loop's own settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..ranks import device
from .config import ZeroConfig


@contextmanager
def plain_cpu() -> Iterator[None]:
    """Without a GPU, let `accelerate` use the CPU as this rank has it.

    It would call it "cpu:0", and `.to("cpu:0")` copies what is on "cpu"; and it would
    choose another number of threads.
    """
    ours = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    if device().type == "cpu":
        ours["ACCELERATE_TORCH_DEVICE"] = "cpu"
    before = {name: os.environ.get(name) for name in ours}
    os.environ |= ours
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def keep_in_step(model: nn.Module) -> None:
    """Let `model.generate` continue until the last rank is done.

    A rank that stops early would leave the others waiting in a gather.
    """

    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        return type(model).generate(model, *args, **{**kwargs, "synced_gpus": True})

    if hasattr(model, "generate"):
        model.generate = MethodType(generate, model)  # type: ignore[assignment]


def loop_config(accelerator: Any, objects: tuple[Any, ...]) -> dict[str, Any]:
    """The config of a hand-written loop, "auto" filled in as the loop says.

    The accelerator then counts as many micro-batches as the config says. Raises
    ValueError if it was given another number.
    """
    filled = ZeroConfig(accelerator.config)
    filled.config.setdefault("gradient_clipping", 0.0)  # the loop clips
    filled.fill("gradient_clipping", 1.0)
    steps = accelerator.gradient_accumulation_steps
    filled.fill("gradient_accumulation_steps", steps)
    sizes = [size for o in objects if (size := getattr(o, "batch_size", None))]
    if sizes:
        filled.fill("train_micro_batch_size_per_gpu", sizes[0])
    if filled.is_auto("train_batch_size"):
        del filled.config["train_batch_size"]  # the product of the others
    asked = filled.config["gradient_accumulation_steps"]
    if steps not in (1, asked):
        raise ValueError(
            f"the accelerator was given gradient_accumulation_steps={steps}, and the "
            f"config {asked}; give one of them"
        )
    accelerator.gradient_accumulation_steps = asked
    return filled.config
