"""Chapter 8: overlap."""

import torch

from minizero import Plan, comm, launch, parallelize
from minizero.lab import hardware
from minizero.lab.course import Exercise, Wrong
from minizero.lab.course.drivers import PATIENCE, Odd, digest, rows
from minizero.overlap.simulator import Machine
from minizero.ranks import rank
from minizero.zero import ZeRO2


class ShortLedger(Exercise):
    label = "ex-overlap-6"
    answer = "exposed"
    book = {"calls": [[0, 1, 2, 6], [1, 2, 9, 10], [14, 15, 15, 18]]}
    starter = """
def exposed(calls: list[list[int]]) -> tuple[int, int]:
    # Of each call `launched`, `returned`, `waited` and `finished`, in ms: how long the
    # rank waits in all, and how many calls it launched ahead.
    return 0, 0
"""
    public = """
assert exposed([[0, 1, 3, 5]]) == (2, 0)
"""
    reference = """
def exposed(calls):
    waits = sum(finished - waited for _, _, waited, finished in calls)
    ahead = sum(any(a[0] < b[0] < a[2] for a in calls) for b in calls)
    return waits, ahead
"""
    wrong = (
        Wrong(
            "under way",
            "finished - waited for _, _, waited",
            "finished - launched for launched, _, _",
            "You added up how long calls are under way: the rank may compute then.",
        ),
        Wrong(
            "launches too",
            "finished - waited for _, _, waited",
            "finished - waited + back - since for since, back, waited",
            "You counted launching: the rank waits only from `waited` to `finished`.",
        ),
        Wrong(
            "waited for later",
            "any(a[0] < b[0] < a[2] for a in calls)",
            "b[1] < b[2]",
            "You counted calls that are waited for later than they return: ahead is "
            "what is launched before the rank waits for an earlier call.",
        ),
    )

    def draw(self, rng):
        return [{"calls": ledger(rng)} for _ in range(3)]


def ledger(rng):
    """Calls of one rank, of which some are launched one ahead."""
    now, calls, ahead = 0, [], None
    early = [True, False, *(rng.random() < 0.5 for _ in range(4))]
    rng.shuffle(early)
    for is_early in [*early, False]:
        mine = ahead or [now, now + rng.randint(1, 2)]
        now = max(now, mine[1])
        ahead = [now, now + rng.randint(1, 2)] if is_early else None
        now = ahead[1] if ahead else now
        waited, now = now, now + rng.randint(1, 6)
        calls.append([*mine, waited, now])
        now += rng.randint(1, 9)
    return calls


class Megabytes(Exercise):
    label = "ex-overlap-1"
    answer = "settings"
    book = {"bucket": 500_000_000, "threshold": 1_000_000, "sizes": [4096, 4096 * 4096]}
    starter = """
def settings(
    bucket: int, threshold: int, sizes: list[int]
) -> tuple[float, float, list[bool]]:
    # GB of a bucket in bf16 and in fp32; which parameters of a block, of so many
    # elements each, stay unsharded in DeepSpeed on 8 ranks.
    return 0.0, 0.0, []
"""
    public = """
assert settings(10**9, 10, [1])[2] == [True]
"""
    reference = """
def settings(bucket, threshold, sizes):
    return 2 * bucket / 1e9, 4 * bucket / 1e9, [size < threshold for size in sizes]
"""
    wrong = (
        Wrong(
            "bytes",
            "2 * bucket / 1e9, 4 * bucket / 1e9",
            "bucket / 1e9, bucket / 1e9",
            "You read the bucket's size as bytes: it counts elements.",
        ),
        Wrong(
            "of the block",
            "size < threshold for size",
            "sum(sizes) < threshold for size",
            "You compared the whole block: DeepSpeed compares single parameters.",
        ),
        Wrong(
            "of a shard",
            "size < threshold",
            "size / 8 < threshold",
            "You compared a rank's share: the threshold is of the whole parameter.",
        ),
    )

    def draw(self, rng):
        cases = []
        for _ in range(2):
            threshold = rng.randint(1, 9) * 10**5
            parts = [0.2, rng.choice([0.7, 0.9]), rng.choice([1.5, 3]), 20]
            sizes = [int(threshold * part) for part in parts]
            rng.shuffle(sizes)
            bucket = rng.randint(11, 97) * 10**7
            cases.append({"bucket": bucket, "threshold": threshold, "sizes": sizes})
        return cases


