"""Chapter 17: groups and few bits."""

import torch

from minizero import comm
from minizero.lab.course import Exercise, Wrong
from minizero.lab.course.drivers import kills


class FewestGPUs(Exercise):
    label = "ex-beyond-1"
    answer = "fewest"
    book = {"params": 80e9, "room": 64.0, "group": 8}
    starter = """
def fewest(
    params: float, room: float, group: int
) -> tuple[int, int | None, int | None]:
    # The fewest GPUs, in nodes of `group`, with `room` GB each for state: under ZeRO-3,
    # MiCS and hpZ, the last two with a node as group; None: none are enough. Mixed
    # precision, Adam.
    return group, None, None
"""
    public = """
assert fewest(1e9, 16.0, 4) == (4, 4, 4)  # one node
"""
    reference = """
from math import ceil


def fewest(params, room, group):
    gb = params / 1e9

    def enough(fixed, shared):
        # GB that a rank always has; GB that all ranks share
        if fixed >= room:
            return None
        return max(1, ceil(shared / (room - fixed) / group)) * group

    mics = group if 16 * gb / group <= room else None
    return enough(0, 16 * gb), mics, enough(2 * gb / group, 14 * gb)
"""
    wrong = (
        Wrong(
            "two copies",
            "2 * gb / group, 14 * gb",
            "2 * gb / group, 16 * gb",
            "You kept the parameters twice, over the group and over all ranks, as "
            "ZeRO++ does: hpZ as this book has it keeps the group's shard alone.",
        ),
        Wrong(
            "MiCS shrinks",
            "mics = group if 16 * gb / group <= room else None",
            "mics = enough(0, 16 * gb)",
            "You divided the state of MiCS by all ranks: those of one group share it.",
        ),
        Wrong(
            "parts of a node",
            "/ group)) * group",
            "))",
            "You took parts of a node: all its GPUs are used.",
        ),
        Wrong(
            "hpZ groups all",
            "enough(2 * gb / group, 14 * gb)",
            "mics",
            "You grouped everything, as MiCS does: hpZ groups the parameters alone.",
        ),
    )

    def draw(self, rng):
        return self.telling(
            lambda: {
                "params": rng.randint(50, 900) * 1e8,
                "room": float(rng.choice([16, 24, 32, 64])),
                "group": rng.choice([4, 8, 16]),
            },
            2,
        )


class Accumulation(Exercise):
    label = "ex-beyond-2"
    answer = "across"
    points = 6
    book = {"params": 2e9, "ranks": 8, "group": 4, "micro": 2}
    starter = """
def across(
    params: float, ranks: int, group: int, micro: int
) -> tuple[float, float]:
    # Elements that a rank sends to other groups in a step of so many micro-batches,
    # each of which is reduced: under MiCS, under hpZ.
    return 0.0, 0.0
"""
    public = """
mics, hpz = across(1200, 4, 2, 1)
assert mics == hpz == 600
"""
    reference = """
def across(params, ranks, group, micro):
    copies = ranks / group
    unit = params / group * (copies - 1) / copies
    return 2 * micro * unit, (micro + 1) * unit
"""
    wrong = (
        Wrong(
            "once a step",
            "2 * micro * unit, (micro + 1) * unit",
            "2 * unit, 2 * unit",
            "You counted one reduction a step: every micro-batch is reduced.",
        ),
        Wrong(
            "hpZ gathers each time",
            "(micro + 1) * unit",
            "2 * micro * unit",
            "You counted hpZ's gather across for each micro-batch: weights change "
            "once a step.",
        ),
        Wrong(
            "whole buffers",
            "params / group *",
            "params *",
            "You sent whole buffers across: a rank sends its group's share alone.",
        ),
        Wrong(
            "MiCS keeps gradients",
            "2 * micro * unit,",
            "(micro + 1) * unit,",
            "You let MiCS reduce like hpZ: it all-reduces shards across, which sends "
            "each twice, at every micro-batch.",
        ),
    )
    explain = "When each of the two collectives across is made."

    def draw(self, rng):
        return [
            {
                "params": rng.randint(10, 90) * 1e8,
                "ranks": group * rng.choice([2, 3, 5, 6]),
                "group": group,
                "micro": micro,
            }
            for group, micro in zip(
                rng.sample([4, 8, 16], 2), rng.sample([3, 4, 6, 8], 2), strict=True
            )
        ]


