"""Chapter 7: ZeRO-3."""

import torch

from minizero import comm, launch
from minizero.lab.course import Exercise, Wrong
from minizero.lab.course.drivers import PATIENCE, Odd, digest, rows, seen_on, train
from minizero.ranks import rank
from minizero.zero import ZeRO3


class LessThanParameters(Exercise):
    label = "ex-zero3-1"
    answer = "from_ranks"
    book = {"kinds": [[2, 2, 12], [4, 4, 8], [4, 4, 0]]}
    starter = """
def from_ranks(parameter: int, gradient: int, state: int) -> int:
    # The fewest ranks on which all that ZeRO-3 keeps is less than the parameters
    # alone, from the bytes of each that one parameter has.
    return 0
"""
    public = """
assert from_ranks(4, 0, 0) == 2
"""
    reference = """
def from_ranks(parameter, gradient, state):
    n = 1
    while (parameter + gradient + state) / n >= parameter:
        n += 1
    return n
"""
    wrong = (
        Wrong(
            "equal",
            ">= parameter",
            "> parameter",
            "At this number of ranks both take the same: less needs one more.",
        ),
        Wrong(
            "no state",
            "gradient + state",
            "gradient",
            "You left out the optimizer state: ZeRO-3 keeps a shard of it too.",
        ),
        Wrong(
            "all of ZeRO-2",
            ">= parameter",
            ">= parameter + (gradient + state) / n",
            "You compared with all that ZeRO-2 keeps: the question is about its "
            "parameters alone.",
        ),
    )

    def draw(self, rng):
        kinds = [[2, 4, 12], [1, 2, 12], [2, 2, 8], [4, 4, 4], [2, 2, 4], [1, 1, 6]]
        return [{"kinds": rng.sample(kinds, 3)} for _ in range(2)]

    @staticmethod
    def run(answer, kinds):
        return [answer(*each) for each in kinds]


class Accumulation(Exercise):
    label = "ex-zero3-2"
    answer = "sent"
    book = {"micro": 4}
    starter = """
def sent(micro: int) -> tuple[float, float]:
    # What plans 2 and 3 send in a step of so many micro-batches, in units of psi
    # (N-1)/N.
    return 0.0, 0.0
"""
    public = """
assert sent(1) == (2, 3)
"""
    reference = """
def sent(micro):
    return micro + 1, 3 * micro
"""
    wrong = (
        Wrong(
            "one micro-batch",
            "micro + 1, 3 * micro",
            "2, 3",
            "You counted a single micro-batch: plan 2 reduces after each of them, and"
            " plan 3 gathers for each.",
        ),
        Wrong(
            "all repeated",
            "micro + 1",
            "2 * micro",
            "Plan 2 gathers its parameters after the step, once, however many micro-"
            "batches there are.",
        ),
        Wrong(
            "gathered once",
            "3 * micro",
            "micro + 2",
            "Plan 3 frees what it has gathered: each micro-batch gathers again, twice.",
        ),
    )
    explain = "That 2,048 tokens, not the 8,192 of a step, are too few to hide it."

    def draw(self, rng):
        return [{"micro": m} for m in rng.sample([2, 3, 5, 6, 7, 8, 12, 16], 3)]


class KeepGathered(Exercise):
    label = "ex-zero3-3"
    on_ranks = True
    answer = "Kept"
    points = 6
    starter = """
from minizero.zero import ZeRO3


class Kept(ZeRO3):
    "ZeRO-3 that releases a unit after backward only."
"""
    public = """
assert issubclass(Kept, ZeRO3)
"""
    reference = """
from minizero.zero import ZeRO3


class Kept(ZeRO3):
    def _leave(self, unit):
        if self.in_backward:
            super()._leave(unit)
"""
    wrong = (
        Wrong(
            "unsharded",
            "",
            """
from minizero.zero import ZeRO2


class Kept(ZeRO2):
    pass
""",
            "Parameters are not sharded any more: between steps every rank keeps all "
            "of them.",
        ),
        Wrong(
            "unchanged",
            "        if self.in_backward:\n            super()._leave(unit)",
            "        super()._leave(unit)",
            "Units are still released after forward, and gathered a second time.",
        ),
        Wrong(
            "never released",
            "        if self.in_backward:\n            super()._leave(unit)",
            "        pass",
            "Nothing is released after backward either: the next micro-batch finds "
            "every unit unsharded, and until the update a rank holds all parameters.",
        ),
    )

    def draw(self, rng):
        odd = rng.sample([11, 13, 15, 17, 19], 2)
        return [
            {"ranks": 2, "width": odd[0], "micro": 3},
            {"ranks": 3, "width": odd[1], "micro": 2},
        ]

    @staticmethod
    def run(answer, ranks, width, micro):
        return seen_on(ranks, train, answer, width, micro, look=True)