MACHINE = 8, 20e-6, hardware.H100.network


class HowFarAhead(Exercise):
    label = "ex-overlap-2"
    answer = "seconds"
    points = 6
    book = {"tokens": 6400, "hidden": 4096, "count": 32, "ahead": [0, 1, 2, 4]}
    starter = """
from minizero import Overlap, Plan
from minizero.lab.course.drivers import layers  # units for the simulator
from minizero.overlap.simulator import Machine, simulate


def seconds(
    sizes: list[int], tokens: int, flops: float, machine: Machine, ahead: list[int]
) -> tuple[list[float], int]:
    # A step of ZeRO-3 for each number of blocks ahead; the first beyond which a larger
    # one gains less than 1 ms. `layers(sizes, tokens, flops)` makes the units: the
    # root first, then equal blocks. Keep no unit unsharded.
    return [0.0 for _ in ahead], 0
"""
    public = """
times, first = seconds([10, 100, 100], 64, 1e12, Machine(8, 0, 1e9), [0])
assert len(times) == 1 and first == 0
"""
    reference = """
from minizero import Overlap, Plan
from minizero.lab.course.drivers import layers
from minizero.overlap.simulator import simulate


def seconds(sizes, tokens, flops, machine, ahead):
    found = []
    for blocks in ahead:
        schedule = Overlap(blocks * sizes[-1], param_persistence_threshold=0)
        units = layers(sizes, tokens, flops)
        step = simulate(units, machine, Plan.stage(3), schedule)
        found.append(step.duration)
    return found, next(n for n, t in zip(ahead, found) if t - min(found) < 1e-3)
"""
    wrong = (
        Wrong(
            "blocks, not elements",
            "blocks * sizes[-1]",
            "blocks",
            "Your limit is less than a block: the setting counts elements of blocks.",
        ),
        Wrong(
            "no limit",
            "blocks * sizes[-1]",
            "10**12",
            "You set no limit to what is gathered ahead.",
        ),
        Wrong(
            "at stage 2",
            "Plan.stage(3)",
            "Plan.stage(2)",
            "You simulated ZeRO-2, which gathers nothing before a forward.",
        ),
    )
    explain = (
        "Of how many ranks 6,400 tokens exceed the break-even, and why so many blocks "
        "are enough: what stands in the queue for the link."
    )

    def draw(self, rng):
        return [
            {
                "tokens": rng.randint(45, 80) * 100,
                "hidden": 128 * rng.randint(20, 40),
                "count": rng.randint(10, 30),
                "ahead": [0, 1, 2, 3, 5],
                "words": words,
            }
            for words in (2_000, 64_000)
        ]

    @staticmethod
    def run(answer, tokens, hidden, count, ahead, words=64_000):
        sizes = [words * hidden] + [12 * hidden**2] * count
        flops, machine = hardware.H100.flops, Machine(*MACHINE)
        return answer(sizes, tokens, flops, machine, ahead)


