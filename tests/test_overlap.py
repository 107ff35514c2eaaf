"""Overlap changes when collectives run, and no bit of what comes out."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from bench.fit import layers_of
from torch import Tensor, nn

from minizero import Overlap, Plan, Tracker, comm, parallelize
from minizero.comm import Call
from minizero.lab.measure import Step, timed_step
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.overlap.simulator import Buffer, Layer, Machine, Timeline, simulate
from minizero.ranks import Pool, rank
from minizero.zero import Action, DataParallel, Schedule

CONFIG = GPTConfig(layers=4, hidden=24, heads=2, sequence=16, vocabulary=50)
HUGE = 10**9
STEPS = 8  # in 6 the model uses its blocks in every order that it has
Settings = dict[str, int]


def settings(prefetch: int = HUGE, live: int = HUGE, persist: int = 0) -> Settings:
    return {
        "prefetch_bucket_size": prefetch,
        "max_live_parameters": live,
        "param_persistence_threshold": persist,
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def build(
    stage: int = 3,
    chosen: Settings | None = None,
    config: GPTConfig = CONFIG,
    **options: Any,
) -> DataParallel:
    torch.manual_seed(0)
    model = GPT(config)
    schedule = Schedule() if chosen is None else Overlap(**chosen)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = Plan.stage(stage)
    return parallelize(model, optimizer, plan, schedule=schedule, **options)


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(rank())
    return torch.randint(50, (1, 16), generator=generator)


def step(net: DataParallel) -> None:
    net.backward(net(tokens(), tokens()))
    net.step()


def second_step(
    stage: int, chosen: Settings | None, bucket_size: int = HUGE
) -> list[Call]:
    net = build(stage, chosen, bucket_size=bucket_size)
    step(net)
    with comm.ledger() as calls:
        step(net)
        if stage == 3:
            net.state_dict()  # waits for what the step has refreshed
    return [c for c in calls if c.phase]


def reductions(stage: int, chosen: Settings | None) -> list[bool]:
    """Whether each unit's reduction was still under way when the next was complete."""
    net, complete = build(stage, chosen), []
    ready = net.schedule.grads_ready

    def noted(unit: Any) -> Any:
        complete.append(time.perf_counter())
        return ready(unit)

    net.schedule.grads_ready = noted  # type: ignore[method-assign]
    with comm.ledger() as calls:
        step(net)
    reduced = [c for c in calls if c.phase == "backward" and "reduce" in c.op]
    return [
        c.launched < then < c.waited
        for c, then in zip(reduced, complete[1:], strict=False)
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reductions_are_under_way_until_the_next(two: Pool, stage: int) -> None:
    assert two.run(reductions, stage, settings()) == [[True] * CONFIG.layers] * 2
    assert two.run(reductions, stage, None) == [[False] * CONFIG.layers] * 2


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
    peaks = {name: nbytes // 4 for name, nbytes in tracker.peaks.items()}
    whole = peaks["parameters"] - shards
    largest = sorted(sum(f.padded for f in u.flats) for u in net.units)[-2:]
    root = sum(f.padded for f in net.units[0].flats)
    return whole, peaks["gradients"] - shards, root + sum(largest)


def test_live_parameters_never_exceed_the_limit(two: Pool) -> None:
    (_, root), (_, block), *_ = two.run(sizes)[0]
    peaks = {}
    for blocks in (1, 2, 3, 4):
        limit = root + blocks * block + 7
        for persist in (0, HUGE):
            for whole, *_ in two.run(watch, settings(live=limit, persist=persist)):
                assert whole <= limit
                peaks[blocks, persist] = whole
    # the limit is used: what fits is gathered ahead
    assert [peaks[n, 0] for n in (1, 2, 3)] == [root + n * block for n in (1, 2, 3)]


def test_prefetch_counts_elements_ahead(two: Pool) -> None:
    (_, root), (_, block), *_ = two.run(sizes)[0]
    for prefetch, most in ((0, 1), (block - 1, 1), (block, 2), (3 * block - 1, 3)):
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
    assert f"set it to {root + block:,} or more" in message
    assert "'blocks.0'" in message and "'root'" in message
    assert "make smaller units" in message


@pytest.mark.parametrize(
    "name, value",
    [
        ("prefetch_bucket_size", -1),
        ("max_live_parameters", 0),
        ("param_persistence_threshold", 1.5),
        ("prefetch_bucket_size", True),
    ],
)
def test_bad_settings_are_told(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} counts elements.*not {value!r}"):
        Overlap(**{name: value})


class NextInList(Schedule):
    """Also gathers the unit that follows in the list, and never releases it."""

    def attach(self, units: Any, plan: Plan) -> None:
        self.units = list(units)

    def needed(self, unit: Any) -> list[Action]:
        following = self.units[self.units.index(unit) + 1 :][:1]
        gathers = [Action("gather", u) for u in (unit, *following)]
        return [*gathers, Action("wait", unit)]


def trained(naive: bool) -> dict[str, Tensor]:
    net = build(3, None)
    if naive:
        net.schedule = NextInList()
        net.schedule.attach(net.units, net.plan)
    for _ in range(3):
        step(net)
    return net.state_dict()


def test_what_a_schedule_left_unsharded_is_gathered_again(two: Pool) -> None:
    """After an update its values are old."""
    expected, got = two.run(trained, False)[0], two.run(trained, True)[0]
    assert all(torch.equal(expected[name], got[name]) for name in expected)


# the simulator


def units_of(net: DataParallel) -> list[Layer]:
    return [
        Layer(u.name, [Buffer(f.padded) for f in u.flats], 0.003, 0.006, 0.001)
        for u in net.units
    ]


SIMULATED = [
    (stage, chosen, bucket)
    for stage in (0, 1, 2, 3)
    for chosen, bucket in (
        (None, HUGE),
        (settings(), 1000),
        (settings(prefetch=8000, persist=3000), HUGE),
    )
]


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
        schedule = Schedule() if chosen is None else Overlap(**chosen)
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
    block = [Buffer(2_000_000, itemsize=2)]
    layers = [Layer("root", [Buffer(root, itemsize=2)], 0, 0, update)]
    layers += [Layer(f"{i}", block[:], 3, 6, update) for i in range(5)]
    for layer in layers[1:]:
        layer.flats = [Buffer(2_000_000, itemsize=2)]
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


def measured(steps: int) -> tuple[list[Step], list[Layer]]:
    net = build(3)
    found = [timed_step(net, tokens(), tokens()) for _ in range(steps)]
    return found, layers_of(net, found)


def test_a_measured_step_is_computing_and_waiting(two: Pool) -> None:
    """The lane of a rank has no hole, and the units' times are no more than it."""
    found, layers = two.run(measured, 3)[0]
    for step in found:
        lane = [i for i in step.intervals() if i.lane == "compute"]
        assert sum(i.end - i.begin for i in lane) == pytest.approx(step.duration)
        waits = sum(i.end - i.begin for i in lane if i.what == "wait")
        assert waits == pytest.approx(step.exposed)
    assert [layer.name for layer in layers] == [name for name, _ in two.run(sizes)[0]]
    assert all(layer.forward >= 0 and layer.backward > 0 for layer in layers)
    spent = sum(layer.forward + layer.backward for layer in layers)
    assert spent < max(step.duration for step in found)
