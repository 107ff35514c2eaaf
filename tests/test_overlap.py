"""Overlap changes when collectives run, and no bit of what comes out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nasty import Nasty, Run, adamw, batches, groups, own, same, train
from torch import Tensor, nn

from minizero import comm, parallelize, zero
from minizero.lab.gpt import GPT, GPTConfig
from minizero.launch import Pool, rank, world_size
from minizero.ledger import Call
from minizero.memory import Plan
from minizero.overlap import Overlap, exposed
from minizero.seams import Schedule
from minizero.tracker import Tracker

CONFIG = GPTConfig(layers=4, hidden=24, heads=2, sequence=16, vocabulary=50)
HUGE = 10**9
Settings = dict[str, int]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    pools = {n: Pool(n) for n in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def two(pools: dict[int, Pool]) -> Pool:
    return pools[2]


def overlapped(stage: int, settings: Settings, **options: Any) -> Run:
    return train(stage, schedule=Overlap(**settings), **options)


def settings(prefetch: int = HUGE, live: int = HUGE, persist: int = 0) -> Settings:
    return {
        "prefetch_bucket_size": prefetch,
        "max_live_parameters": live,
        "param_persistence_threshold": persist,
    }


# The nasty model's units: the root has 336 elements, a block 680 and some padding.
CASES = [
    (0, 40, settings()),
    (1, 1000, settings()),
    (2, 40, settings()),
    (3, HUGE, {}),
    (3, 40, settings()),
    (3, HUGE, settings(prefetch=700)),
    (3, 300, settings(prefetch=1500, live=1900)),
    (3, HUGE, settings(persist=400)),
    (3, HUGE, settings(prefetch=0, live=1900, persist=HUGE)),
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_no_bit_changes(pools: dict[int, Pool], ranks: int) -> None:
    """Bucket, prefetch, live and persistence settings; every plan; 1 to 4 ranks."""
    pool = pools[ranks]
    reference = pool.run(train, 0)
    for stage, bucket_size, chosen in CASES if ranks in (2, 3) else CASES[::2]:
        got = pool.run(overlapped, stage, chosen, bucket_size=bucket_size)
        assert same(got, reference), f"stage {stage}, {bucket_size}, {chosen}"
