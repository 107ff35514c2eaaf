"""What an engine hands out of the things that it owns."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Methods of DeepSpeed's engine that there are not here, and what to do.
REFUSED = {
    "allreduce_gradients": "backward reduces them as the plan says; leave it out",
    "offload_states": "states rest where the config says; give it "
    "offload_optimizer or offload_param",
    "reload_states": "states rest where the config says; leave it out",
    "scale": "backward scales the loss; call engine.backward(loss) in place "
    "of engine.scale(loss).backward()",
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


def option(path: str) -> Callable[[Any], Any]:
    """A method that reads the engine's config, as DeepSpeed has many."""

    def read(engine: Any) -> Any:
        return attrgetter(path)(engine.config)

    read.__doc__ = f"What the config says: `engine.config.{path}`."
    return read