class FinerScales(Exercise):
    label = "ex-beyond-5"
    answer = "arrives"
    points = 6
    starter = """
import torch
from torch import Tensor


def arrives(row: Tensor, bits: int) -> tuple[Tensor, int]:
    # What arrives of a row of n * 128 numbers, and the bytes that are sent: each block
    # of 128 as integers of `bits` and a scale, its largest absolute value over the
    # largest integer, rounded to bfloat16. The chapter's is a power of two:
    rows, largest = row.view(-1, 128), 2 ** (bits - 1) - 1
    most = rows.abs().amax(1, keepdim=True)
    scale = 2.0 ** (torch.frexp(most).exponent - (bits - 1))
    q = (rows / scale).round().clamp(-largest, largest)
    return (q * scale).view(-1), len(rows) * (128 * bits // 8 + 1)
"""
    public = """
import torch

out, sent = arrives(torch.linspace(-1, 1, 256), 8)
assert out.shape == (256,) and sent > 256
"""
    reference = """
def arrives(row, bits):
    rows, largest = row.view(-1, 128), 2 ** (bits - 1) - 1
    most = rows.abs().amax(1, keepdim=True)
    scale = (most / largest).bfloat16().float()
    q = (rows / scale).round().clamp(-largest, largest)
    return (q * scale).view(-1), len(rows) * (128 * bits // 8 + 2)
"""
    wrong = (
        Wrong(
            "one byte",
            "bits // 8 + 2",
            "bits // 8 + 1",
            "You counted one byte for a scale: bfloat16 has two.",
        ),
        Wrong(
            "divides by the exact scale",
            "(rows / scale)",
            "(rows * largest / most)",
            "You divided by the scale before it was rounded: the receiver multiplies "
            "by the rounded one.",
        ),
        Wrong(
            "fp32 scale",
            ".bfloat16().float()",
            "",
            "You did not round the scale: the receiver has it in bfloat16.",
        ),
        Wrong(
            "one scale",
            "rows.abs().amax(1, keepdim=True)",
            "rows.abs().amax()",
            "You took one scale for the row: each block has its own.",
        ),
        Wrong(
            "127 with 4 bits",
            "2 ** (bits - 1) - 1",
            "127",
            "You divided by 127 with 4 bits: their largest integer is 7.",
        ),
    )
    explain = "What the second byte of a scale buys, and whether it is worth it."

    def draw(self, rng):
        return [
            {"seed": rng.randint(0, 10**6), "blocks": rng.randint(3, 9), "bits": bits}
            for bits in (8, 4)
        ]

    @staticmethod
    def run(answer, seed, blocks, bits):
        generator = torch.Generator().manual_seed(seed)
        row = torch.randn(blocks, 128, generator=generator)
        row *= torch.rand(blocks, 1, generator=generator) + 0.1
        out, sent = answer(row.view(-1), bits)
        return {"values": out.tolist(), "bytes": sent}


class DriftApart(Exercise):
    label = "ex-beyond-3"
    answer = "check_views"
    points = 6
    starter = """
from collections.abc import Callable

import torch
from torch import Tensor


def check_views(gather: Callable[[Tensor], list[Tensor]]) -> None:
    # A test: an AssertionError if ranks drift apart. `gather(rows)` is given a row of
    # each rank, [ranks, elements], and returns what each rank has of the whole buffer
    # after a quantized all-gather.
    views = gather(torch.randn(3, 256))
    assert len(views) == 3
"""
    public = """
from minizero import comm


def gather(rows):
    code = comm.Quantized(8)
    rounded = [code.decode(code.encode(r), torch.empty_like(r)) for r in rows]
    return [torch.stack(rounded) for _ in rows]


check_views(gather)  # nothing is wrong with it
"""
    reference = """
import torch


def check_views(gather):
    views = gather(torch.randn(3, 256))
    assert all(torch.equal(view, views[0]) for view in views)
"""
    wrong = (
        Wrong(
            "two ranks",
            "for view in views)",
            "for view in views[:2])",
            "You compared two ranks only: the third may have another buffer.",
        ),
        Wrong(
            "compares with the input",
            "",
            """
import torch


def check_views(gather):
    rows = torch.randn(3, 256)
    for view in gather(rows):
        assert torch.allclose(view, rows, atol=1.0)
""",
            "You compared each rank with the original: rounding may be as small as you "
            "like, and ranks still differ from each other.",
        ),
        Wrong(
            "demands the original",
            "",
            """
import torch


def check_views(gather):
    rows = torch.randn(3, 256)
    for view in gather(rows):
        assert torch.equal(view, rows)
""",
            "Your test fails on the original, too: values that are sent in 8 bits are "
            "rounded on every rank.",
        ),
    )
    explain = "Why the mean of such gradients belongs to no model."

    def draw(self, rng):
        return [
            {"mutant": "own row exact", "bits": rng.choice([4, 8])},
            {"mutant": "own row exact on the last rank", "bits": rng.choice([4, 8])},
            {"mutant": "last row is not rounded by its owner", "bits": 8},
        ]

    @staticmethod
    def run(answer, mutant, bits):
        def make(name):
            def gather(rows):
                code = comm.Quantized(bits)
                rounded = torch.stack(
                    [code.decode(code.encode(r), torch.empty_like(r)) for r in rows]
                )
                views = [rounded.clone() for _ in rows]
                for rank, view in enumerate(views if name else []):
                    last = rank == len(rows) - 1
                    if name == "own row exact" or last:
                        view[rank] = rows[rank]
                        if "owner" in name:  # by half a step of a value
                            view[rank] = rounded[rank]
                            view[rank, 0] = rows[rank, 0]
                return views

            return gather

        torch.manual_seed(0)
        return kills(0, answer, make, mutant)


