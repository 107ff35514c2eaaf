"""Chapter 2: ranks and collectives."""

import contextlib
import io

import torch

from minizero import comm, launch
from minizero.lab.course import Exercise, Wrong
from minizero.lab.course.drivers import PATIENCE
from minizero.ranks import rank


class CountBefore(Exercise):
    label = "ex-ranks-1"
    answer = "sent"
    book = {"ranks": 8, "elements": 1000}
    starter = """
def sent(ranks: int, elements: int) -> tuple[float, float, float]:
    # Elements that a rank sends in a reduce-scatter and in an all-reduce, and that
    # rank 0 sends when everything goes through it.
    return 0.0, 0.0, 0.0
"""
    public = """
assert sent(1, 1000) == (0, 0, 0)
"""
    reference = """
def sent(ranks, elements):
    others = ranks - 1
    return elements * others / ranks, 2 * elements * others / ranks, elements * others
"""
    wrong = (
        Wrong(
            "own row sent",
            "ranks - 1",
            "ranks",
            "You sent a rank's own row too: it stays where it is.",
        ),
        Wrong(
            "half an all-reduce",
            "2 * elements",
            "elements",
            "An all-reduce is a reduce-scatter and an all-gather: both send.",
        ),
        Wrong(
            "of all ranks",
            "elements * others / ranks, 2 * elements * others / ranks",
            "elements * others, 2 * elements * others",
            "You counted what all ranks send together: the question is about one.",
        ),
    )

    def draw(self, rng):
        return [
            {"ranks": n, "elements": n * rng.randint(50, 500)}
            for n in rng.sample([3, 4, 5, 6, 12, 16], 3)
        ]


class Bucket(Exercise):
    label = "ex-ranks-2"
    answer = "bucket"
    book = {"alpha": 1e-3, "beta": 1e9, "share": 0.1}
    starter = """
def bucket(alpha: float, beta: float, share: float) -> float:
    # Bytes of a bucket for which latency is this share of its time alpha + n / beta.
    return 0.0
"""
    public = """
assert bucket(0.001, 1e9, 1.0) == 0
"""
    reference = """
def bucket(alpha, beta, share):
    return alpha * beta * (1 - share) / share
"""
    wrong = (
        Wrong(
            "of the bytes' time",
            "(1 - share) / share",
            "(1 / share if share < 1 else 0)",
            "The share is of the whole time, and latency is part of that time.",
        ),
        Wrong(
            "upside down",
            "(1 - share) / share",
            "share * (1 - share)",
            "A smaller share of latency needs a larger bucket.",
        ),
    )

    def draw(self, rng):
        return [
            {
                "alpha": rng.randint(5, 900) * 1e-6,
                "beta": rng.randint(2, 50) * 1e9,
                "share": rng.choice([0.02, 0.05, 0.2, 0.5]),
            }
            for _ in range(3)
        ]


class AfterYou(Exercise):
    label = "ex-ranks-3"
    on_ranks = True
    answer = "step"
    points = 6
    starter = """
import torch.distributed as dist

from minizero.ranks import rank, world_size


def step(leaving, arriving):
    # Called on every rank: `leaving` goes to the next one, `arriving` is filled.
    dist.send(leaving, (rank() + 1) % world_size())
    dist.recv(arriving, (rank() - 1) % world_size())
"""
    public = """
assert callable(step)
"""
    reference = """
import torch.distributed as dist

from minizero.ranks import rank, world_size


def step(leaving, arriving):
    work = dist.isend(leaving, (rank() + 1) % world_size())
    dist.recv(arriving, (rank() - 1) % world_size())
    work.wait()
"""
    wrong = (
        Wrong(
            "everyone sends first",
            "    work = dist.isend(leaving, (rank() + 1) % world_size())\n",
            "    work = dist.isend(leaving, (rank() + 1) % world_size())\n"
            "    work.wait()\n",
            "`send` may return only when the other side receives, and the other side is"
            " in `send` too. It passes as long as a backend keeps messages in a "
            "buffer.",
        ),
        Wrong(
            "the other way",
            "    work = dist.isend(leaving, (rank() + 1) % world_size())\n"
            "    dist.recv(arriving, (rank() - 1) % world_size())",
            "    work = dist.isend(leaving, (rank() - 1) % world_size())\n"
            "    dist.recv(arriving, (rank() + 1) % world_size())",
            "Your messages go round the other way: each rank sends to the next one.",
        ),
        Wrong(
            "not received",
            "    dist.recv(arriving, (rank() - 1) % world_size())\n",
            "    dist.recv(leaving.clone(), (rank() - 1) % world_size())\n",
            "`arriving` still has what it had before.",
        ),
    )
    explain = "When `send` returns, and why a small message may pass."

    def draw(self, rng):
        return [
            {"ranks": 3, "elements": 4_000_000 + rng.randint(1, 999)},
            {"ranks": rng.choice([3, 4]), "elements": rng.randint(3, 9)},
        ]

    @staticmethod
    def run(answer, ranks, elements):
        def passed_on():
            arriving = torch.full((elements,), -1.0)
            answer(torch.full((elements,), 10.0 + rank()), arriving)
            return arriving[0].item(), arriving[-1].item()

        return launch(passed_on, ranks, backend="gloo", timeout=5)


