"""Where Triton's kernels run, and how many were launched."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

launched: Counter[str] = Counter()
"""How often each kernel was launched in this process, by its name."""


def _interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 asks Triton to interpret kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return False
    import triton

    # Triton's own functions became compiled or interpreted ones at its import
    if isinstance(triton.language.sum, triton.JITFunction):
        raise RuntimeError(
            "TRITON_INTERPRET=1 came after the import of triton, which reads it "
            "then; set it before the program starts"
        )
    return True


def runs_on(tensor: Tensor) -> bool:
    """Whether Triton's kernels work where `tensor` is.

    Compiled on a GPU; elsewhere only if TRITON_INTERPRET=1 asks for Triton's
    interpreter, which is for checking them: it takes milliseconds a block.
    """
    if tensor.is_cuda:
        return find_spec("triton") is not None
    return tensor.device.type == "cpu" and _interpreted()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on a grid of programs; the first argument is a tensor."""
    if all(grid):
        launched[kernel.__name__] += 1
        like = arguments[0]
        with torch.cuda.device(like.device) if like.is_cuda else nullcontext():
            kernel[grid](*arguments, **constants)


def check(name: str, instead: str, **tensors: Tensor | None) -> None:
    """Raise ValueError for a dtype or devices that no kernel here works with."""
    given = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    for key, tensor in given.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} takes float32, bfloat16 or float16, but {key} is "
                f"{str(tensor.dtype).removeprefix('torch.')}; use {instead}"
            )
    devices = {key: tensor.device for key, tensor in given.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{key} on {device}" for key, device in devices.items())
        raise ValueError(f"{name} works on one device, not {where}; move them")
