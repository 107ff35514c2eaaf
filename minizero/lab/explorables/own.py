"""A recorded step beside the simulated one of its plan: what a timeline compares."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from minizero.engine.recording import Recording
from minizero.lab.explorables.sources import with_sources
from minizero.lab.explorables.steps import drawn
from minizero.memory.trace import Slice, Trace
from minizero.overlap import Overlap
from minizero.overlap.simulator import Buffer, Layer, Machine, simulate
from minizero.ranks import rank, world_size
from minizero.zero import Schedule


def aligned(run: Recording, path: str | Path | None = None) -> Trace:
    """The recorded step of this rank; on rank 0 with the simulated one, as a rank more.

    run: what `minizero.trace` gave around one step of one micro-batch. path: the file
    that it has written, to which the simulated step is added, for Perfetto and the
    timeline of any page of the book.

    Units compute as long as they did here; a call takes as long as its bytes do at the
    rate of the fastest. So what is left of a gap in the simulated step belongs to the
    plan and the link, and what is not was lost on the way.
    """
    both = with_sources(run.trace)
    if rank():
        return both
    mine, net, ranks = run.trace.slices, run.net, world_size()
    old, schedule = net.schedule, Schedule()
    if isinstance(old, Overlap):
        limits = old.prefetch_bucket_size, old.max_live_parameters
        schedule = Overlap(*limits, old.param_persistence_threshold)
    line = simulate(
        layers(run, mine), machine(mine), net.plan, schedule, net.bucket_size
    )
    begin = min(s.begin for s in mine if s.verb == "forward")
    begin -= min(i.begin for i in line.intervals if i.what == "forward")
    slices = [
        s._replace(rank=ranks, begin=s.begin + begin, end=s.end + begin)
        for s in drawn(line, net.plan)
    ]
    if path is not None:
        whole = json.loads(Path(path).read_text())
        whole["traceEvents"] += Trace(ranks, slices).chrome()["traceEvents"]
        Path(path).write_text(json.dumps(whole))
    return Trace(both.ranks, both.slices + slices, both.moments)


def layers(run: Recording, mine: list[Slice]) -> list[Layer]:
    """The units with the seconds that this rank computed for each."""
    net, took = run.net, defaultdict[tuple[str, str], float](float)
    turn = min(s.begin for s in mine if s.verb == "backward")
    for s in mine:  # a forward that runs in the backward recomputes
        verb = "backward" if s.verb == "forward" and s.begin > turn else s.verb
        took[verb, s.unit] += s.end - s.begin
    root, *_ = net.units
    took["backward", root.name] += took["backward", ""] * bool(root.name)
    elements = {unit: sum(f.padded for f in unit.trainable) for unit in net.units}
    update = took["update", ""] / sum(elements.values())
    update *= world_size() if net.plan.optimizer.sharded else 1
    return [
        Layer(
            unit.name,
            [Buffer(f.padded, f.full.itemsize, f.trainable) for f in unit.flats],
            took["forward", unit.name],
            took["backward", unit.name],
            update * elements[unit],
        )
        for unit in net.units
    ]


def machine(mine: list[Slice]) -> Machine:
    """The link, bus and disk at the rate of their fastest transfer of this rank."""

    def fastest(*lanes: str) -> float:
        moved = [s for s in mine if s.lane in lanes and s.nbytes and s.end > s.begin]
        rates = (s.nbytes / (s.end - s.begin) for s in moved)
        return max(rates, default=float("inf"))

    launches = [s.end - s.begin for s in mine if s.verb == "launch"]
    handling = sum(launches) / max(1, len(launches))
    bus, disk = fastest("to host"), fastest("to disk")
    link = fastest("gather", "reduce")
    return Machine(world_size(), 0.0, link, handling, bus=bus, disk=disk)
