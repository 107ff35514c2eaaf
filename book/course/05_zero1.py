"""Chapter 5: ZeRO-1."""

from minizero.lab.course import Exercise, Wrong, always_fails
from minizero.lab.course.drivers import kills, seen_on, train
from minizero.zero import ZeRO1


class OtherOptimizers(Exercise):
    label = "ex-zero1-1"
    answer = "shrinks"
    book = {"ranks": 8}
    starter = """
def shrinks(ranks: int) -> tuple[float, float, float]:
    # Without ZeRO over with ZeRO-1, model state of a rank: SGD with momentum and
    # plain SGD, both in mixed precision; plain SGD in fp32.
    return 0.0, 0.0, 0.0
"""
    public = """
assert shrinks(1) == (1, 1, 1)  # one rank has nobody to share with
"""
    reference = """
def shrinks(ranks):
    momentum = (2 + 2 + 4 + 4) / (2 + 2 + (4 + 4) / ranks)
    plain = (2 + 2 + 4) / (2 + 2 + 4 / ranks)
    return momentum, plain, 1.0
"""
    wrong = (
        Wrong(
            "no master",
            "",
            """
def shrinks(ranks):
    return (2 + 2 + 4) / (2 + 2 + 4 / ranks), 1.0, 1.0
""",
            "You left out the fp32 master copy: in mixed precision it is optimizer "
            "state, even without moments.",
        ),
        Wrong(
            "the limit",
            "/ ranks",
            "* 0",
            "You gave the limit for infinitely many ranks: on N of them a shard of "
            "the state is left.",
        ),
        Wrong(
            "Adam",
            "4 + 4)",
            "4 + 8)",
            "You counted Adam's two moments: momentum is one number per parameter.",
        ),
    )

    def draw(self, rng):
        return [{"ranks": n} for n in rng.sample([3, 5, 6, 12, 20, 24, 48, 96], 2)]


class Padding(Exercise):
    label = "ex-zero1-2"
    answer = "predict"
    book = {"buffers": [16000, 100, 650, 30000, 650, 30000], "ranks": 4, "bucket": 1000}
    starter = """
def predict(buffers: list[int], ranks: int, bucket: int) -> tuple[int, int, int]:
    # For flat buffers of so many elements and `bucket_size=bucket`: elements of
    # padding, elements that a rank sends in a step of ZeRO-1, and its calls.
    return 0, 0, 0
"""
    public = """
assert predict([8], 4, 1000) == (0, 12, 2)  # 6 of gradients, 6 of parameters
"""
    reference = """
def predict(buffers, ranks, bucket):
    padding = sent = calls = 0
    for elements in buffers:
        shard = -(-elements // ranks)
        piece = max(1, bucket // ranks)  # of a shard
        padding += shard * ranks - elements
        sent += 2 * shard * (ranks - 1)
        calls += -(-shard // piece) + 1
    return padding, sent, calls
"""
    wrong = (
        Wrong(
            "padding not sent",
            "2 * shard * (ranks - 1)",
            "2 * elements * (ranks - 1) // ranks",
            "You left the padding out of what is sent: it travels like every other "
            "element.",
        ),
        Wrong(
            "gathers cut",
            "-(-shard // piece) + 1",
            "2 * -(-shard // piece)",
            "You cut the all-gathers into buckets as well: `bucket_size` cuts "
            "reductions only.",
        ),
        Wrong(
            "bucket of a shard",
            "bucket // ranks",
            "bucket",
            "You let each shard have a bucket: a bucket's elements are of all shards "
            "together.",
        ),
        Wrong(
            "full buckets",
            "-(-shard // piece) + 1",
            "-(-elements // bucket) + 1",
            "You filled every bucket to the last element: it takes equally many of "
            "each shard, `bucket // ranks`, and the padding is among them.",
        ),
    )

    def draw(self, rng):
        def case():
            ranks = rng.choice([3, 4, 5, 6])
            buffers = [
                ranks * rng.randint(300, 900) + rng.randint(1, ranks - 1)
                for _ in range(4)
            ]
            bucket = rng.randint(100, 700)
            return {"buffers": buffers, "ranks": ranks, "bucket": bucket}

        return self.telling(case, 2)


class Wasteful(Exercise):
    label = "ex-zero1-3"
    on_ranks = True
    answer = "AllReduceFirst"
    points = 6
    starter = """
from minizero.zero import DataParallel, ZeRO1


class AllReduceFirst(ZeRO1):
    "ZeRO-1 that all-reduces gradients, and then shards."
"""
    public = """
assert issubclass(AllReduceFirst, ZeRO1)
"""
    reference = """
from minizero.zero import DataParallel, ZeRO1


class AllReduceFirst(ZeRO1):
    reduce = DataParallel.reduce
"""
    wrong = (
        Wrong(
            "unsharded",
            "",
            """
from minizero.zero import DataParallel


class AllReduceFirst(DataParallel):
    pass
""",
            "Nothing is sharded: every rank keeps the whole optimizer state and "
            "updates all parameters. Weights are equal, memory is not.",
        ),
        Wrong(
            "unchanged",
            "    reduce = DataParallel.reduce",
            "    pass",
            "That is ZeRO-1 itself: its gradients still arrive by a reduce-scatter.",
        ),
        Wrong(
            "owns all",
            "    reduce = DataParallel.reduce",
            "    reduce = DataParallel.reduce\n"
            "\n"
            "    def owned(self, buffer, flat):\n"
            "        return buffer",
            "`owned` returns the whole buffer, so the optimizer updates all of it, on"
            " every rank.",
        ),
        Wrong(
            "plan 0's steps",
            "    reduce = DataParallel.reduce",
            "    reduce = DataParallel.reduce\n    publish = DataParallel.publish",
            "Each rank updates its shard, and nobody sends it to the others: "
            "`publish` is needed.",
        ),
    )

    def draw(self, rng):
        odd = rng.sample([11, 13, 15, 17, 19], 2)
        return [
            {"ranks": 2, "width": odd[0], "micro": 1},
            {"ranks": 3, "width": odd[1], "micro": rng.choice([2, 4])},
        ]

    @staticmethod
    def run(answer, ranks, width, micro):
        return seen_on(ranks, train, answer, width, micro, look=True)


