"""The host's Adam: against DeepSpeed's, and against a copy of as many bytes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from minizero.lab.bench.runner import Comparison, interleaved

# Fused AdamW reads a parameter, its gradient and two moments, and writes all but
# the gradient: seven times four bytes.
FLOATS_MOVED = 7
# What one rank of 8 updates: GPT-2 medium's blocks, a shard a block, and as many
# elements in one shard. Both are far larger than a cache.
SHARDS = {"24 shards": (24, 12 * 1024**2 // 8), "1 shard": (1, 36 * 1024**2)}


def compare(repeats: int) -> list[Comparison]:
    """Elements that one update changes in a second, fp32, all cores."""
    results = []
    for name, (count, size) in SHARDS.items():
        cases = {
            "fused AdamW": _rate(count * size, _fused(count, size)),
            "stream copy": _rate(count * size, _copy(count * size)),
        }
        try:
            cases["DeepSpeed CPU Adam"] = _rate(count * size, _deepspeed(count, size))
        except Exception as error:  # not installed, or its extension does not build
            print(f"no DeepSpeed: {type(error).__name__}: {error}", file=sys.stderr)
        got = interleaved(cases, repeats, warmup=2)
        ours = got.pop("fused AdamW")
        bounds = {"stream copy": 0.7, "DeepSpeed CPU Adam": 1.0}
        results += [
            Comparison(
                f"host Adam, {name}",
                "elements/s",
                "fused AdamW",
                other,
                ours,
                values,
                at_least=bounds[other],
            )
            for other, values in got.items()
        ]
    return results


def _rate(elements: int, step: Callable[[], object]) -> Callable[[], float]:
    def case() -> float:
        start = time.perf_counter()
        for _ in range(5):
            step()
        return 5 * elements / (time.perf_counter() - start)

    return case


def _shards(count: int, size: int) -> list[Tensor]:
    shards = [torch.rand(size) for _ in range(count)]
    for shard in shards:
        shard.grad = torch.rand(size)
    return shards


def _fused(count: int, size: int) -> Callable[[], object]:
    return torch.optim.AdamW(_shards(count, size), lr=1e-3, fused=True).step


def _deepspeed(count: int, size: int) -> Callable[[], object]:
    """DeepSpeed's, with the same options; builds an extension the first time."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    shards = [torch.nn.Parameter(torch.rand(size)) for _ in range(count)]
    for shard in shards:
        shard.grad = torch.rand(size)
    return DeepSpeedCPUAdam(shards, lr=1e-3, weight_decay=1e-2).step


def _copy(elements: int) -> Callable[[], object]:
    """Moves as many bytes as the update: half of them read, half written."""
    source = torch.rand(elements * FLOATS_MOVED // 2)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
