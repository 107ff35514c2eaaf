"""Bytes by hand: alignment, host memory, a tensor seen as bytes, counts of writes."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from . import labels


def aligned(nbytes: int, to: int = 64) -> int:
    """The next multiple of `to`; 64 bytes are a cache line."""
    return -(-nbytes // to) * to


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each was written to, as far as autograd keeps count; else 0."""
    every = list(tensors)
    try:
        return [t._version for t in every]
    except RuntimeError:  # some were made in inference mode; to ask each takes time
        return [0 if t.is_inference() else t._version for t in every]


def host_empty(
    shape: Sequence[int], dtype: torch.dtype, category: str, passing: bool = False
) -> Tensor:
    """Uninitialised host memory, outside the device's budget.

    Page-locked where there is a GPU, which else could not copy on its own. `passing`
    memory comes and goes; it is from torch's allocator, which rounds up to powers of two
    and keeps what it has. All other takes the bytes that it has, up to a page.
    """
    count = torch.Size(shape).numel()
    pin = torch.cuda.is_available() and count > 0
    with labels.host_memory():
        if pin and not passing:
            host = page_locked(count, dtype).view(*shape)
        else:
            host = torch.empty(
                tuple(shape), dtype=dtype, device="cpu", pin_memory=pin
            )
    return labels.label(host, category, on="cpu")


def page_locked(count: int, dtype: torch.dtype) -> Tensor:
    """Pages of the system's, registered with CUDA until the tensor is gone: [count]."""
    nbytes = count * dtype.itemsize
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    host = torch.frombuffer(pages, dtype=dtype, count=count)
    error = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), nbytes, 0)
    if int(error):
        raise RuntimeError(
            f"{nbytes:,} bytes of host memory could not be page-locked ({error}); see "
            "how much may be (ulimit -l), or offload less"
        )
    # it has the pages too, so that they outlive the registration
    end = weakref.finalize(host.untyped_storage(), _unlock, host.data_ptr(), pages)
    end.atexit = False
    return host


def _unlock(start: int, pages: mmap.mmap) -> None:
    torch.cuda.synchronize()  # a copy may be under way
    torch.cuda.cudart().cudaHostUnregister(start)


def view(buffer: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor; keeps no memory alive."""
    array = ctypes.c_ubyte * buffer.nbytes
    return memoryview(array.from_address(buffer.data_ptr())).cast("B")
