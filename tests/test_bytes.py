"""Measured bytes and counted calls equal their formulas, exactly."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from minizero import Plan, Tracker, comm, estimate, parallelize
from minizero.lab.models.gpt import GPT, GPTConfig, count_parameters
from minizero.ranks import Pool, device

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
            # of steps, which are on the host where this optimizer runs on a GPU
            "counters": 4 * len(net.trained) * (device().type == "cpu"),
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
        assert seen["live"]["parameters"] == formula.parameters
        assert seen["live"]["gradients"] == formula.gradients
        assert seen["live"]["optimizer"] == formula.optimizer + seen["counters"]
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
