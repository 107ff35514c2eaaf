"""Overlap changes when collectives run, and no bit of what comes out."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from minizero import Overlap, Plan, Tracker, comm, parallelize
from minizero.comm import Call
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.overlap.simulator import Buffer, Layer, Machine, Timeline, simulate
from minizero.ranks import Pool, rank
from minizero.zero import DataParallel, Schedule

CONFIG = GPTConfig(layers=4, hidden=24, heads=2, sequence=16, vocabulary=50)
HUGE = 10**9
Settings = tuple[int, int, int]


def settings(prefetch: int = HUGE, live: int = HUGE, persist: int = 0) -> Settings:
    return prefetch, live, persist


def build(
    stage: int = 3,
    chosen: Settings | None = None,
    config: GPTConfig = CONFIG,
    **kw: Any,
) -> DataParallel:
    torch.manual_seed(0)
    model = GPT(config)
    schedule = Schedule() if chosen is None else Overlap(*chosen)
    optimizer = torch.optim.AdamW(model.parameters())
    return parallelize(model, optimizer, Plan.stage(stage), schedule=schedule, **kw)


def tokens() -> Tensor:
    return torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(rank()))


def step(net: DataParallel) -> None:
    net.backward(net(tokens(), tokens()))
    net.step()


def second_step(stage: int, chosen: Settings | None, size: int = HUGE) -> list[Call]:
    net = build(stage, chosen, bucket_size=size)
    step(net)
    with comm.ledger() as calls:
        step(net)
        if stage == 3:
            net.state_dict()  # waits for what the step has refreshed
    return [c for c in calls if c.phase]


def sizes() -> list[tuple[str, int]]:
    """Name and padded elements of each unit."""
    return [(u.name, sum(f.padded for f in u.flats)) for u in build().units]


def test_what_is_kept_is_gathered_once(two: Pool) -> None:
    """After the update; what is not kept is gathered twice."""
    units = dict(two.run(sizes)[0])
    smallest = min(units, key=lambda name: units[name])
    chosen = settings(persist=units[smallest] + 1)
    for calls in two.run(second_step, 3, chosen):
        gathers = [(c.unit, c.phase) for c in calls if c.op == "all_gather"]
        expected = [(smallest, "step")]
        for name in units.keys() - {smallest}:
            expected += [(name, "forward"), (name, "backward")]
        assert sorted(gathers) == sorted(expected)


def watch(chosen: Settings) -> tuple[int, int, int]:
    """Peak of gathered elements, gradients' peak, and what three units have."""
    gc.collect()
    net = build(3, chosen)
    step(net)
    shards = sum(f.size for u in net.units for f in u.flats)
    with Tracker() as tracker:
        step(net)
        step(net)
    whole = tracker.peaks["parameters"] // 4 - shards
    largest = sorted(sum(f.padded for f in u.flats) for u in net.units)[-2:]
    root = sum(f.padded for f in net.units[0].flats)
    return whole, tracker.peaks["gradients"] // 4 - shards, root + sum(largest)


def test_prefetch_counts_elements_ahead(two: Pool) -> None:
    (_, root), (_, block), *_ = two.run(sizes)[0]
    for prefetch, most in ((block - 1, 1), (block, 2), (3 * block - 1, 3)):
        for whole, *_ in two.run(watch, settings(prefetch=prefetch)):
            assert whole == root + most * block


def test_gradients_under_way_are_bounded(two: Pool) -> None:
    """One unit's are reduced, one's are formed, and the root's wait for the end."""
    for _, gradients, bound in two.run(watch, settings()):
        assert gradients <= bound


def too_small(limit: int) -> str:
    net = build(3, settings(live=limit))
    with pytest.raises(ValueError) as error:
        step(net)
    return str(error.value)


def test_units_that_do_not_fit_are_told(two: Pool) -> None:
    (_, root), (_, block), *_ = two.run(sizes)[0]
    message = two.run(too_small, root + block - 1)[0]
    parts = f"to {root + block:,} or more", "'blocks.0'", "'root'", "smaller units"
    assert all(part in message for part in parts)


def test_what_a_shorter_pass_has_left_is_freed() -> None:
    layers = [Layer(name, [Buffer(10)], 1, 2) for name in "abc"]
    overlap = Overlap(*settings())
    overlap.attach(layers, Plan.stage(3))
    for _ in range(2):
        overlap.pass_begins("forward")
        actions = overlap.needed(layers[0])
        overlap.done(layers[0])
    assert [a.unit.name for a in actions if a.operation == "release"] == ["b", "c"]