class TwoUnderWay(Exercise):
    label = "ex-overlap-3"
    on_ranks = True
    answer = "Later"
    points = 6
    starter = """
from minizero import Overlap
from minizero.zero import Action


class Later(Overlap):
    "Waits for a reduction when the second after it is launched."
"""
    public = """
assert issubclass(Later, Overlap)
"""
    reference = """
from minizero import Overlap
from minizero.zero import Action


class Later(Overlap):
    def grads_ready(self, unit):
        before = self._reducing
        self._reducing = [*before[-1:], unit]
        late = [Action("wait", u) for u in before[:-1]]
        return [*late, Action("reduce", unit)]
"""
    wrong = (
        Wrong(
            "unchanged",
            "before[:-1]",
            "before",
            "A reduction is still waited for when the next one is launched.",
        ),
        Wrong(
            "nothing launched",
            'return [*late, Action("reduce", unit)]',
            "return []",
            "You launch nothing, so gradients are never averaged: wait later, and "
            "launch as before.",
        ),
        Wrong(
            "waits at once",
            'Action("reduce", unit)]',
            'Action("reduce", unit), Action("wait", unit)]',
            "You wait for each reduction at once, which is earlier than `Overlap` "
            "does.",
        ),
        Wrong(
            "never waits",
            'return [*late, Action("reduce", unit)]',
            'return [Action("reduce", unit)]',
            "You wait for no reduction before the end of backward, so all full "
            "gradients exist at once: at most two may be under way.",
        ),
    )
    explain = "What it costs, in bytes of gradients, and why nothing is gained."

    def draw(self, rng):
        odd = rng.sample([11, 13, 15, 17], 2)
        return [{"ranks": n, "width": w} for n, w in zip((2, 3), odd, strict=True)]

    @staticmethod
    def run(answer, ranks, width):
        def trained():
            from minizero import Tracker

            model = Odd(width, depth=6)
            adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
            net = ZeRO2(model, adamw, schedule=answer())
            for step in range(2):
                with comm.algorithm("direct"), comm.ledger() as calls, Tracker() as t:
                    net.backward(net(rows(width, step, 0)))
                    net.step()
            return {
                "most bytes of gradients": t.peaks["gradients"],
                "elements sent": calls.sent(),
                "weights": digest(net.state_dict()) if rank() == 0 else "",
            }

        return launch(trained, ranks, timeout=PATIENCE)[0]


class OnlyWhenOnTime(Exercise):
    label = "ex-overlap-4"
    on_ranks = True
    answer = "WhenOnTime"
    points = 6
    starter = """
import torch

from minizero import Overlap, comm


class WhenOnTime(Overlap):
    # Repair it: no rank fetches ahead while any of them is late.
    def late(self) -> bool:
        return False  # measured on this rank; the grader has its own

    def needed(self, unit):
        actions = super().needed(unit)
        if self.late():
            actions = [a for a in actions if a.unit is unit]
        return actions
"""
    public = """
assert issubclass(WhenOnTime, Overlap)
"""
    reference = """
import torch

from minizero import Overlap, comm


class WhenOnTime(Overlap):
    def late(self):
        return False

    def needed(self, unit):
        actions = super().needed(unit)
        late = torch.tensor([float(self.late())])
        comm.all_reduce(late)
        if late:
            actions = [a for a in actions if a.unit is unit]
        return actions
"""
    wrong = (
        Wrong(
            "each for itself",
            "        comm.all_reduce(late)\n",
            "",
            "Each rank decides by what it measures itself: ranks launch different "
            "calls at"
            " the same place, and each waits for a message that nobody sends.",
        ),
        Wrong(
            "never late",
            "        if late:\n"
            "            actions = [a for a in actions if a.unit is unit]\n",
            "",
            "You fetch ahead although a rank is late: all have to know when any is.",
        ),
        Wrong(
            "always late",
            "        if late:\n"
            "            actions = [a for a in actions if a.unit is unit]\n",
            "        actions = [a for a in actions if a.unit is unit]\n",
            "You never fetch ahead: while all ranks are on time, they should.",
        ),
    )

    def draw(self, rng):
        return [
            {
                "ranks": n,
                "width": rng.choice([11, 13, 15]),
                "slow": rng.randint(1, n - 1),
            }
            for n in (2, 3)
        ]

    @staticmethod
    def run(answer, ranks, width, slow):
        def trained():
            now = [0]

            class Measured(answer):
                def late(self):
                    return rank() == slow and now[0] % 2 == 1

            model = Odd(width)
            adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
            schedule = Measured(10**6, param_persistence_threshold=0)
            net = parallelize(model, adamw, Plan.stage(3), schedule=schedule)
            ahead = []
            for step in range(4):
                now[0] = step
                with comm.algorithm("direct"), comm.ledger() as calls:
                    net.backward(net(rows(width, step, 0)))
                    net.step()
                gathers = calls.select("all_gather")
                early = any(
                    b.launched < a.waited
                    for a, b in zip(gathers, gathers[1:], strict=False)
                )
                ahead.append(early)
            weights = digest(net.state_dict())
            return {"fetches ahead, step by step": ahead[2:], "weights": weights}

        return launch(trained, ranks, timeout=PATIENCE)[0]


