"""How long a step takes: a simulated rank, with the schedule that trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from minizero.comm.quantized import BLOCK
from minizero.memory.plan import Plan
from minizero.overlap import Overlap
from minizero.overlap.simulator import simulate
from minizero.overlap.simulator import Buffer, Layer, Timeline
from minizero.overlap.simulator import Machine as Link
from minizero.scale.cost import ITEMSIZES, RECOMPUTED, Candidate, Costs, Memory
from minizero.scale.machines import BUS, STREAM, Machine, bus
from minizero.scale.shapes import Shape, check_choices, check_counts
from minizero.zero import Schedule
from minizero.zero.groups import check_groups


def layers_of(
    costs: Costs,
    world_size: int,
    checkpointing: str,
    reduced: int,
    update: float,
    bits: tuple[int | None, int | None] = (None, None),
) -> list[Layer]:
    """The root and the blocks, as chapter 8's simulator takes them.

    reduced: bytes of an element as it is reduced. update: seconds an
    element. bits: in which parameters and gradients are sent, if they are
    quantized.
    """
    shape, size = costs.shape, costs.itemsize
    # gradients are copied into one buffer, cast if need be, and divided
    cast = (size + reduced) * (size != reduced)
    handled = (2 * size + cast + 2 * reduced) * (world_size > 1)
    # a quantized block has a scale of one byte; it is encoded and decoded
    sent = tuple(
        n / 8 + 1 / BLOCK if n else full
        for n, full in zip(bits, (size, reduced), strict=True)
    )
    decoded = (size + sent[0]) * bool(bits[0])
    coding = decoded + 2 * (reduced + sent[1]) * bool(bits[1])

    def layer(name: str, n: int, forward: float, backward: float) -> Layer:
        padded = -(-n // world_size) * world_size
        flat = Buffer(padded, size, reduced=reduced, sent=sent)
        forward += costs.memory(decoded * n)
        backward += costs.memory((handled + coding) * n)
        return Layer(name, [flat], forward, backward, update * n)

    block = costs.block(checkpointing)
    names = [f"block {i}" for i in range(shape.layers)]
    root = layer("root", shape.root, *costs.head())
    return [root, *(layer(name, shape.block, *block) for name in names)]


def link_of(machine: Machine, ranks: int, plan: Plan) -> Link:
    """A rank's link; parameters on the host cross its slot as well."""
    across = None
    if plan.group:
        # each rank of a group has its own port to the other groups
        copies, ranks = ranks // plan.group, plan.group
        if copies > 1:
            across = Link(copies, *bus(machine, copies, 1))
    latency, speed = bus(machine, ranks)
    if plan.parameters.on != "device" and ranks > 1:
        # its own shard comes in, while N - 1 others come over the link
        slot = machine.slot(machine.gpus) * (ranks - 1)
        speed = 1 / (1 / speed + 1 / slot)
    return Link(
        ranks, latency, speed, contention=machine.contention, across=across
    )


def adam_seconds(machine: Machine, per_node: int, on: str) -> float:
    """Seconds an element for Adam's arithmetic, where its states are.

    30 bytes are read and written, 12 more to clip. On the host all GPUs
    share its memory: ZeRO-Offload reports 0.22 s for 1e9 on a DGX-2 (Ren et
    al. 2021, table 4), these bytes take 0.21.
    """
    if on == "device":
        return 42 / (STREAM * machine.hbm)
    return 42 * per_node / (BUS * machine.dram)


def update_seconds(machine: Machine, per_node: int, plan: Plan) -> float:
    """Seconds an element for Adam, with the copies that it needs.

    To the host gradients come over the slot, and parameters go back. A disk
    reads 16 bytes and writes as many at half the speed. These run at the
    same time, so the slowest counts.
    """
    on = plan.optimizer.on
    arithmetic = adam_seconds(machine, per_node, on)
    if on == "device":
        return arithmetic
    slot = 6 / machine.slot(per_node)
    files = 16 * 3 * per_node / machine.disk if on == "nvme" else 0.0
    return max(arithmetic, slot, files)


@dataclass(frozen=True)
class Prediction:
    """One step of training, predicted; all of one rank.

    `exposed_seconds`: spent in waits for collectives. `mfu`: the share of
    peak that 6 operations a parameter and token, and 12 for each score and
    element of a head, would take. `timeline`: the last micro-batch and the
    update.
    """

    step_seconds: float
    tokens_per_second_per_gpu: float
    exposed_seconds: float
    mfu: float
    memory: Memory
    timeline: Timeline = field(repr=False)


def ahead(largest: int) -> Schedule:
    """Overlap that gathers one unit ahead of its use."""
    return Overlap(largest, 1 << 60, 0)


def predict(
    shape: Shape,
    machine: Machine,
    how: Candidate,
    *,
    sequence: int,
    world_size: int,
    precision: str = "bf16",
    reduce: str | None = None,
    attention: str = "flash",
    schedule: Callable[[int], Schedule] = ahead,
) -> Prediction:
    """Predict one step of a decoder of this shape.

    sequence: tokens. precision: bf16, fp16, fp32, or fp8 for the blocks'
    products. reduce: what gradients are sent in (default: `precision`).
    attention: flash or eager. schedule: makes one, given the elements of the
    largest unit.
    """
    check_counts(
        sequence=sequence, world_size=world_size,
        micro_batch=how.micro_batch, accumulation=how.accumulation,
    )  # fmt: skip
    check_choices(
        precision=(precision, ITEMSIZES),
        reduce=(reduce or precision, ITEMSIZES),
        checkpointing=(how.checkpointing, RECOMPUTED),
        attention=(attention, ("flash", "eager")),
    )
    plan, bits = how.plan, (how.weight_bits, how.gradient_bits)
    if plan.group or any(bits):
        check_groups(plan, *bits)
    for placement in vars(plan).values():
        placement.ranks(world_size)  # raises if groups do not divide the ranks

    tokens, reduced = how.micro_batch * sequence, ITEMSIZES[reduce or precision]
    costs = Costs(shape, machine, tokens, sequence, attention, precision)
    update = update_seconds(machine, min(machine.gpus, world_size), plan)
    units = layers_of(
        costs, world_size, how.checkpointing, reduced, update, bits
    )
    link = link_of(machine, world_size, plan)
    largest = max(shape.block, shape.root) + world_size

    last = simulate(units, link, plan, schedule(largest))
    seconds, waits = last.duration, last.exposed
    if how.accumulation > 1:
        other = simulate(units, link, plan, schedule(largest), boundary=False)
        seconds += (how.accumulation - 1) * other.duration
        waits += (how.accumulation - 1) * other.exposed

    rate = how.accumulation * tokens / seconds
    flops = 6 * shape.parameters + 12 * shape.layers * shape.hidden * sequence
    return Prediction(
        seconds, rate, waits, rate * flops / machine.peak,
        Memory.of(costs, how, world_size, reduced), last,
    )  # fmt: skip