class OwnersOfYourOwn(Exercise):
    label = "ex-beyond-6"
    answer = "padding"
    points = 6
    starter = """
def padding(shapes: list[tuple[int, int]], ranks: int) -> float:
    # Each matrix to the rank with the least work so far, the costliest first. Returns
    # the elements of all shards, each as long as the longest, over the matrices'.
    return 0.0
"""
    public = """
assert padding([(8, 8)] * 2, 2) == 1
assert padding([(8, 8)] * 3, 2) == 4 / 3
"""
    reference = """
def padding(shapes, ranks):
    work, filled = [0] * ranks, [0] * ranks
    costs = [2 * a * a * b + a**3 for a, b in map(sorted, shapes)]
    for cost, (m, n) in sorted(zip(costs, shapes, strict=True), reverse=True):
        owner = work.index(min(work))
        work[owner] += cost
        filled[owner] += m * n
    return max(filled) * ranks / sum(filled)
"""
    wrong = (
        Wrong(
            "as they come",
            "sorted(zip(costs, shapes, strict=True), reverse=True)",
            "zip(costs, shapes, strict=True)",
            "You took matrices in the model's order: the costliest goes first, since "
            "small ones fill the gaps that are left.",
        ),
        Wrong(
            "work of elements",
            "work[owner] += cost",
            "work[owner] += m * n",
            "You counted elements as work: an iteration multiplies matrices.",
        ),
        Wrong(
            "without padding",
            "max(filled) * ranks / sum(filled)",
            "max(work) * ranks / sum(work)",
            "You returned the busiest rank's work over the mean, not a size.",
        ),
    )

    def draw(self, rng):
        def case():
            width = 64 * rng.randint(2, 9)
            kinds = [(width, width), (width, 3 * width), (width, 4 * width)]
            kinds.append((width, 64 * rng.randint(10, 40)))
            return {
                "shapes": [list(rng.choice(kinds)) for _ in range(rng.randint(8, 16))],
                "ranks": rng.choice([3, 4, 5]),
            }

        return self.telling(case, 3)


class HowLargeAGroup(Exercise):
    label = "ex-beyond-4"
    answer = "choices"
    points = 6
    book = {"params": 30e9, "ranks": 128, "node": 8, "groups": [8, 16]}
    starter = """
def choices(
    params: float, ranks: int, node: int, groups: list[int]
) -> list[tuple[float, float, float]]:
    # For each size of a group, a multiple of a node: GB of state of a rank if all is
    # grouped, and if the parameters alone are; and what enters a node in a step, in
    # units of psi. What a node needs enters it once.
    return [(0.0, 0.0, 0.0) for _ in groups]
"""
    public = """
assert choices(1e9, 16, 8, [16])[0][:2] == (1, 1)
"""
    reference = """
def choices(params, ranks, node, groups):
    found, gb = [], params / 1e9
    for group in groups:
        nodes, copies = group // node, ranks // group
        inside = 3 * (1 - 1 / nodes)  # the group's own collectives
        between = 2 * (1 - 1 / copies) / nodes
        all_, some = 16 * gb / group, gb * (2 / group + 14 / ranks)
        found.append((all_, some, inside + between))
    return found
"""
    wrong = (
        Wrong(
            "inside is free",
            "3 * (1 - 1 / nodes)",
            "0",
            "You counted a group's own collectives as free: where a group spans "
            "nodes, they cross, too.",
        ),
        Wrong(
            "per rank",
            "inside + between",
            "3 * (1 - 1 / group) + between / node",
            "You counted what a rank sends: the question is what enters a node.",
        ),
        Wrong(
            "two copies",
            "14 / ranks",
            "16 / ranks",
            "You kept the parameters twice: with hpZ a rank has its share of the "
            "group's copy, and 14 bytes of the rest.",
        ),
        Wrong(
            "gathers across",
            "between = 2 *",
            "between = 3 *",
            "Three collectives cross in ZeRO-3. Between groups there are two, of "
            "gradients and of what is published, or one all-reduce of shards.",
        ),
    )
    explain = "Which g, and what is grouped; what changes if groups may span nodes."

    def draw(self, rng):
        return [
            {
                "params": rng.randint(100, 700) * 1e8,
                "ranks": node * rng.choice([12, 18, 24]),
                "node": node,
                "groups": [node, 2 * node, 3 * node],
            }
            for node in rng.sample([4, 8, 16], 2)
        ]
