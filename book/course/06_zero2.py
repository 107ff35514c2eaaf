"""Chapter 6: ZeRO-2."""

import torch

from minizero import comm, launch
from minizero.lab.course import Exercise, Wrong, always_fails
from minizero.lab.course.drivers import PATIENCE, Odd, kills, rows
from minizero.zero import ZeRO2


class SavesEight(Exercise):
    label = "ex-zero2-1"
    answer = "saves"
    book = {"ranks": 8, "times": 7}
    starter = """
def saves(ranks: int, times: float) -> tuple[float, int]:
    # By what factor ZeRO-2 shrinks mixed-precision Adam's state on so many ranks, and
    # the fewest ranks on which it shrinks it `times` times.
    return 0.0, 0
"""
    public = """
assert saves(1, 1) == (1, 1)
"""
    reference = """
def saves(ranks, times):
    n = 1
    while 16 * n < times * (2 * n + 14):
        n += 1
    return 16 / (2 + 14 / ranks), n
"""
    wrong = (
        Wrong(
            "more than",
            "16 * n < times",
            "16 * n <= times",
            "At this number it saves exactly so much: that is enough.",
        ),
        Wrong(
            "the limit",
            "14 / ranks",
            "0",
            "8 is the limit for infinitely many ranks: on N ranks 14/N bytes are left.",
        ),
        Wrong(
            "ZeRO-1",
            "16 / (2 + 14 / ranks)",
            "16 / (4 + 12 / ranks)",
            "That is ZeRO-1: ZeRO-2 shards gradients too.",
        ),
    )

    def draw(self, rng):
        return [
            {"ranks": n, "times": t}
            for n, t in zip(
                rng.sample([3, 5, 6, 12, 24, 40], 2),
                rng.sample([4, 6, 7.5], 2),
                strict=True,
            )
        ]


class Deeper(Exercise):
    label = "ex-zero2-2"
    answer = "peak"
    points = 6
    book = {"layers": 12, "block": 28272, "rest": 13920, "norm": 96, "ranks": 4}
    starter = """
def peak(
    layers: int, block: int, rest: int, norm: int, ranks: int
) -> tuple[int, float]:
    # Most bytes of fp32 gradients under ZeRO-2, and their share of ZeRO-1's: for blocks
    # of `block` elements and `rest` beside them, of which the final norm has `norm`.
    return 0, 0.0
"""
    public = """
assert peak(1, 100, 0, 0, 1)[0] == 4 * 200  # a shard, and the block once more
"""
    reference = """
def peak(layers, block, rest, norm, ranks):
    whole = layers * block + rest
    most = 4 * (whole // ranks + block + norm)
    return most, most / (4 * whole)
"""
    wrong = (
        Wrong(
            "root forgotten",
            "block + norm)",
            "block)",
            "The final norm belongs to the root: its gradient is computed first, and "
            "waits for the root's turn, which comes last.",
        ),
        Wrong(
            "block over N",
            "block + norm)",
            "block // ranks + norm)",
            "A block's gradient is there in full before it is reduced, not a share of"
            " it.",
        ),
        Wrong(
            "one shard",
            "whole // ranks + block + norm",
            "whole // ranks",
            "You counted the shards alone: a unit's gradients are there in full before "
            "they are reduced.",
        ),
    )
    explain = "Towards what the ratio goes with more and more layers."

    def draw(self, rng):
        return [
            {
                "layers": rng.randint(5, 40), "block": n * rng.randint(1000, 9000),
                "rest": n * rng.randint(500, 900), "norm": 2 * rng.randint(30, 90),
                "ranks": n,
            }
            for n in rng.sample([3, 5, 6, 8], 2)
        ]  # fmt: skip


class ReduceInHalf(Exercise):
    label = "ex-zero2-3"
    on_ranks = True
    answer = "HalfReduce"
    points = 8
    starter = """
from functools import partial

from minizero import comm
from minizero.zero import ZeRO2


class HalfReduce(ZeRO2):
    "ZeRO-2 that sends fp32 gradients as bf16, and keeps the fp32 shard."
"""
    public = """
assert issubclass(HalfReduce, ZeRO2)
"""
    reference = """
from functools import partial

from minizero import comm
from minizero.zero import ZeRO2


class HalfReduce(ZeRO2):
    def reduce(self, unit):
        for flat in unit.trainable:
            grad = flat.full_grad()
            half = grad.bfloat16()
            own, mine = flat.own(grad), flat.own(half)
            work = comm.reduce_scatter(mine, half, async_op=True, average=True)
            work.then(partial(own.copy_, mine))
            work.then(partial(self.reduced, flat))
            unit.under_way.append(work)
"""
    wrong = (
        Wrong(
            "cast after the reduce",
            "            half = grad.bfloat16()\n",
            "            half = grad.bfloat16().float()\n",
            "You round to bf16 and send fp32: as many bytes as before.",
        ),
        Wrong(
            "sum, not mean",
            ", average=True",
            "",
            "You send the sum over ranks: `average=True` makes it the mean.",
        ),
        Wrong(
            "mean twice",
            "partial(own.copy_, mine)",
            "lambda own=own, mine=mine: own.copy_(mine / comm.get_world_size())",
            "You divide by the number of ranks twice: the reduce-scatter has done it.",
        ),
    )
    explain = "How far the losses are from plan 0's, and why it is an option only."

    def draw(self, rng):
        odd = rng.sample([11, 13, 15, 17], 2)
        return [
            {"ranks": n, "width": w, "micro": n - 1}
            for n, w in zip((2, 3), odd, strict=True)
        ]

    @staticmethod
    def run(answer, ranks, width, micro):
        def trained():
            model = Odd(width)
            sgd = torch.optim.SGD(model.parameters(), lr=0.5)
            net = answer(model, sgd)
            norms = []
            for step in range(2):
                with comm.algorithm("direct"), comm.ledger() as calls:
                    for i in range(micro):
                        net.backward(net(rows(width, step, i)) / micro)
                    norms.append(net.grad_norm().item())
                    net.step()
            sent = calls.select("reduce_scatter")
            return {
                "bytes of reduce-scatters": sum(call.bytes for call in sent),
                "dtypes sent": sorted({call.dtype for call in sent}),
                "gradient norms": norms,
                "dtype kept": str(net.trained[0].mean_shard.dtype),
            }

        return launch(trained, ranks, timeout=PATIENCE)[0]