def operations(units: int, chosen: Settings) -> int:
    """Bytecodes of Overlap in a simulated step of a model of this many units."""
    layers, count = [Layer(f"{i}", [Buffer(10)], 1, 2, 0) for i in range(units)], 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "opcode" and "schedule.py" in frame.f_code.co_filename
        frame.f_trace_opcodes = True
        return trace

    sys.settrace(trace)
    simulate(layers, Machine(2, 0.0, 1e6), Plan.stage(3), Overlap(*chosen))
    sys.settrace(None)
    return count


def test_cost_grows_linearly_with_units() -> None:
    for chosen in (settings(), settings(25), settings(25, 60), settings(persist=100)):
        assert operations(200, chosen) < 4.2 * operations(50, chosen)


def test_bad_settings_are_told() -> None:
    bad = [("prefetch_bucket_size", -1), ("max_live_parameters", 0)]
    bad += [("param_persistence_threshold", 1.5), ("prefetch_bucket_size", True)]
    for name, value in bad:
        with pytest.raises(ValueError, match=f"{name} counts elements.*not {value!r}"):
            Overlap(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contention"):
        Machine(2, 0.0, 1.0, contention=1.0)


# the simulator


def units_of(net: DataParallel) -> list[Layer]:
    return [
        Layer(u.name, [Buffer(f.padded) for f in u.flats], 0.003, 0.006, 0.001)
        for u in net.units
    ]


CHOSEN: Any = (None, HUGE), (settings(), 1000), (settings(8000, persist=3000), HUGE)
SIMULATED = [(stage, *chosen) for stage in (0, 1, 2, 3) for chosen in CHOSEN]


def real_and_simulated() -> list[tuple[Any, Any]]:
    results = []
    for stage, chosen, bucket in SIMULATED:
        net = build(stage, chosen, bucket_size=bucket)
        step(net)
        gc.collect()
        with Tracker() as tracker, comm.ledger() as calls:
            step(net)
        shards = sum(f.size for u in net.units for f in u.flats) if stage == 3 else 0
        whole = tracker.peaks["parameters"] // 4 - shards if stage == 3 else 0
        machine = Machine(2, 1e-4, 1e9)
        schedule = Schedule() if chosen is None else Overlap(*chosen)
        line = simulate(units_of(net), machine, Plan.stage(stage), schedule, bucket)
        seen = [(c.op, c.unit) for c in calls]
        sent = [(i.what, i.unit) for i in line.intervals if i.lane == "link"]
        results.append(((seen, whole), (sent, line.most_live)))
        del net
    return results


def test_the_simulator_makes_the_calls_that_ranks_make(two: Pool) -> None:
    """The same, in the same order, and as many elements whole, in every setting."""
    results = two.run(real_and_simulated)[0]
    for case, (real, simulated) in zip(SIMULATED, results, strict=True):
        assert real == simulated, case


def line(
    schedule: Any, stage: int = 3, root: int = 0, update: float = 0.0, **machine: float
) -> Timeline:
    """Root and 5 blocks; a block moves in 2 s, is computed in 3 s and 6 s."""
    layers = [Layer("root", [Buffer(root, itemsize=2)], 0, 0, update)]
    for i in range(5):
        layers.append(Layer(f"{i}", [Buffer(2_000_000, itemsize=2)], 3, 6, update))
    facts: dict[str, Any] = {"latency": 0.0, "bandwidth": 1e6} | machine
    return simulate(layers, Machine(2, **facts), Plan.stage(stage), schedule)


def test_simulated_times_are_those_worked_out_by_hand() -> None:
    at_once = line(Schedule())
    # 5 blocks: gather and compute; gather, compute and reduce
    assert at_once.duration == pytest.approx(5 * (2 + 3) + 5 * (2 + 6 + 2))
    assert at_once.exposed == pytest.approx(30)
    early = line(Overlap(param_persistence_threshold=0))
    # the first gather of each pass has nothing to hide behind, nor has the last
    # reduction; the last gather of forward was used first in backward, and is gone
    assert early.duration == pytest.approx(45 + 2 + 2 + 2)
    assert early.exposed == pytest.approx(6)
    # the last reductions, block 0's and the root's, are waited for; then comes this
    # rank's half of the update, and six units are published
    late = line(Overlap(), stage=2, root=2_000_000, update=4.0)
    assert late.duration == pytest.approx(45 + 2 * 2 + 6 * 4 / 2 + 6 * 2)
    assert line(Schedule(), latency=1.0).duration == pytest.approx(75 + 15)
    assert line(Schedule(), stage=2).duration == pytest.approx(45 + 10 + 10)
    slow = line(Overlap(param_persistence_threshold=0), contention=0.5)
    # 24 s of transfers beside computation, each second of which costs half a one
    assert slow.duration == pytest.approx(51 + 12)
    bound = line(Overlap(param_persistence_threshold=0), bandwidth=1e5)
    assert bound.duration == pytest.approx(15 * 20 + 3 + 6, rel=0.03)
