"""Which algorithm a collective takes, and the two halves of which it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..ranks.launch import device
from . import algorithms, transport
from .groups import Group
from .quantized import Quantized, quantized_all_gather, quantized_reduce_scatter
from .transport import Finish, Rows, backend_of, is_staged


class Halves(NamedTuple):
    """The two halves of an all-reduce; each call starts one and returns its finish."""

    reduce_scatter: Callable[[Tensor, Rows, int, bool, Group], Finish]
    all_gather: Callable[[Rows, Tensor, int, Group], Finish]


_HALVES = {
    "direct": Halves(algorithms.direct_reduce_scatter, algorithms.direct_all_gather),
    "ring": Halves(algorithms.ring_reduce_scatter, algorithms.ring_all_gather),
    "backend": Halves(transport.backend_reduce_scatter, transport.backend_all_gather),
}
ALGORITHMS = tuple(_HALVES)
_chosen: list[str] = []  # the innermost `algorithm` last


@contextmanager
def algorithm(name: str) -> Iterator[None]:
    """Choose how the collectives inside are done: "direct", "ring" or "backend".

    Without it gloo takes "direct" and NCCL takes "backend". Only "direct" promises that
    all elements are summed in one order.
    """
    if name not in ALGORITHMS:
        raise ValueError(
            f"algorithm must be one of {', '.join(ALGORITHMS)}, not {name!r}"
        )
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def current_algorithm(tensor: Tensor | None = None) -> str:
    """The algorithm that the next collective of `tensor` takes.

    A process group may move tensors of the host and of the device, each in its own way;
    without a tensor, one on this rank's device is meant.
    """
    if _chosen:
        return _chosen[-1]
    like = torch.empty(0, device=device()) if tensor is None else tensor
    return "direct" if backend_of(like) in ("", "gloo") else "backend"


def halves(tensor: Tensor, quantized: Quantized | None = None) -> Halves:
    """The halves of the current algorithm, for rows as they are or quantized."""
    found = _HALVES[current_algorithm(tensor)]
    if quantized is None:
        return found
    return Halves(
        partial(quantized_reduce_scatter, quantized),
        partial(quantized_all_gather, quantized, found.all_gather),
    )


def uses_backend(tensor: Tensor, quantized: Quantized | None = None) -> bool:
    """Whether one of the backend's own collectives does it all."""
    plain = quantized is None and not is_staged(tensor)
    return plain and current_algorithm(tensor) == "backend"
