"""Measured bytes and counted calls equal their formulas, exactly."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

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


Measured = list[list[dict[str, Any]]]  # by stage and rank


@pytest.fixture(scope="module")
def measured(pool: Pool) -> Measured:
    return [pool.run(measure, stage) for stage in range(4)]


@pytest.mark.parametrize("stage", range(4))
def test_bytes_between_steps(measured: Measured, stage: int) -> None:
    ranks = len(measured[stage])
    for seen in measured[stage]:
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


def test_peak_of_stage_3(measured: Measured) -> None:
    """Parameters and gradients: their shards and two units each, no more."""
    for seen in measured[3]:
        two_largest = sum(seen["units"][-2:])
        for category in ("parameters", "gradients"):
            shard = seen["live"][category]
            assert seen["peaks"][category] <= shard + two_largest


SCATTERED = ("backward", "reduce_scatter")
SENT = {  # in sizes of the model, and when
    0: (2, {("backward", "all_reduce")}),
    1: (2, {SCATTERED, ("step", "all_gather")}),
    2: (2, {SCATTERED, ("step", "all_gather")}),
    3: (3, {SCATTERED, ("forward", "all_gather"), ("backward", "all_gather")}),
}


@pytest.mark.parametrize("stage", SENT)
def test_elements_sent(measured: Measured, stage: int) -> None:
    times, ops = SENT[stage]
    ranks = len(measured[stage])
    for seen in measured[stage]:
        assert seen["total"] == times * seen["padded"] * (ranks - 1) / ranks
        assert set(seen["sent"]) == ops


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
