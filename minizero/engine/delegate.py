"""What an engine hands out of the things that it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from ..config import Config
from ..config.keys import Key, keys
from ..config.zero import ZeroOptimization

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Methods of DeepSpeed's engine that there are not here, and what to do.
REFUSED = {
    "allreduce_gradients": "backward reduces them as the plan says; leave it out",
    "offload_states": "states rest where the config says; give it "
    "offload_optimizer or offload_param",
    "reload_states": "states rest where the config says; leave it out",
    "set_data_post_process_func": "batches are not processed after loading; "
    "give initialize a collate_fn",
    "register_compile_pass": "nothing is compiled here",
}


class Field(Generic[T]):
    """An attribute of what the engine has at `path`, to read and to set."""

    def __init__(self, path: str) -> None:
        self.owner, _, self.name = path.rpartition(".")

    def __get__(self, engine: Any, cls: type) -> T:
        found: Any = self
        if engine is not None:
            found = getattr(getattr(engine, self.owner), self.name)
        return cast(T, found)

    def __set__(self, engine: Any, value: T) -> None:
        setattr(getattr(engine, self.owner), self.name, value)


def method(
    owner: str, called: Callable[Concatenate[Any, P], R]
) -> Callable[Concatenate[Any, P], R]:
    """A method of what the engine has under the name `owner`."""

    @wraps(called)
    def call(engine: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return called(getattr(engine, owner), *args, **kwargs)

    return call


# DeepSpeed's methods that read the config, where the name is not the key's.
_OPTIONS = {
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "loss_scale": "fp16.loss_scale",
    "fp16_auto_cast": "fp16.auto_cast",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "zero_optimization": "plan.optimizer.sharded",
    "zero_optimization_partition_gradients": "plan.gradients.sharded",
    "zero_optimization_partition_weights": "plan.parameters.sharded",
    "zero_optimization_stage": "zero_optimization.stage",
}


def options() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """A method for each key, as `zero_reduce_bucket_size`, and those of `_OPTIONS`."""
    paths = {name: name for name, key in keys(Config).items() if _scalar(key)}
    for name, key in keys(ZeroOptimization).items():
        if _scalar(key) or name.startswith("offload"):
            own = name if name.startswith("zero") else name.removeprefix("stage3_")
            paths[f"zero_{own}"] = f"zero_optimization.{name}"
    for name, path in (paths | _OPTIONS).items():
        yield name, option(path)


def _scalar(key: Key) -> bool:
    return key.section is None


def option(path: str) -> Callable[[Any], Any]:
    """A method that reads the engine's config, as DeepSpeed has many."""

    def read(engine: Any) -> Any:
        return attrgetter(path)(engine.config)

    read.__doc__ = f"What the config says: `engine.config.{path}`."
    return read
