"""Traces: what was recorded is in them exactly, and Perfetto's format is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import minizero
from minizero import NVMe, Offload, Overlap, Plan, comm, parallelize
from minizero.comm import Call
from minizero.lab.explorables.own import aligned
from minizero.lab.explorables.sources import LINES, PACKAGE, source, with_sources
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.memory.trace import LANES, Trace
from minizero.ranks import Pool

CONFIG = GPTConfig(layers=2, hidden=16, heads=2, sequence=8, vocabulary=32)

# of the Trace Event Format (Google 2016): what events of each kind have
FIELDS = {
    "X": {"tid", "ts", "cat", "dur"},
    "i": {"tid", "ts", "cat", "s"},
    "C": {"ts"},
    "M": set[str](),
}


def net_of(stage: int, on: str | None = None, folder: str | None = None) -> Any:
    plan = Plan.stage(stage, on, on)
    torch.manual_seed(0)
    model = GPT(CONFIG)
    storages = {"cpu": lambda: Offload(plan), "nvme": lambda: NVMe(plan, folder)}
    return parallelize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        plan,
        storage=storages[on]() if on else None,
        schedule=Overlap(param_persistence_threshold=0) if stage == 3 else None,
    )


def step(net: Any) -> None:
    x = torch.zeros(1, CONFIG.sequence, dtype=torch.int64)
    net.backward(net(x, x))
    net.step()


Recorded = tuple[Trace, list[Call], float, int, list[int], Trace]


def record(path: str | None = None, *where: Any) -> Recorded:
    """A step after the first, and what other instruments saw of it meanwhile."""
    net = net_of(*where)
    step(net)
    with comm.ledger() as calls, minizero.Tracker() as tracker:
        with minizero.trace(net, path) as run:
            step(net)
            peak = tracker.peak
    if hasattr(net.storage, "close"):
        net.storage.close()
    mine = calls[1:]  # but for its own start
    begin = run.trace.moments[0].time - run.shift
    first = sum(s.time < begin for s in tracker.samples)
    held = [sum(s.host.values()) for s in tracker.samples[max(first - 1, 0) :]]
    return run.trace, mine, run.shift, peak, held, aligned(run, path)


@pytest.fixture(scope="module")
def recorded(two: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("trace") / "run.json"
    return two.run(record, str(path), 3), json.loads(path.read_text())


# --- What was recorded ---


def test_slices_are_the_calls_of_the_ledger(recorded: Any) -> None:
    for trace, calls, shift, *_ in recorded[0]:
        found = [s for s in trace.slices if s.lane in ("gather", "reduce")]
        assert len(calls) > 8
        assert [
            (s.verb, s.unit, s.phase, s.nbytes, s.begin, s.end, s.call) for s in found
        ] == [
            (c.op, c.unit, c.phase, c.bytes, c.launched + shift, c.finished + shift, i)
            for i, c in enumerate(calls)
        ]


def test_counters_reach_the_measured_peak(recorded: Any) -> None:
    for r, (trace, _, _, peak, *_) in enumerate(recorded[0]):
        counters = [
            sum(event["args"].values())
            for event in recorded[1]["traceEvents"]
            if event["ph"] == "C" and event["pid"] == r and "device" in event["name"]
        ]
        assert max(counters) == trace.peak(r) == peak
        assert counters[-1] < peak


def test_what_a_rank_does_is_in_turn_and_complete(recorded: Any) -> None:
    for trace, *_ in recorded[0]:
        every = [s for s in trace.slices if s.lane == "compute"]
        own = [s for s in every if s.verb != "release"]
        for one, following in zip(own, own[1:], strict=False):
            assert one.end <= following.begin + 1e-12
        units = {s.unit for s in own if s.verb == "forward"}
        assert units == {s.unit for s in own if s.verb == "backward" and s.unit}
        assert {"launch", "wait", "update", "release"} <= {s.verb for s in every}
        waits = sum(s.end - s.begin for s in own if s.verb == "wait")
        assert 0 < waits < own[-1].end - own[0].begin


def test_simulated_step_stands_beside_the_recorded_one(recorded: Any) -> None:
    """It has the same calls, computes as long, and is one rank more in the file too."""
    (trace, *_, beside), (other, *_, plain) = recorded[0]
    step = [s for s in beside.slices if s.rank == 2]
    assert len(trace.slices) + len(step) == len(beside.slices)
    assert len(plain.slices) == len(other.slices)
    calls, simulated = (
        sorted((s.verb, s.unit, s.nbytes) for s in slices if s.call >= 0)
        for slices in (trace.slices, step)
    )
    assert calls == simulated
    for verb in ("forward", "backward", "update"):
        one, two = (
            sum(s.end - s.begin for s in slices if s.verb == verb)
            for slices in (trace.slices, step)
        )
        assert one == pytest.approx(two)
    told = [e["args"] for e in recorded[1]["traceEvents"] if e["ph"] == "M"]
    names = {args.get("name") for args in told}
    assert names >= {"rank 0", "rank 1", "simulated"}


def test_file_is_a_trace_that_perfetto_opens(recorded: Any) -> None:
    chrome = recorded[1]
    assert chrome.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    threads: dict[tuple[int, int], list[Any]] = {}
    for event in chrome["traceEvents"]:
        assert {"name", "pid", "args"} | FIELDS[event["ph"]] <= event.keys()
        if event["ph"] == "X":
            assert event["dur"] > 0 and event["cat"] in LANES
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(threads) >= 6
    assert all(tid not in (0, pid) for pid, tid in threads)
    for slices in threads.values():  # none reaches into another
        for a, b in zip(slices, slices[1:], strict=False):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6


@pytest.mark.parametrize("on", ["cpu", "nvme"])
def test_copies_are_in_it(two: Pool, on: str, tmp_path: Path) -> None:
    lane = {"cpu": "to host", "nvme": "to disk"}[on]
    runs = two.run(record, None, 3, on, str(tmp_path))
    for r, (trace, *_, held, _) in enumerate(runs):
        copies = [s for s in trace.slices if s.lane == lane]
        assert copies and all(s.nbytes > 0 and s.end > s.begin for s in copies)
        assert {s.unit for s in copies} >= {"blocks.0", "blocks.1"}
        # a write of the step before may end just before the trace begins
        assert trace.peak(r, "host") in (max(held), max(held[1:]))


def test_every_source_is_a_line_of_its_file(recorded: Any) -> None:
    for name, (_, start) in LINES.items():
        unit = name if name == "gradient norm" else ""
        operation, _, phase = name.partition(" ")
        path, function, text = source(operation, unit, phase).split("#", 2)
        lines = (PACKAGE.parent / path).read_text().splitlines()
        assert text.startswith(start), name
        assert any(one.strip() == text for one in lines)
        assert any(f"def {function.rpartition('.')[2]}(" in one for one in lines)
    for trace, *_ in recorded[0]:
        assert all(s.source for s in with_sources(trace).slices)
