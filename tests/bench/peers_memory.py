"""Side by side: memory of a step here, under DDP and FSDP2, and under DeepSpeed."""

from __future__ import annotations

from bench.peers import compare_memory
from bench.runner import Comparison


def compare(repeats: int) -> list[Comparison]:
    """Bytes do not depend on the machine's load: they are measured once."""
    return compare_memory()
