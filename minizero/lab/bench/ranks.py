"""Chapter 2: four ranks start in less than a second, once a first pool has been."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter

from minizero.lab.bench.runner import Comparison, interleaved
from minizero.ranks.launch import Pool

RANKS = 4


def _pool() -> float:
    start = perf_counter()
    with Pool(RANKS):
        return perf_counter() - start


def _interpreter() -> float:
    start = perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return perf_counter() - start


def compare(repeats: int) -> list[Comparison]:
    """Seconds until a pool's ranks have joined, against a second and an interpreter."""
    values = interleaved({"pool": _pool, "interpreter": _interpreter}, repeats)
    pool, fresh = values["pool"], values["interpreter"]
    name = f"{RANKS} ranks start"
    return [
        Comparison(name, "s", "pool", "1 s", pool, [1.0] * repeats, at_most=1.0),
        Comparison(name, "s", "pool", "one import of torch", pool, fresh, at_most=1.0),
    ]
