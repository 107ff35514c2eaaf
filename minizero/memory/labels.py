"""What each storage is for, and where it is: labels that every room may put on.

Training labels what it allocates and marks moments; who is watching (a `Tracker`) is
told of both. Nothing here looks at a tensor's elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class Watcher(Protocol):
    """What wants to be told of labels and moments."""

    def see(
        self, storage: torch.UntypedStorage, category: str | None = None
    ) -> None: ...

    def mark(self, event: str, unit: str = "") -> None: ...


CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")

# What each storage is for, and which of them are off the device. Weak keys:
# a label must not keep memory alive.
_categories: WeakIdKeyDictionary = WeakIdKeyDictionary()
_hosted: WeakIdKeyDictionary = WeakIdKeyDictionary()
_on_gpu: WeakIdKeyDictionary = WeakIdKeyDictionary()  # labelled, and not on the CPU
_watchers: list[Watcher] = []
_allocates_on_host = False


def label(tensor: Tensor, category: str, on: str | None = None) -> Tensor:
    """Name the category of a tensor's storage, for trackers now and later.

    `on`: "cpu" if it is host memory that stands outside the device's budget,
    "device" if it is inside; None leaves that as it is.
    """
    _check("category", category, CATEGORIES)
    storage = tensor.untyped_storage()
    _categories[storage] = category
    if tensor.device.type != "cpu":
        _on_gpu[storage] = True
    if on is not None:
        _check("on", on, ("device", "cpu"))
        _hosted[storage] = on == "cpu"
    for watcher in _watchers:
        watcher.see(storage, category)
    return tensor


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def category_of(storage: torch.UntypedStorage) -> str:
    """The category that a storage was given; "activations" if nobody gave one."""
    return str(_categories.get(storage, "activations"))


def is_hosted(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is host memory.

    What was said of it counts. Else the CPU's memory stands for a device's, unless
    something that is labelled lives on a real one.
    """
    said = _hosted.get(storage)
    return bool(_on_gpu) and storage.device.type == "cpu" if said is None else said


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor's storage is host memory; see `is_hosted`."""
    return is_hosted(tensor.untyped_storage())


@contextmanager
def apart() -> Iterator[None]:
    """What was labelled before is unknown inside, and what is labelled there after."""
    global _categories, _hosted, _on_gpu
    before = _categories, _hosted, _on_gpu
    _categories, _hosted, _on_gpu = (WeakIdKeyDictionary() for _ in before)
    try:
        yield
    finally:
        _categories, _hosted, _on_gpu = before


@contextmanager
def host_memory() -> Iterator[None]:
    """What operations allocate inside the block is host memory."""
    global _allocates_on_host
    before, _allocates_on_host = _allocates_on_host, True
    try:
        yield
    finally:
        _allocates_on_host = before


def allocates_on_host(*arguments: Any) -> bool:
    """Whether what an operation makes of these is host memory.

    It is inside `host_memory`, and if all tensors among the arguments are.
    """
    if _allocates_on_host or not (_hosted or _on_gpu):
        return _allocates_on_host
    tensors = [x for x in tree_iter(arguments) if isinstance(x, Tensor)]
    return bool(tensors) and all(on_host(x) for x in tensors)


def note_host(storage: torch.UntypedStorage) -> None:
    """A storage is host memory, unless someone said already where it is."""
    _hosted.setdefault(storage, True)


def label_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Label an optimizer's states; for `register_step_post_hook`.

    The states of a parameter in host memory are host memory too.
    """
    for p, state in list(optimizer.state.items()):
        on = "cpu" if isinstance(p, Tensor) and on_host(p) else None
        for leaf in tree_iter(state):
            # what is labelled stands for a state that rests elsewhere
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in _categories:
                label(leaf, "optimizer", on)


def labelled_bytes(on: str = "device") -> dict[str, int]:
    """Live bytes of every labelled storage, by category; needs no tracker.

    `on`: "device", or "cpu" for what was labelled as host memory.
    """
    _check("on", on, ("device", "cpu"))
    live = dict.fromkeys(CATEGORIES, 0)
    for storage, category in list(_categories.items()):
        if is_hosted(storage) == (on == "cpu"):
            live[category] += storage.nbytes()
    return live


def mark(event: str, unit: str = "") -> None:
    """Mark a moment in every tracker that is running."""
    for watcher in _watchers:
        watcher.mark(event, unit)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of labels and moments; first of the labels that there are."""
    _watchers.append(watcher)
    try:
        _show_all(watcher)
        yield
    finally:
        _watchers.remove(watcher)


def _show_all(watcher: Watcher) -> None:
    # not in `watching`, whose frame would keep the last storage alive
    for storage, category in list(_categories.items()):
        watcher.see(storage, category)
