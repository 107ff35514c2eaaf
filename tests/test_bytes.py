"""Measured bytes and counted calls equal their formulas, exactly."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from minizero import Plan, Tracker, comm, estimate, parallelize
from minizero.lab.models.gpt import GPT, GPTConfig, count_parameters
from minizero.ranks import Pool, world_size

CONFIG = GPTConfig(layers=3, hidden=24, heads=2, sequence=16, vocabulary=50)
STATE = ("parameters", "gradients", "optimizer")


def measure(stage: int, steps: int = 2) -> dict[str, object]:
    """Train a GPT with the tracker and the ledger on; what they saw."""
    plan = Plan.stage(stage)
    gc.collect()  # models of tests before, which hang in reference cycles
    with Tracker() as tracker:
        model = GPT(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters())
        net = parallelize(model, optimizer, plan)
        x = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(1))
        with comm.ledger() as calls:
            for _ in range(steps):
                loss = net(x, x)
                net.backward(loss)
                net.step()
                del loss
        live = dict(tracker.live)
        sizes = sorted(4 * sum(f.padded for f in u.flats) for u in net.units)
        return {
            "live": {c: live[c] for c in STATE},
            "peaks": dict(tracker.peaks),
            "peak": tracker.peak,
            "padded": sum(flat.padded for flat in net.flats),
            "masters": sum(len(g["params"]) for g in optimizer.param_groups),
            "units": sizes,
            "sent": {(c.phase, c.op): calls.sent(c.op, c.phase) / steps for c in calls},
            "total": sum(c.sent for c in calls) / steps,
            "stray": live["activations"],
        }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_between_steps(pool: Pool, stage: int) -> None:
    results = pool.run(measure, stage)
    ranks = len(results)
    for seen in results:
        formula = estimate(seen["padded"], ranks, stage, precision="fp32")
        counters = 4 * seen["masters"]
        assert seen["live"]["parameters"] == formula.parameters
        assert seen["live"]["gradients"] == formula.gradients
        assert seen["live"]["optimizer"] == formula.optimizer + counters
        # the batch and nothing else is left over
        assert seen["stray"] <= 2 * 16 * 8 + 64
        # padding is less than one row of N elements for each flat buffer
        units = len(seen["units"])
        assert 0 <= seen["padded"] - count_parameters(CONFIG) < units * ranks


def test_peak_of_stage_3(pool: Pool) -> None:
    """Parameters and gradients: their shards and two units each, no more."""
    for seen in pool.run(measure, 3):
        two_largest = sum(seen["units"][-2:])
        for category in ("parameters", "gradients"):
            shard = seen["live"][category]
            assert seen["peaks"][category] <= shard + two_largest


FACTOR = {0: 2, 1: 2, 2: 2, 3: 3}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_elements_sent(pool: Pool, stage: int) -> None:
    results = pool.run(measure, stage)
    ranks = len(results)
    for seen in results:
        assert seen["total"] == FACTOR[stage] * seen["padded"] * (ranks - 1) / ranks


def test_what_is_sent_when(pool: Pool) -> None:
    def ops(stage: int) -> set[tuple[str, str]]:
        return set(pool.run(measure, stage)[0]["sent"])

    assert ops(0) == {("backward", "all_reduce")}
    scattered = ("backward", "reduce_scatter")
    assert ops(1) == ops(2) == {scattered, ("step", "all_gather")}
    gathers = {("forward", "all_gather"), ("backward", "all_gather")}
    assert ops(3) == {scattered, *gathers}


def count_gathers(checkpoint: bool) -> int:
    torch.manual_seed(0)
    model = GPT(replace(CONFIG, checkpoint=checkpoint))
    net = parallelize(model, torch.optim.AdamW(model.parameters()))
    x = torch.randint(50, (1, 16))
    with comm.ledger() as calls:
        net.backward(net(x, x))
    return len(calls.select("all_gather"))


def test_checkpointing_gathers_no_more_often(pool: Pool) -> None:
    plain = pool.run(count_gathers, False)
    assert plain == [2 * (CONFIG.layers + 1)] * len(plain)
    assert pool.run(count_gathers, True) == plain


def count_reductions(bucket_size: int) -> tuple[int, int]:
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    net = parallelize(model, optimizer, Plan.stage(2), bucket_size=bucket_size)
    x = torch.randint(50, (1, 16))
    with comm.ledger() as calls:
        net.backward(net(x, x))
    width = bucket_size // world_size()
    expected = sum(-(-flat.size // width) for flat in net.flats)
    assert max(c.elements for c in calls) <= bucket_size
    return len(calls), expected


@pytest.mark.parametrize("bucket_size", [1000, 10**9])
def test_calls_follow_the_bucket_size(pool: Pool, bucket_size: int) -> None:
    for calls, expected in pool.run(count_reductions, bucket_size):
        assert calls == expected
