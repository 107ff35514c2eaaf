"""The steps that the timeline shows: simulated for every setting, and a recorded one.

Simulated: four A100s, each in a host of its own, train four blocks of a 7-billion model
in bf16. The schedules are those that train, and the seconds those of chapter 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import NamedTuple

import torch

import minizero
from minizero.lab.explorables.sources import source, with_sources
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.memory.plan import PRECISIONS, Plan
from minizero.memory.trace import Change, Moment, Slice, Trace
from minizero.overlap import Overlap
from minizero.overlap.simulator import Interval, Layer, Machine, Timeline, simulate
from minizero.scale.cost import Candidate, Costs, Job, layers_of
from minizero.scale.machines import A100, ADAM, BUS, STREAM, bus
from minizero.scale.shapes import Shape
from minizero.zero import Schedule

SHAPE = Shape(layers=4, hidden=4096, heads=32, vocab=32_000)
RANKS, SEQUENCE, TOKENS = 4, 2048, 8192
OFFLOADS = {"none": None, "host": "cpu", "disk": "nvme"}
TICK = 1e-5
"""Seconds: the unit of the simulated times that go into a page."""


class Setting(NamedTuple):
    """A plan and how it is carried out; see `Timeline`."""

    stage: int
    overlap: bool = False
    prefetch: bool = False
    offload: str = "none"
    checkpointing: bool = False
    micro_batches: int = 1

    @property
    def key(self) -> str:
        flags = "".join(str(int(x)) for x in (self.overlap, self.prefetch))
        how = f"{self.offload[0]}{int(self.checkpointing)}{self.micro_batches}"
        return f"{self.stage}{flags}{how}"

    @property
    def plan(self) -> Plan:
        on = OFFLOADS[self.offload]
        return Plan.stage(self.stage, on, on if self.stage == 3 else None)

    def schedule(self, size: Size) -> Schedule:
        """All reductions beside computation, and parameters a block ahead."""
        most = size.shape.block + size.ranks if self.prefetch else 0
        return Overlap(most, 1 << 60, 0) if self.overlap else Schedule()


def settings() -> Iterator[Setting]:
    """Each that does something: stage 0 offloads nothing, stage 3 alone prefetches.

    A page carries every step. So two micro-batches are not there with offload.
    """
    for stage in range(4):
        for overlap, prefetch in ((0, 0), (1, 0), (1, 1))[: 3 if stage == 3 else 2]:
            how = stage, bool(overlap), bool(prefetch)
            for again in (False, True):
                for offload in OFFLOADS if stage else ("none",):
                    yield Setting(*how, offload, again)
                yield Setting(*how, checkpointing=again, micro_batches=2)


class Size(NamedTuple):
    """A model, and the GPUs and tokens of a rank that train it."""

    shape: Shape = SHAPE
    ranks: int = RANKS
    gpus: int = 1
    """Of a node."""
    tokens: int = TOKENS


SMALL = Size()


def _layers(at: Setting, size: Size) -> list[Layer]:
    """The root and the blocks, with what an update needs and what activations take."""
    job = Job(size.shape, A100, size.ranks, size.ranks, SEQUENCE)
    costs = Costs(job, size.tokens)
    on_host = at.offload != "none"
    update = ADAM / (BUS * A100.dram if on_host else STREAM * A100.hbm)
    mode = "full" if at.checkpointing else "none"
    root, *blocks = layers_of(costs, Candidate(0, mode), update)
    for block in blocks:
        block.inside, block.saved = round(costs.saved()), round(costs.saved(mode))
    # the log-softmax of the logits and two gradients of it, in fp32
    root.inside = root.saved = 12 * size.tokens * size.shape.vocab
    _, _, master = PRECISIONS["bf16"]
    for layer in (root, *blocks):
        layer.flats[0].states = master + 8
    return [root, *blocks]


def line(at: Setting, size: Size = SMALL) -> Timeline:
    """One step of a rank, simulated."""
    latency, speed = bus(A100, size.ranks, size.gpus)
    machine = Machine(
        size.ranks,
        latency,
        speed,
        bus=BUS * A100.pcie,
        disk=A100.disk * 2 / 3,  # as much is written as read, at half the speed
    )

    def micro_batch(boundary: bool) -> Timeline:
        layers, schedule = _layers(at, size), at.schedule(size)
        return simulate(layers, machine, at.plan, schedule, boundary=boundary)

    last = micro_batch(True)
    if at.micro_batches == 1:
        return last
    first = micro_batch(False)
    last.shift(-first.duration)
    return Timeline(
        first.intervals + last.intervals,
        first.moments + last.moments,
        first.duration + last.duration,
    )


def _rests(at: Setting, size: Size) -> Iterator[Change]:
    """What a rank holds between two steps."""
    for layer in _layers(at, size):
        flat = layer.flats[0]
        sizes = {
            "parameters": flat.itemsize,
            "gradients": flat.reduced,
            "optimizer": flat.states,
        }
        for category, itemsize in sizes.items():
            placed = getattr(at.plan, category)
            share = size.ranks if placed.sharded else 1
            place = {"cpu": "host", "nvme": "disk"}.get(placed.on, "device")
            nbytes = flat.padded // share * itemsize
            yield Change(place, category, nbytes, layer.name)


def drawn(found: Timeline, plan: Plan) -> list[Slice]:
    """A simulated step as the slices of rank 0, by their time."""
    calls = count()

    def cut(i: Interval) -> Slice:
        verb, lane, phase, call = i.what, i.lane, "", -1
        if lane == "link":
            call, gathers = next(calls), verb == "all_gather"
            lane = "gather" if gathers else "reduce"
            inside = not gathers or plan.parameters.sharded
            phase = "backward" if inside else "step"
        elif lane == "bus":
            lane = "to host"
            if verb == "up":
                verb = "load" if plan.parameters.sharded else "out"
            else:
                verb = "add" if plan.gradients.sharded else "in"
        elif lane == "disk":
            lane = "to disk"
        code = source(verb, i.unit, phase)
        nbytes = round(i.nbytes)
        return Slice(0, lane, i.begin, i.end, verb, i.unit, nbytes, call, phase, code)

    slices = [cut(i) for i in found.intervals if i.end > i.begin]
    for moment in found.moments:
        for change in moment.changes:
            if change.category == "parameters" and change.nbytes < 0:
                at = moment.time, moment.time
                slices.append(cut(Interval("compute", "release", change.unit, *at)))
    return sorted(slices, key=lambda s: s.begin)


@cache
def simulated(at: Setting, size: Size = SMALL) -> Trace:
    """One step. What rank 0 does there, all do: they are equal."""
    found = line(at, size)
    slices = drawn(found, at.plan)
    rests = Moment(0, 0.0, tuple(_rests(at, size)))
    return Trace(size.ranks, slices, [rests, *found.moments])


def one_step(stage: int = 3, overlap: bool = True) -> Trace:
    """A step of a small GPT on this rank, recorded; the step before it is not."""
    config = GPTConfig(layers=3, hidden=64, heads=2, sequence=32)
    torch.manual_seed(0)
    model = GPT(config).to(minizero.ranks.device())
    net = minizero.parallelize(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        Plan.stage(stage),
        schedule=Overlap(param_persistence_threshold=0) if overlap else None,
    )
    x = torch.zeros(2, config.sequence, dtype=torch.int64)

    def step() -> None:
        net.backward(net(x, x))
        net.step()

    step()
    with minizero.trace(net) as run:
        step()
    return with_sources(run.trace)
