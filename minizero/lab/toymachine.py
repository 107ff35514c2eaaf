"""A toy machine: a data sheet, and waits that make ranks here as slow as it says.

A `ToyGPU` limits the memory of a rank, and `paced` the speed at which bytes move: over
the link, over the slot to the host, and through memory in an update. Ranks wait, which
needs no core, so a plan's cost shows in seconds whatever else this computer does. The
engine, its schedule, its bytes and its calls are the real ones; only their speeds are
the data sheet's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor

from minizero import comm
from minizero.comm import Call, Work
from minizero.lab.models.gpt import GPTConfig
from minizero.offload import CopyStream, Offload
from minizero.ranks import world_size
from minizero.scale.cost import adam_seconds
from minizero.scale.machines import BUS, NETWORK, Machine, bus
from minizero.scale.shapes import Shape
from minizero.zero import Flat, Storage

TOY = Machine(
    "toy machine",
    gpus=1,
    peak=50e9,  # so 25e9 in fp32, on half a core
    memory=8.5e6,
    hbm=2e9,
    link=float("inf"),
    network=50e6 / NETWORK,
    pcie=200e6 / BUS,
    host=64e6,
    dram=1e9,
    drives=1,
    drive=1e9,
    matmul=1.0,
    attention=0.4,
)
"""Each rank a node of its own: 8.5 MB, a link of 50 MB/s, a slot of 200 MB/s."""


def shape_of(config: GPTConfig) -> Shape:
    """The planner's shape of a `GPT`; it does not count positions."""
    return Shape(config.layers, config.hidden, config.heads, config.vocabulary)


def sleep_until(moment: float) -> None:
    """Wait, without a core, until `perf_counter` shows so much."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


class _Links:
    """When each collective of a ledger would have been over on a machine."""

    def __init__(self, machine: Machine, group: int | None, calls: list[Call]) -> None:
        ranks, node = world_size(), machine.gpus
        self.calls, self.counted = calls, 0
        self.speeds = {"all": bus(machine, ranks, node)}
        if group:
            self.speeds["within"] = bus(machine, group, node)
            self.speeds["across"] = bus(machine, ranks // group, 1)
        self.free = dict.fromkeys(self.speeds, 0.0)
        self.over: dict[int, float] = {}
        self.holds: dict[int, float] = {}  # calls that begin no earlier

    def hold(self, until: float) -> None:
        """The next call waits for a copy."""
        i = len(self.calls)
        self.holds[i] = max(until, self.holds.get(i, 0.0))

    def until(self, call: Call) -> float:
        """When it is over: its link has carried what was launched before it."""
        for i, new in enumerate(self.calls[self.counted :], self.counted):
            latency, speed = self.speeds[new.group]
            begin = max(self.free[new.group], new.launched, self.holds.pop(i, 0.0))
            self.free[new.group] = begin + latency + new.bytes / speed
            self.over[id(new)] = self.free[new.group]
        self.counted = len(self.calls)
        return self.over.get(id(call), 0.0)


@dataclass
class _Copied:
    """The moment when a stream's copies are done, as torch's event.

    The host sleeps until then; where the device waits, only its next call does.
    """

    until: float
    hold: Callable[[float], None]

    def wait(self) -> None:
        self.hold(self.until)

    def synchronize(self) -> None:
        sleep_until(self.until)

    def query(self) -> bool:
        return time.perf_counter() >= self.until


@contextmanager
def paced(machine: Machine, group: int | None = None) -> Iterator[None]:
    """Collectives, copies to or from the host, and updates take as on `machine`.

    As the planner counts them: a collective is over when the link has carried it, after
    those launched before it, and an update when its bytes have passed through the
    memory of where it is made. group: ranks that share a copy, if there are groups.
    """
    links: _Links
    frees: dict[int, float] = {}
    slot = machine.slot(machine.gpus)
    wait, copy, follow = Work.wait, CopyStream.copy, CopyStream.follow
    load, step = Offload.load, Storage.step

    def waiting(work: Work) -> Work:
        if work._finish is not None:
            work._finish = partial(_not_before, links.until(work.call), work._finish)
        return wait(work)

    def free(stream: CopyStream) -> float:
        return frees.get(id(stream), 0.0)

    def copying(stream: CopyStream, out: Tensor, source: Tensor) -> None:
        copy(stream, out, source)
        begin = max(free(stream), time.perf_counter())
        frees[id(stream)] = begin + source.nbytes / slot

    def following(stream: CopyStream, other: CopyStream | None = None) -> None:
        follow(stream, other)
        frees[id(stream)] = max(free(stream), free(other) if other else 0.0)

    def loading(storage: Offload, shard: Tensor, into: Tensor) -> Tensor:
        found = load(storage, shard, into)
        if found is into:
            links.hold(free(storage.up))
        return found

    def stepping(storage: Storage, flats: list[Flat], *rest: Any) -> None:
        elements = sum(flat.master.numel() for flat in flats)
        where = storage.plan.optimizer.on
        seconds = elements * adam_seconds(machine, machine.gpus, where)
        begun = time.perf_counter()
        _not_before(begun + seconds, partial(step, storage, flats, *rest))

    with (
        comm.ledger() as calls,
        mock.patch.object(Storage, "step", stepping),
        mock.patch.object(Work, "wait", waiting),
        mock.patch.object(CopyStream, "copy", copying),
        mock.patch.object(CopyStream, "follow", following),
        mock.patch.object(CopyStream, "event", lambda s: _Copied(free(s), links.hold)),
        mock.patch.object(Offload, "load", loading),
    ):
        links = _Links(machine, group, calls)
        yield


def _not_before(until: float, function: Callable[[], Any]) -> None:
    function()
    sleep_until(until)
