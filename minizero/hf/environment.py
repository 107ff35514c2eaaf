"""What an integration finds when it comes: devices, arguments, models, loops, folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from .. import checkpoint
from ..comm import gather_objects
from ..ranks.launch import device, rank
from ..zero.absent import is_sharded, owners
from .config import ZeroConfig

REFUSED = {
    "auto_find_batch_size": "a rank that runs out of memory would start again without "
    "the others; give per_device_train_batch_size",
    "fsdp": "it shards the model itself; give one of fsdp and deepspeed",
    "parallelism_config": "its ranks are all data-parallel; leave it out",
}


def check_arguments(args: Any, ours: type) -> None:
    """Raise TypeError for others' arguments, ValueError for what does not go."""
    if not isinstance(args, ours):
        raise TypeError(
            f"args= is a {type(args).__module__}.{type(args).__name__}; give it the "
            "TrainingArguments of minizero.hf"
        )
    for name, why in REFUSED.items():
        if getattr(args, name, None):
            raise ValueError(f"{name} does not go with minizero: {why}")


def check_evaluation(args: Any, config: ZeroConfig) -> None:
    """Let it evaluate as it trains; raise ValueError if that was not asked for."""
    for name in ("fp16", "bf16"):
        if not getattr(args, f"{name}_full_eval"):
            continue
        if not config.is_true(f"{name}.enabled"):
            raise ValueError(
                f"{name}_full_eval=True would cast the model that is trained in "
                f"another dtype; give {name}=True as well, or leave it out"
            )
        setattr(args, f"{name}_full_eval", False)  # nothing is left to do


def check_adapters(model: Any, config: dict[str, Any]) -> None:
    """Raise ValueError for what is computed of parameters that are absent."""
    sharded = config.get("zero_optimization", {}).get("stage") == 3
    for made in getattr(model, "peft_config", {}).values():
        if sharded and made.peft_type == "ADALORA":
            raise ValueError(
                "AdaLoRA's loss reads every adapter after the layers that have them, "
                "which ZeRO-3 has released by then; train it at stage 2"
            )
    if not owners(model.parameters()):
        return
    for name, p in model.named_parameters():
        if p.requires_grad and not is_sharded(p) and p.isnan().any():
            raise ValueError(
                f"{name} has NaNs: it was made of parameters that are sharded, and "
                "so were absent; make adapters by minizero.hf.get_peft_model"
            )


def keep_in_step(model: nn.Module) -> None:
    """Let `model.generate` go on until the last rank is done.

    A rank that stops early would leave the others alone with a gather.
    """
    if hasattr(model, "generate"):
        model.generate = MethodType(generate, model)  # type: ignore[assignment]


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own, on all ranks together."""
    return type(model).generate(model, *args, **{**kwargs, "synced_gpus": True})


def loop_config(accelerator: Any, model: Any, objects: tuple[Any, ...]) -> Any:
    """The config of a loop of one's own, "auto" filled in by Accelerate's rules.

    The accelerator then counts as many micro-batches as the config says. Raises
    ValueError if it was told another number.
    """
    filled = ZeroConfig(accelerator.config)
    filled.config.setdefault("gradient_clipping", 0.0)  # the loop clips
    steps = accelerator.gradient_accumulation_steps
    values = {"gradient_accumulation_steps": steps, "gradient_clipping": 1.0}
    for loader in objects:
        if getattr(loader, "batch_size", None):
            values.setdefault("train_micro_batch_size_per_gpu", loader.batch_size)
    for key, value in values.items():
        filled.fill(key, value)
    if filled.is_auto("train_batch_size"):
        del filled.config["train_batch_size"]  # the engine's product
    values = {"fp16.enabled": False, "bf16.enabled": False}
    if hidden := getattr(getattr(model, "config", None), "hidden_size", 0):
        zero = "zero_optimization."
        values[zero + "reduce_bucket_size"] = hidden**2
        values[zero + "stage3_prefetch_bucket_size"] = int(0.9 * hidden**2)
        values[zero + "stage3_param_persistence_threshold"] = 10 * hidden
    for key, value in values.items():
        filled.fill_only(key, value)
    asked = filled.config["gradient_accumulation_steps"]
    if steps not in (1, asked):
        raise ValueError(
            f"the accelerator was given gradient_accumulation_steps={steps}, and the "
            f"config {asked}; give one of them"
        )
    accelerator.gradient_accumulation_steps = asked
    return filled.config


@contextmanager
def plain_cpu() -> Iterator[None]:
    """Without a GPU, let `accelerate` take the CPU as this rank has it.

    It would call it "cpu:0", and `.to("cpu:0")` copies what is on "cpu"; and it would
    choose another number of threads.
    """
    ours = {"ACCELERATE_TORCH_DEVICE": "cpu"} if device().type == "cpu" else {}
    ours["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    before = {name: os.environ.get(name) for name in ours}
    os.environ |= ours
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def saved_run(folder: str | os.PathLike[str]) -> bool:
    """Whether rank 0 finds a checkpoint of an engine there."""
    found = rank() == 0 and checkpoint.exists(Path(folder))
    return bool(gather_objects(found)[0])