class WhichThreshold(Exercise):
    label = "ex-overlap-5"
    answer = "table"
    points = 8
    book = {"hidden": 4096, "count": 32, "tokens": [2048, 16_384]}
    starter = """
from minizero import Overlap, Plan
from minizero.lab.course.drivers import layers  # units for the simulator
from minizero.overlap.simulator import Machine, simulate


def table(
    root: int, pieces: list[int], blocks: int, tokens: int, flops: float,
    machine: Machine, thresholds: list[int],
) -> list[tuple[float, float]]:
    # For each threshold: seconds of a step of ZeRO-3, and MB kept unsharded in bf16.
    # Every piece of every block is a unit of its own: `layers(sizes, tokens, flops)`
    # makes them. Set no other limit: `Overlap(10**9, 10**10, threshold)`.
    return [(0.0, 0.0) for _ in thresholds]
"""
    public = """
assert len(table(8, [8, 80], 2, 64, 1e12, Machine(8, 0, 1e9), [0, 10])) == 2
"""
    reference = """
from minizero import Overlap, Plan
from minizero.lab.course.drivers import layers
from minizero.overlap.simulator import simulate


def table(root, pieces, blocks, tokens, flops, machine, thresholds):
    found = []
    for threshold in thresholds:
        kept = blocks * sum(n for n in pieces if n < threshold)
        kept += root if root < threshold else 0
        units = layers([root] + pieces * blocks, tokens, flops)
        schedule = Overlap(10**9, 10**10, threshold)
        step = simulate(units, machine, Plan.stage(3), schedule)
        found.append((step.duration, 2 * kept / 1e6))
    return found
"""
    wrong = (
        Wrong(
            "root left out",
            "kept += root if root < threshold else 0",
            "kept += 0",
            "You left the root out of what is kept: it is a unit like the others.",
        ),
        Wrong(
            "elements",
            "2 * kept / 1e6",
            "kept / 1e6",
            "You gave millions of elements: in bf16 each has two bytes.",
        ),
        Wrong(
            "a block is a unit",
            "[root] + pieces * blocks",
            "[root] + [sum(pieces)] * blocks",
            "You made a unit of each block: here every parameter is one.",
        ),
    )
    explain = "The threshold chosen at few tokens and at many, and why they differ."

    def draw(self, rng):
        return [
            {
                "hidden": 64 * rng.randint(30, 60),
                "count": rng.randint(4, 10),
                "tokens": [rng.randint(10, 30) * 64, rng.randint(200, 300) * 64],
            }
        ]  # fmt: skip

    @staticmethod
    def run(answer, hidden, count, tokens):
        h, root = hidden, 64_000 * hidden
        pieces = [h * h] * 4 + [4 * h * h] * 2 + [h] * 13
        flops, machine = hardware.H100.flops, Machine(*MACHINE)
        limits = [0, h + 1, h * h + 1, 10**9]
        return [
            answer(root, pieces, count, each, flops, machine, limits) for each in tokens
        ]