class AverageOfWeights(Exercise):
    label = "ex-zero3-4"
    on_ranks = True
    answer = "Average"
    points = 6
    starter = """
class Average:
    # A running average of a net's weights. All ranks call `update` after each step,
    # and `state_dict` at the end, which returns the average on rank 0, named as by
    # `net.state_dict()`. The net itself goes on as before.
    def __init__(self, net, rate: float):
        self.net, self.rate = net, rate
        named = net.model.named_parameters()
        self.average = {name: p.detach().clone() for name, p in named}

    def update(self):
        for name, p in self.net.model.named_parameters():
            self.average[name].lerp_(p.detach(), self.rate)

    def state_dict(self):
        return self.average
"""
    public = """
assert callable(Average.update) and callable(Average.state_dict)
"""
    reference = """
class Average:
    def __init__(self, net, rate):
        self.net, self.rate = net, rate
        self.shards = [flat.shard.clone() for flat in net.flats]

    def update(self):
        for average, flat in zip(self.shards, self.net.flats):
            average.lerp_(flat.shard, self.rate)

    def exchange(self):
        for average, flat in zip(self.shards, self.net.flats):
            own = flat.shard.clone()
            flat.shard.copy_(average)
            average.copy_(own)

    def state_dict(self):
        self.exchange()
        weights = self.net.state_dict()
        self.exchange()
        return weights
"""
    wrong = (
        Wrong(
            "of freed parameters",
            "",
            starter,
            "Between steps the parameters are freed and read as NaN, and so does their "
            "average.",
        ),
        Wrong(
            "gathered each step",
            "",
            """
class Average:
    def __init__(self, net, rate):
        self.net, self.rate = net, rate
        self.average = net.state_dict()

    def update(self):
        for name, value in self.net.state_dict().items():
            self.average[name].lerp_(value, self.rate)

    def state_dict(self):
        return self.average
""",
            "Each update gathers all weights: the average of a shard needs no other "
            "shard.",
        ),
        Wrong(
            "left in the net",
            "        weights = self.net.state_dict()\n        self.exchange()\n",
            "        weights = self.net.state_dict()\n",
            "The net is left with the average, and would train on from there.",
        ),
        Wrong(
            "the last weights",
            "        self.exchange()\n        weights = self.net.state_dict()\n"
            "        self.exchange()\n",
            "        weights = self.net.state_dict()\n",
            "You return the net's own weights, not their average.",
        ),
    )
    explain = "What the script's `average` holds, and from when on."

    def draw(self, rng):
        odd = rng.sample([7, 9, 11, 13], 2)
        return [
            {"ranks": n, "width": w, "rate": rng.choice([0.1, 0.2, 0.3])}
            for n, w in zip((2, 3), odd, strict=True)
        ]

    @staticmethod
    def run(answer, ranks, width, rate):
        def averaged():
            model = Odd(width)
            net = ZeRO3(model, torch.optim.AdamW(model.parameters(), lr=0.1))
            average = answer(net, rate)
            with comm.ledger() as calls:
                for step in range(3):
                    net.backward(net(rows(width, step, 0)))
                    net.step()
                    average.update()
            found = average.state_dict()
            bad = [name for name, w in found.items() if w.isnan().any()]
            norms = {k: w.nan_to_num().norm().item() for k, w in found.items()}
            weights = net.state_dict()
            return {
                "elements sent in steps": calls.sent(),
                "NaN in": len(bad),
                "norms of the average": norms,
                "weights of the net": digest(weights) if rank() == 0 else "",
            }

        return launch(averaged, ranks, timeout=PATIENCE)[0]


