"""Chapter 7: ZeRO-3."""

import os
import tempfile

import torch

from minizero import comm, launch
from minizero.lab.course import Exercise, Wrong
from minizero.lab.course.drivers import PATIENCE, Odd, digest, rows, seen_on, train
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


class TheCheckpoint(Exercise):
    label = "ex-zero3-4"
    on_ranks = True
    answer = "save"
    starter = """
import torch

from minizero.ranks import rank


def save(net, path: str) -> None:
    # Called on every rank: saves a dict of all weights, by their names in the
    # model, to `path`.
    if rank() == 0:
        weights = {k: p.detach() for k, p in net.model.named_parameters()}
        torch.save(weights, path)
"""
    public = """
assert callable(save)
"""
    reference = """
import torch

from minizero.ranks import rank


def save(net, path):
    weights = net.state_dict()
    if rank() == 0:
        torch.save(weights, path)
"""
    wrong = (
        Wrong(
            "freed",
            "    weights = net.state_dict()\n    if rank() == 0:\n",
            "    if rank() == 0:\n"
            "        named = net.model.named_parameters()\n"
            "        weights = {k: p.detach() for k, p in named}\n",
            "The parameters are freed at that moment and read as NaN, and so does the"
            " file.",
        ),
        Wrong(
            "gathered by one",
            "    weights = net.state_dict()\n    if rank() == 0:\n",
            "    if rank() == 0:\n        weights = net.state_dict()\n",
            "Rank 0 alone gathers: it waits for shards that nobody sends. All ranks "
            "must call `state_dict`.",
        ),
        Wrong(
            "the module's own",
            "net.state_dict()",
            "{k: p.detach() for k, p in net.model.state_dict().items()}",
            "The module's own `state_dict` refuses: its parameters are freed. "
            "`net.state_dict()` gathers them.",
        ),
    )
    explain = (
        "What is in the file of the starter, and why gathering inside the `if` does "
        "not help."
    )

    def draw(self, rng):
        odd = rng.sample([7, 9, 11, 13], 2)
        return [{"ranks": n, "width": w} for n, w in zip((2, 3), odd, strict=True)]

    @staticmethod
    def run(answer, ranks, width):
        def saved():
            model = Odd(width)
            net = ZeRO3(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            net.backward(net(rows(width, 0, 0)))
            net.step()
            answer(net, path)

        path = os.path.join(tempfile.mkdtemp(), "weights.pt")
        launch(saved, ranks, timeout=PATIENCE)
        weights = torch.load(path, weights_only=True)
        bad = [k for k, w in weights.items() if w.isnan().any()]
        return {
            "NaN in": len(bad),
            "names": sorted(weights),
            "weights": digest(weights),
        }


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


class LookAtTheLoss(Exercise):
    label = "ex-zero3-6"
    on_ranks = True
    answer = "evaluate"
    points = 6
    starter = """
import torch

from minizero.ranks import rank


def evaluate(net, batches: list) -> float:
    # Called on every rank with the same batches, a multiple of the ranks: their
    # mean loss.
    if rank() == 0:
        with torch.no_grad():
            return sum(net(x).item() for x in batches) / len(batches)
    return 0.0
"""
    public = """
assert callable(evaluate)
"""
    reference = """
import torch

from minizero import comm
from minizero.ranks import rank, world_size


def evaluate(net, batches):
    with torch.no_grad():
        total = sum(net(x).reshape(1) for x in batches[rank() :: world_size()])
    comm.all_reduce(total)
    return total.item() / len(batches)
"""
    wrong = (
        Wrong(
            "rank 0 alone",
            "",
            """
import torch

from minizero.ranks import rank


def evaluate(net, batches):
    if rank() == 0:
        with torch.no_grad():
            return sum(net(x).item() for x in batches) / len(batches)
    return 0.0
""",
            "Rank 0 waits for shards that nobody sends: under ZeRO-3 a forward is a "
            "sequence of collectives, and every rank must run it.",
        ),
        Wrong(
            "own part",
            "    comm.all_reduce(total)\n    return total.item() / len(batches)",
            "    return total.item() * world_size() / len(batches)",
            "Each rank returns the mean of its own part: add the sums of all ranks.",
        ),
        Wrong(
            "barrier",
            "    comm.all_reduce(total)\n    return total.item() / len(batches)",
            "    comm.barrier()\n    return total.item() / len(batches)",
            "A barrier brings ranks together and adds nothing up.",
        ),
    )
    explain = "What each rank is doing when the starter stops."

    def draw(self, rng):
        odd = rng.sample([7, 9, 11, 13], 2)
        return [
            {"ranks": n, "width": w, "batches": n * rng.randint(2, 4)}
            for n, w in zip((2, 3), odd, strict=True)
        ]

    @staticmethod
    def run(answer, ranks, width, batches):
        def evaluated():
            model = Odd(width)
            net = ZeRO3(model, torch.optim.SGD(model.parameters(), lr=0.01))
            torch.manual_seed(width)
            with comm.algorithm("direct"):
                return answer(net, [torch.randn(4, width) for _ in range(batches)])

        found = launch(evaluated, ranks, timeout=PATIENCE)
        return {f"mean on rank {r}": float(each) for r, each in enumerate(found)}
