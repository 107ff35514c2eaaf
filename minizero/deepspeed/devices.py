"""`get_accelerator`: torch's module of this rank's device, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

# What torch.cpu has not: it counts no memory, and its work is done when a call returns.
_IDLE = dict.fromkeys(
    "empty_cache reset_peak_memory_stats reset_max_memory_allocated "
    "reset_max_memory_cached range_push range_pop".split()
)
_NOTHING: dict[str, Any] = _IDLE | dict.fromkeys(
    "memory_allocated max_memory_allocated memory_cached max_memory_cached "
    "memory_reserved max_memory_reserved total_memory available_memory".split(),
    0,
)


class Accelerator:
    """Whatever torch's module of the device has (`synchronize`, `Stream`, ...), and these.

    On a CPU amounts of memory are 0, and what has nothing to do does nothing.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.module = torch.get_device_module(kind)

    def __getattr__(self, name: str) -> Any:
        for module in (self.module, torch):
            if hasattr(module, name):
                return getattr(module, name)
        if name in _NOTHING:
            return lambda *_, **__: _NOTHING[name]
        raise AttributeError(f"torch.{self.kind} has no {name}")

    def device_name(self, device_index: int | None = None) -> str:
        """Such as "cuda:1"; a CPU has no numbers."""
        number = device_index is not None and self.kind != "cpu"
        return f"{self.kind}:{device_index}" if number else self.kind

    def current_device_name(self) -> str:
        return self.device_name(self.module.current_device())

    def communication_backend_name(self) -> str:
        return "gloo" if self.kind == "cpu" else "nccl"

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # of all devices

    manual_seed_all = manual_seed

    def random(self) -> Any:
        return torch.random

    def is_bf16_supported(self) -> bool:
        return self.kind == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_synchronized_device(self) -> bool:
        return self.kind == "cpu"

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.kind

    def pin_memory(self, tensor: Tensor, make_copy: bool = True) -> Tensor:
        """In page-locked memory, where there is a GPU to copy to."""
        return tensor if self.kind == "cpu" else tensor.pin_memory()

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        callback()


@cache
def get_accelerator() -> Accelerator:
    """That of the device that ranks compute on."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def OnDevice(
    dtype: torch.dtype, device: str = "meta", enabled: bool = True
) -> Iterator[None]:
    """What is made inside is on a device, floating-point tensors in a dtype."""
    before = torch.get_default_dtype()
    try:
        if enabled:
            torch.set_default_dtype(dtype)
        with torch.device(device) if enabled else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)
