"""The host's Adam: against DeepSpeed's, and against a copy of as many bytes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from bench.runner import Comparison, interleaved

# Fused AdamW reads a parameter, its gradient and two moments, and writes all but
# the gradient: seven times four bytes.
FLOATS_MOVED = 7
OURS = "fused AdamW"
BOUNDS = {"stream copy": 0.7, "DeepSpeed CPU Adam": 1.0}
# What one rank of 8 updates: GPT-2 medium's blocks, a shard a block, and as many
# elements in one shard. Both are far larger than a cache.
SHARDS = {"24 shards": (24, 12 * 1024**2 // 8), "1 shard": (1, 36 * 1024**2)}


def compare(repeats: int) -> list[Comparison]:
    """Elements that one update changes in a second, fp32, all cores."""
    results = []
    for name, (count, size) in SHARDS.items():
        cases, elements = _cases(count, size), count * size
        rates = {other: _rate(elements, step) for other, step in cases.items()}
        got = interleaved(rates, 5 * repeats, warmup=5)
        ours = got.pop(OURS)
        results += [
            Comparison(
                f"host Adam, {name}",
                "elements/s",
                OURS,
                other,
                ours,
                values,
                at_least=BOUNDS[other],
            )
            for other, values in got.items()
        ]
    return results


def _cases(count: int, size: int) -> dict[str, Callable[[], object]]:
    """What is timed; the two optimizers take turns on the same tensors."""
    shards = [torch.nn.Parameter(torch.rand(size)) for _ in range(count)]
    for shard in shards:
        shard.grad = torch.rand(size)
    fused = torch.optim.AdamW(shards, lr=1e-3, fused=True)
    fused.step()
    cases = {OURS: fused.step, "stream copy": _copy(count * size)}
    try:
        cases["DeepSpeed CPU Adam"] = _deepspeed(fused)
    except Exception as error:  # not installed, or its extension does not build
        print(f"no DeepSpeed: {type(error).__name__}: {error}", file=sys.stderr)
    return cases


def _deepspeed(twin: torch.optim.Optimizer) -> Callable[[], object]:
    """DeepSpeed's, over the same tensors; the first time it builds an extension."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    shards = twin.param_groups[0]["params"]
    optimizer = DeepSpeedCPUAdam(shards, lr=1e-3, weight_decay=1e-2)
    for shard in shards:
        moments = {k: v for k, v in twin.state[shard].items() if k != "step"}
        optimizer.state[shard] = {"step": 1, **moments}
    return optimizer.step


def _copy(elements: int) -> Callable[[], object]:
    """Moves as many bytes as the update: half of them read, half written."""
    source = torch.rand(elements * FLOATS_MOVED // 2)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _rate(elements: int, step: Callable[[], object]) -> Callable[[], float]:
    def case() -> float:
        start = time.perf_counter()
        step()
        return elements / (time.perf_counter() - start)

    return case