class SmallUnits(Exercise):
    label = "ex-zero3-5"
    on_ranks = True
    answer = "Persistent"
    points = 8
    starter = """
from minizero.zero import ZeRO3


class Persistent(ZeRO3):
    # ZeRO-3 whose units of fewer than `threshold` elements, with padding, are never
    # released.

    threshold = 20_000
"""
    public = """
assert issubclass(Persistent, ZeRO3) and Persistent.threshold
"""
    reference = """
from minizero.zero import ZeRO3


class Persistent(ZeRO3):
    threshold = 20_000

    def stays(self, unit):
        return sum(flat.padded for flat in unit.flats) < self.threshold

    def release(self, unit):
        if not self.stays(unit):
            super().release(unit)

    def publish(self, unit):
        super().release(unit)
        if self.stays(unit):
            self.gather(unit)
"""
    wrong = (
        Wrong(
            "not published",
            "        super().release(unit)\n"
            "        if self.stays(unit):\n"
            "            self.gather(unit)",
            "        self.release(unit)",
            "After the update the unsharded copy is old: nothing brings the new "
            "values into it, so the second step computes with stale weights.",
        ),
        Wrong(
            "gathered anyway",
            "        if not self.stays(unit):\n            super().release(unit)",
            "        super().release(unit)",
            "Small units are still released after use, and gathered again each time.",
        ),
        Wrong(
            "all stay",
            "return sum(flat.padded for flat in unit.flats) < self.threshold",
            "return True",
            "Large units stay as well: compare their elements with `threshold`.",
        ),
        Wrong(
            "unsharded",
            "",
            """
from minizero.zero import ZeRO2


class Persistent(ZeRO2):
    threshold = 20_000
""",
            "Parameters are not sharded any more: between steps every rank keeps all "
            "of them.",
        ),
    )

    def draw(self, rng):
        odd = rng.sample([11, 13, 15, 17], 2)
        return [
            {"ranks": n, "width": w, "threshold": rng.randint(80, 130)}
            for n, w in zip((2, 3), odd, strict=True)
        ]

    @staticmethod
    def run(answer, ranks, width, threshold):
        kind = type(answer.__name__, (answer,), {"threshold": threshold})
        return seen_on(ranks, train, kind, width, 1, look=True)


class ARowMore(Exercise):
    label = "ex-zero3-6"
    on_ranks = True
    answer = "evaluate"
    points = 6
    starter = """
import torch


def evaluate(net, batches: list) -> float:
    # Called on every rank with batches of its own, on some with more than on others:
    # the mean loss over all ranks' batches, on every rank.
    with torch.no_grad():
        return sum(net(x).item() for x in batches) / len(batches)
"""
    public = """
assert callable(evaluate)
"""
    reference = """
import torch

from minizero import comm
from minizero.ranks import rank, world_size


def evaluate(net, batches):
    counts = torch.zeros(world_size())
    counts[rank()] = len(batches)
    comm.all_reduce(counts)
    total = torch.zeros(1)
    with torch.no_grad():
        for i in range(int(counts.max())):
            loss = net(batches[min(i, len(batches) - 1)])
            total += loss if i < len(batches) else 0
    comm.all_reduce(total)
    return total.item() / counts.sum().item()
"""
    wrong = (
        Wrong(
            "as many as it has",
            "range(int(counts.max()))",
            "range(len(batches))",
            "Ranks with a batch more wait for shards that nobody sends: under ZeRO-3 "
            "every rank must run as many forwards as the others.",
        ),
        Wrong(
            "repeated ones counted",
            "loss if i < len(batches) else 0",
            "loss",
            "A batch that a rank runs again for the others' sake counts twice.",
        ),
        Wrong(
            "mean of means",
            "    comm.all_reduce(total)\n    return total.item() / counts.sum().item()",
            "    total /= len(batches)\n    comm.all_reduce(total, average=True)\n"
            "    return total.item()",
            "You took the mean of the ranks' means: a rank with fewer batches counts "
            "as much as one with more.",
        ),
        Wrong(
            "the last ones left out",
            "range(int(counts.max()))",
            "range(int(counts.min()))",
            "You left out the batches that some ranks have more than others.",
        ),
        Wrong(
            "own part",
            "    comm.all_reduce(total)\n    return total.item() / counts.sum().item()",
            "    return total.item() / len(batches)",
            "Each rank returns the mean of its own batches: add the sums of all ranks.",
        ),
    )
    explain = "What each rank is doing when the starter stops."

    def draw(self, rng):
        odd = rng.sample([7, 9, 11, 13], 2)
        return [
            {"ranks": n, "width": w, "batches": n * rng.randint(2, 4) + n - 1}
            for n, w in zip((2, 3), odd, strict=True)
        ]

    @staticmethod
    def run(answer, ranks, width, batches):
        def evaluated():
            model = Odd(width)
            net = ZeRO3(model, torch.optim.SGD(model.parameters(), lr=0.01))
            torch.manual_seed(width)
            every = [k * torch.randn(4, width) for k in range(1, batches + 1)]
            with comm.algorithm("direct"):
                return answer(net, every[rank() :: ranks])

        found = launch(evaluated, ranks, timeout=PATIENCE)
        return {f"mean on rank {r}": float(each) for r, each in enumerate(found)}
