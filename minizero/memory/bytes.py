"""Bytes by hand: alignment, host memory, and a tensor seen as bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from . import labels


def aligned(nbytes: int, to: int = 64) -> int:
    """The next multiple of `to`; 64 bytes are a cache line."""
    return -(-nbytes // to) * to


def host_empty(
    shape: Sequence[int], dtype: torch.dtype, category: str
) -> Tensor:
    """Uninitialised host memory, outside the device's budget.

    Page-locked where there is a GPU, which else could not copy on its own.
    """
    pin = torch.cuda.is_available()
    with labels.host_memory():
        host = torch.empty(tuple(shape), dtype=dtype, pin_memory=pin)
    return labels.label(host, category, on="cpu")


def view(buffer: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor; keeps no memory alive."""
    array = ctypes.c_ubyte * buffer.nbytes
    return memoryview(array.from_address(buffer.data_ptr())).cast("B")