class TheNorm(Exercise):
    label = "ex-zero1-4"
    on_ranks = True
    answer = "check_norm"
    points = 6
    starter = """
from minizero.lab.course.drivers import train  # see its docstring
from minizero.zero import DataParallel


def check_norm(kind: type) -> None:
    # A test that runs on every rank: an AssertionError if `kind`, a ZeRO1 or a
    # class like it, clips by another norm than plan 0. `train(kind, 13, clip=0.1)`
    # trains it.
    found = train(kind, 13, clip=0.1)
    assert found["losses"]
"""
    public = """
from minizero import launch
from minizero.zero import ZeRO1

passed = launch(check_norm, 2, ZeRO1)  # nothing is wrong with it
"""
    reference = """
from minizero.lab.course.drivers import train
from minizero.zero import DataParallel


def check_norm(kind):
    key = "gradient norms"
    assert train(kind, 13, clip=0.1)[key] == train(DataParallel, 13, clip=0.1)[key]
"""
    wrong = (
        Wrong(
            "compares ranks",
            "",
            """
from minizero.comm import gather_objects
from minizero.lab.course.drivers import train


def check_norm(kind):
    norms = gather_objects(train(kind, 13, clip=0.1)["gradient norms"])
    assert len(set(norms)) == 1
""",
            "You compared ranks with each other: they can all have the same wrong "
            "norm. Compare with plan 0.",
        ),
        Wrong(
            "looks at nothing",
            "",
            """
from minizero.lab.course.drivers import train


def check_norm(kind):
    assert train(kind, 13, clip=0.1)["elements sent"] > 0
""",
            "Your test passes whatever the norm is: the all-gather makes weights "
            "agree, and the loss goes down.",
        ),
        always_fails("assert train("),
    )

    def draw(self, rng):
        mutants = ["of one's own shards", "divided by the ranks", "of the first shard"]
        return [{"ranks": rng.choice([2, 3]), "mutant": name} for name in mutants]

    @staticmethod
    def run(answer, ranks, mutant):
        def make(name):
            class Subject(ZeRO1):
                def all_rows(self, mine):
                    every = super().all_rows(mine)
                    if name == "of one's own shards":
                        return mine
                    if name == "of the first shard":
                        return every[:1]
                    return every / len(every) if name else every

            return Subject

        return kills(ranks, answer, make, mutant)


class WholeTensors(Exercise):
    label = "ex-zero1-5"
    answer = "shares"
    points = 6
    block = [6912, 144, 2304, 48, 48, 48, 9216, 192, 9216, 48, 48, 48]
    book = {"sizes": [12288, 6144, 48, 48, *block * 3], "ranks": [4, 8, 16]}
    starter = """
def shares(sizes: list[int], ranks: list[int]) -> list[float]:
    # For each number of ranks: the largest rank's share over the mean, when whole
    # tensors go to the rank with least so far, largest first.
    return [0.0 for _ in ranks]
"""
    public = """
assert shares([5, 5, 5, 5], [1, 2, 4]) == [1, 1, 1]
"""
    reference = """
def shares(sizes, ranks):
    found = []
    for n in ranks:
        load = [0] * n
        for size in sorted(sizes, reverse=True):
            load[load.index(min(load))] += size
        found.append(max(load) * n / sum(sizes))
    return found
"""
    wrong = (
        Wrong(
            "unsorted",
            "sorted(sizes, reverse=True)",
            "sizes",
            "You took the tensors in the model's order: the largest go first.",
        ),
        Wrong(
            "by count",
            "",
            """
def shares(sizes, ranks):
    found = []
    for n in ranks:
        load = [0] * n
        for i, size in enumerate(sorted(sizes, reverse=True)):
            load[i % n] += size
        found.append(max(load) * n / sum(sizes))
    return found
""",
            "You dealt the tensors round in turn: each goes to the rank with the "
            "fewest elements so far.",
        ),
        Wrong(
            "elements",
            "max(load) * n / sum(sizes)",
            "float(max(load))",
            "You gave the largest rank's elements: divide them by the mean over ranks.",
        ),
    )
    explain = (
        "Unequal shards: reductions and broadcasts of unequal pieces instead of one "
        "reduce-scatter and one all-gather, or padding to the largest."
    )

    def draw(self, rng):
        cases = []
        for _ in range(2):
            w = 2 * rng.randint(10, 60)
            block = [3 * w * w, 3 * w, w * w, w, 4 * w * w, 4 * w, 4 * w * w, w, w, w]
            sizes = [256 * w, 64 * w, *block * rng.randint(2, 5)]
            rng.shuffle(sizes)
            cases.append({"sizes": sizes, "ranks": sorted(rng.sample(range(3, 20), 3))})
        return cases