class ACopyForASum(Exercise):
    label = "ex-zero2-4"
    on_ranks = True
    answer = "check_gradients"
    points = 6
    starter = """
from minizero.lab.course.drivers import train  # see its docstring
from minizero.zero import DataParallel


def check_gradients(kind: type) -> None:
    # A test that runs on every rank: an AssertionError if `kind`, a ZeRO2 or a class
    # like it, has other gradients than plan 0. `train(kind, 13, micro=1, steps=1,
    # clip=1.0)` trains it.
    a, b = (train(each, 13, steps=1, clip=1.0) for each in (kind, DataParallel))
    assert a["losses"] == b["losses"]
"""
    public = """
from minizero import launch
from minizero.zero import ZeRO2

passed = launch(check_gradients, 2, ZeRO2)  # nothing is wrong with it
"""
    reference = """
from minizero.lab.course.drivers import train
from minizero.zero import DataParallel


def check_gradients(kind):
    how = {"micro": 4, "steps": 2, "clip": 1.0}
    a, b = (train(each, 13, **how) for each in (kind, DataParallel))
    assert a["gradient norms"] == b["gradient norms"]
"""
    wrong = (
        Wrong(
            "one micro-batch",
            '"micro": 4',
            '"micro": 1',
            "You test one micro-batch a step, where a copy and a sum are the same: test"
            " every property with accumulation.",
        ),
        Wrong(
            "one step",
            '"steps": 2',
            '"steps": 1',
            "You test one step: what is left from the one before is not seen.",
        ),
        always_fails("assert a"),
    )

    def draw(self, rng):
        mutants = ["overwrites", "is never cleared", "is a sum over ranks"]
        return [{"ranks": rng.choice([2, 3]), "mutant": name} for name in mutants]

    @staticmethod
    def run(answer, ranks, mutant):
        def make(name):
            class Subject(ZeRO2):
                def reduced(self, flat):
                    if name == "overwrites":
                        flat.mean = None
                    if name == "is a sum over ranks":
                        flat.own(flat.full_grad()).mul_(ranks)
                    super().reduced(flat)

                def clear_grads(self, flat):
                    mean = flat.mean
                    super().clear_grads(flat)
                    if name == "is never cleared":
                        flat.mean = mean

            return Subject

        return kills(ranks, answer, make, mutant)


class TwoLevels(Exercise):
    label = "ex-zero2-5"
    answer = "levels"
    points = 6
    book = {"params": 7e9, "nodes": 4, "gpus": 8, "micro": 8}
    starter = """
def levels(params: float, nodes: int, gpus: int, micro: int) -> list[float]:
    # For `nodes` nodes of `gpus` GPUs and `micro` micro-batches. GB of bf16 gradients
    # that a rank keeps: under ZeRO-2 over all, and under the two-level plan. Elements
    # that it sends to other nodes for gradients in a step, in billions, likewise.
    return [0.0, 0.0, 0.0, 0.0]
"""
    public = """
assert levels(1e9, 1, 8, 4)[2:] == [0, 0]  # there are no other nodes
"""
    reference = """
def levels(params, nodes, gpus, micro):
    crossing = (nodes - 1) / nodes
    psi = params / 1e9
    return [
        2 * psi / (nodes * gpus),
        2 * psi / gpus,
        micro * psi * crossing,
        psi / gpus * crossing,
    ]
"""
    wrong = (
        Wrong(
            "micro-batches forgotten",
            "micro * psi * crossing",
            "psi * crossing",
            "ZeRO-2 reduces after each micro-batch, so it crosses as often.",
        ),
        Wrong(
            "GPUs forgotten",
            "psi / gpus * crossing",
            "psi * crossing",
            "In the two-level plan a rank owns 1/G of its node's sums, and sends no "
            "more.",
        ),
        Wrong(
            "all shards",
            "(nodes - 1) / nodes",
            "(nodes * gpus - 1) / (nodes * gpus)",
            "You counted what stays inside the node too: only the shards of ranks in"
            " other nodes cross.",
        ),
    )
    explain = (
        "The design itself: which group reduces when, and what it costs in memory."
    )

    def draw(self, rng):
        return [
            {
                "params": rng.randint(2, 70) * 1e9, "nodes": rng.choice([2, 3, 5, 6]),
                "gpus": rng.choice([3, 4, 6]), "micro": rng.choice([3, 5, 6, 12]),
            }
            for _ in range(2)
        ]  # fmt: skip
