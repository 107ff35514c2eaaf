"""Kernels: bytes that have to move, by time, against what a copy moves.

The bytes are the floor of the operation, whatever a case really moves; so each ratio is
the share of the bandwidth limit that it reaches. Kernels of Triton are timed on a GPU
only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.runner import Comparison, interleaved
from minizero import kernels
from minizero.kernels import FusedAdam

TENSORS = 256
"""Parameters of the model that is updated tensor by tensor."""


def compare(repeats: int) -> list[Comparison]:
    """Bytes a second of every way to do each operation, and of a copy."""
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    results: list[Comparison] = []
    elements = 2**26 if gpu else 2**22
    for name, tensors in (("1 tensor", 1), (f"{TENSORS} tensors", TENSORS)):
        floor = 28 * elements
        cases = _adams(elements, tensors, device)
        results += _against_copy(f"Adam, {name}", floor, cases, repeats, device)
    rows, width = (2**14, 4096) if gpu else (2**11, 1024)
    dtype = torch.bfloat16 if gpu else torch.float32
    x = torch.randn(rows, width, device=device, dtype=dtype)
    for name in ("layer_norm", "rms_norm"):
        cases = _norms(name, x)
        label = f"{name}, forward and backward"
        results += _against_copy(label, 5 * x.nbytes, cases, repeats, device)
    rows, width = (2**12, 2**17) if gpu else (2**8, 2**14)
    x = torch.randn(rows, width, device=device, dtype=dtype)
    label = "cross_entropy, forward and backward"
    results += _against_copy(label, 3 * x.nbytes, _losses(x), repeats, device)
    return results


Cases = dict[str, Callable[[], object]]


def _adams(elements: int, tensors: int, device: str) -> Cases:
    size = elements // tensors

    def params() -> list[nn.Parameter]:
        made = [nn.Parameter(torch.rand(size, device=device)) for _ in range(tensors)]
        for p in made:
            p.grad = torch.rand_like(p)
        return made

    adamw = torch.optim.AdamW
    made: dict[str, torch.optim.Optimizer] = {
        "for loop": adamw(params(), foreach=False),
        "foreach": adamw(params(), foreach=True),
        "fused=True": adamw(params(), fused=True),
    }
    cases: Cases = {name: optimizer.step for name, optimizer in made.items()}
    if device == "cuda":
        cases["FusedAdam"] = FusedAdam(params(), weight_decay=0.01).step
    if tensors == 1:
        step = adamw(params(), foreach=True, capturable=device == "cuda").step
        cases |= _if_it_compiles(torch.compile(step))
    return cases


def _if_it_compiles(work: Callable[[], object]) -> Cases:
    """What torch.compile made, after its first call; {} where it has no compiler."""
    try:
        work()
    except Exception as error:
        print(f"no torch.compile: {str(error).splitlines()[0]}", file=sys.stderr)
        return {}
    return {"compiled": work}


def _norms(name: str, x: Tensor) -> Cases:
    x = x.requires_grad_()
    weight = nn.Parameter(torch.ones(x.shape[-1], device=x.device, dtype=x.dtype))
    dy = torch.randn_like(x)

    def both(norm: Callable[[Tensor, Tensor], Tensor]) -> None:
        torch.autograd.grad(norm(x, weight), (x, weight), dy)

    def torchs(x: Tensor, weight: Tensor) -> Tensor:
        return getattr(F, name)(x, x.shape[-1:], weight, eps=1e-5)

    return _torch_and_ours(both, torchs, partial(getattr(kernels, name), eps=1e-5))


def _losses(x: Tensor) -> Cases:
    x = x.requires_grad_()
    target = torch.randint(x.shape[1], (len(x),), device=x.device)

    def both(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        torch.autograd.grad(loss(x, target), x)

    return _torch_and_ours(both, F.cross_entropy, kernels.cross_entropy)


def _torch_and_ours(
    both: Callable[[Any], None], torchs: Callable[..., Tensor], ours: Any
) -> Cases:
    """Forward and backward: torch's operators, those compiled, the kernels here."""
    cases: Cases = {"torch": lambda: both(torchs)}
    work = torch.compile(torchs)
    cases |= _if_it_compiles(lambda: both(work))
    if torch.cuda.is_available():
        cases["kernels"] = lambda: both(ours)
    return cases


def _against_copy(
    name: str, floor: int, cases: Cases, repeats: int, device: str
) -> list[Comparison]:
    source = torch.empty(floor // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed = {**cases, "copy": lambda: target.copy_(source)}
    rates = {case: _rate(floor, work, device) for case, work in timed.items()}
    got = interleaved(rates, repeats, warmup=2)
    copies = got.pop("copy")
    # of many tensors Python's launches take the time, not memory
    flat = device == "cuda" and name == "Adam, 1 tensor"
    least = {"FusedAdam": 0.8} if flat else {}
    return [
        Comparison(name, "bytes/s", case, "copy", values, copies, least.get(case))
        for case, values in got.items()
    ]


def _rate(nbytes: int, work: Callable[[], object], device: str) -> Callable[[], float]:
    """Bytes that have to move, by the seconds of a call."""

    def on_gpu() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            work()
        end.record()
        end.synchronize()
        return 10 * nbytes / (1e-3 * start.elapsed_time(end))

    def on_cpu() -> float:
        start = time.perf_counter()
        work()
        return nbytes / (time.perf_counter() - start)

    return on_gpu if device == "cuda" else on_cpu