class OnlyRankZero(Exercise):
    label = "ex-ranks-4"
    on_ranks = True
    answer = "log"
    points = 6
    starter = """
from minizero import comm
from minizero.ranks import rank, world_size


def log(loss) -> None:
    # Called on every rank with its loss, [1]: prints "loss" and the mean, once.
    if rank() == 0:
        comm.all_reduce(loss)
        print("loss", loss.item() / world_size())
"""
    public = """
assert callable(log)
"""
    reference = """
from minizero import comm
from minizero.ranks import rank, world_size


def log(loss):
    comm.all_reduce(loss)
    if rank() == 0:
        print("loss", loss.item() / world_size())
"""
    wrong = (
        Wrong(
            "rank 0 alone",
            "    comm.all_reduce(loss)\n    if rank() == 0:\n",
            "    if rank() == 0:\n        comm.all_reduce(loss)\n",
            "Rank 0 waits in an all-reduce that nobody joins; the others go on to their"
            " next collective, and wait there for rank 0.",
        ),
        Wrong(
            "everyone prints",
            "    if rank() == 0:\n        print",
            "    print",
            "Every rank prints: all must call, one should print.",
        ),
        Wrong(
            "a sum",
            " / world_size()",
            "",
            "You printed the sum over ranks, not their mean.",
        ),
    )
    explain = "What each rank does next when the starter stops."

    def draw(self, rng):
        return [{"ranks": n, "first": rng.randint(2, 40) / 8} for n in (2, 3)]

    @staticmethod
    def run(answer, ranks, first):
        def logged():
            loss, after = torch.tensor([first + rank()]), torch.ones(7)
            with comm.ledger() as calls:
                answer(loss)
            comm.all_reduce(after)
            return [call.op for call in calls], after.tolist()

        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            found = launch(logged, ranks, timeout=PATIENCE)
        lines = [line for line in shown.getvalue().splitlines() if "loss" in line]
        return {
            "lines printed": len(lines),
            "printed": float(lines[0].split()[-1]) if lines else None,
            "all ranks make the same calls": all(each == found[0] for each in found),
            "the next collective": found[-1][1],
        }


class TwoMachines(Exercise):
    label = "ex-ranks-5"
    answer = "hierarchical"
    points = 8
    starter = """
import torch


def hierarchical(buffers: list[torch.Tensor], wire) -> list[torch.Tensor]:
    # The sum of all buffers, for each rank. The first half of the ranks are one
    # machine, the others the second. `wire(source, to, tensor)` sends a tensor and
    # returns it as it arrives; each rank may compute with what it has.
    return buffers
"""
    public = """
import torch

same = hierarchical([torch.zeros(8) for _ in range(8)], lambda a, b, tensor: tensor)
assert len(same) == 8 and not torch.cat(same).any()
"""
    reference = """
import torch


def hierarchical(buffers, wire):
    n, g = len(buffers), len(buffers) // 2
    parts = [b.chunk(g) for b in buffers]
    inside = [[r - r % g + i for i in range(g)] for r in range(n)]
    mine = [sum(wire(i, r, parts[i][r % g]) for i in inside[r]) for r in range(n)]
    mine = [mine[r] + wire((r + g) % n, r, mine[(r + g) % n]) for r in range(n)]
    return [torch.cat([wire(i, r, mine[i]) for i in inside[r]]) for r in range(n)]
"""
    wrong = (
        Wrong(
            "directly",
            "",
            """
import torch


def hierarchical(buffers, wire):
    n = len(buffers)
    parts = [b.chunk(n) for b in buffers]
    sums = [sum(wire(i, r, parts[i][r]) for i in range(n)) for r in range(n)]
    return [torch.cat([wire(i, r, sums[i]) for i in range(n)]) for r in range(n)]
""",
            "That is the direct all-reduce over all ranks: rows cross between the"
            " machines, each for itself, before they are added up.",
        ),
        Wrong(
            "one leader a machine",
            "",
            """
def hierarchical(buffers, wire):
    g = len(buffers) // 2
    first = sum(wire(i, 0, buffers[i]) for i in range(g))
    second = sum(wire(i, g, buffers[i]) for i in range(g, 2 * g))
    first, second = first + wire(g, 0, second), second + wire(0, g, first)
    return [
        wire(0, r, first) if r < g else wire(g, r, second) for r in range(2 * g)
    ]
""",
            "One leader a machine does all the sending: as little crosses, but the"
            " leaders send many times what the others send.",
        ),
        Wrong(
            "each crosses alone",
            "mine[r] + wire((r + g) % n, r, mine[(r + g) % n])",
            "mine[r] + sum(wire(i, r, parts[i][r % g]) for i in inside[(r + g) % n])",
            "The parts of the other machine cross one by one: add them up there first.",
        ),
    )

    def draw(self, rng):
        return [
            {"ranks": 2 * g, "rows": rng.randint(1, 5)}
            for g in rng.sample([2, 3, 5], 2)
        ]

    @staticmethod
    def run(answer, ranks, rows):
        half, crossed, sent = ranks // 2, [0, 0], [0] * ranks

        def wire(source, to, tensor):
            if source != to:
                sent[source] += tensor.numel()
                if (source < half) != (to < half):
                    crossed[source < half] += tensor.numel()
            return tensor.clone()

        size = rows * ranks * half
        buffers = [torch.arange(size, dtype=torch.float64) * 2**r for r in range(ranks)]
        found = answer([each.clone() for each in buffers], wire)
        expected = torch.stack(buffers).sum(0)
        return {
            "sums are right": all(torch.equal(each, expected) for each in found),
            "elements that cross, in each direction": crossed,
            "elements that each rank sends": sent,
        }
