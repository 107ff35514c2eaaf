"""From tensors to kernels: where Triton runs, and what launches them."""

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
HAS_TRITON = find_spec("triton") is not None
launched: Counter[str] = Counter()  # the number of launches of each kernel, by name


def runs_on(*tensors: Tensor | None) -> bool:
    """Whether Triton's kernels work with these tensors.

    They share a device. On a CPU only where TRITON_INTERPRET=1 asks for
    Triton's slow interpreter.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    known = all(tensor.dtype in DTYPES for tensor in given)
    if not (HAS_TRITON and known):
        return False
    (on, *others) = {tensor.device for tensor in given}
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    kinds = ("cuda", "cpu") if interprets else ("cuda",)
    return not others and on.type in kinds


def launch(name: str, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run a kernel of `triton_kernels` on a grid of programs.

    The first of `args` is a tensor. Triton is imported now, not before.
    """
    if all(grid):
        launched[name] += 1
        kernels = import_module("minizero.kernels.triton_kernels")
        on = args[0].device
        with torch.cuda.device(on) if on.type == "cuda" else nullcontext():
            getattr(kernels, name)[grid](*args, **meta)
