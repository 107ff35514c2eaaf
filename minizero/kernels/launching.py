"""Where Triton's kernels run, and how many were launched."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

launched: Counter[str] = Counter()
"""How often each kernel was launched in this process, by its name."""


def runs_on(*tensors: Tensor | None) -> bool:
    """Whether Triton's kernels work with these tensors, which share a device.

    On a CPU only where TRITON_INTERPRET=1 asks for Triton's slow interpreter.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if find_spec("triton") is None or any(t.dtype not in DTYPES for t in given):
        return False
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    devices = {tensor.device for tensor in given}
    return len(devices) == 1 and (given[0].is_cuda or (interprets and given[0].is_cpu))


def launch(name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel of `triton_kernels` on a grid of programs.

    The first argument is a tensor. Triton is imported now, if it has not been yet.
    """
    if all(grid):
        launched[name] += 1
        like, kernels = arguments[0], import_module(".triton_kernels", __package__)
        with torch.cuda.device(like.device) if like.is_cuda else nullcontext():
            getattr(kernels, name)[grid](*arguments, **constants)
