"""Chapter 1: where does the memory go?"""

import torch

from minizero.lab.course import Exercise, Wrong


class CheaperOptimizer(Exercise):
    label = "ex-memory-1"
    answer = "momentum"
    book = {"params": 13e9, "ranks": 8, "capacity": 40}
    starter = """
def momentum(params: float, ranks: int, capacity: float) -> tuple[float, float, bool]:
    # Bytes per parameter without ZeRO; GB (10^9 bytes) a GPU under ZeRO-2; whether it
    # fits.
    return 0.0, 0.0, False
"""
    public = """
assert momentum(1e9, 1, 100)[0] == momentum(1e9, 1, 100)[1]  # ZeRO alone shares nothing
"""
    reference = """
def momentum(params, ranks, capacity):
    alone = 2 + 2 + 4 + 4
    held = params * (2 + (2 + 4 + 4) / ranks) / 1e9
    return alone, held, held <= capacity
"""
    wrong = (
        Wrong(
            "GiB",
            "/ 1e9",
            "/ 2**30",
            "You divided by 2^30: a GB is 10^9 bytes, and a device of 40 GB has no "
            "more.",
        ),
        Wrong(
            "no master",
            "+ 4 + 4",
            "+ 4",
            "You left out the float32 master copy: momentum replaces Adam's moments, "
            "not the master.",
        ),
        Wrong(
            "all sharded",
            "2 + (2 + 4 + 4)",
            "(2 + 2 + 4 + 4)",
            "You shared the parameters too: that is ZeRO-3. Under ZeRO-2 each rank "
            "keeps all parameters.",
        ),
    )

    def draw(self, rng):
        cases = []
        for fits in (False, True, rng.random() < 0.5):
            params, ranks = rng.randint(20, 300) / 10, rng.choice([2, 4, 6, 12, 24])
            held = params * (2 + 10 / ranks)
            capacity = round(held * (1.2 if fits else 0.95), 1)
            cases.append({"params": params * 1e9, "ranks": ranks, "capacity": capacity})
        return cases


class StepItself(Exercise):
    label = "ex-memory-2"
    answer = "rise"
    book = {"layers": 6, "hidden": 120, "tokens": 16}
    starter = """
import torch
from torch import Tensor, nn

from minizero import Tracker


def rise(net: nn.Module, tokens: Tensor, **options: bool) -> float:
    # Bytes per parameter by which AdamW(**options) rises above its start in its
    # second step.
    return -1.0
"""
    public = """
from minizero.lab.models.gpt import GPT, GPTConfig

net = GPT(GPTConfig(layers=1, hidden=32, heads=2, sequence=8))
assert rise(net, torch.zeros(1, 8, dtype=torch.long)) >= 0
"""
    reference = """
import torch

from minizero import Tracker


def rise(net, tokens, **options):
    optimizer = torch.optim.AdamW(net.parameters(), **options)
    n = sum(p.numel() for p in net.parameters())
    with Tracker(net, optimizer) as tracker:
        for _ in range(2):
            net(tokens, tokens).backward()
            tracker.peak, before = 0, tracker.total
            optimizer.step()
    return max(0, tracker.peak - before) / n
"""
    wrong = (
        Wrong(
            "level",
            "max(0, tracker.peak - before)",
            "max(tracker.peak, before)",
            "You measured the level at the peak, not its rise above where the step "
            "began.",
        ),
        Wrong(
            "first step",
            "range(2)",
            "range(1)",
            "You measured the first step, which also makes the optimizer's state: 8 "
            "bytes per parameter that stay.",
        ),
        Wrong(
            "whole step",
            "            tracker.peak, before = 0, tracker.total\n"
            "            optimizer.step()",
            "            optimizer.step()\n    before = tracker.total",
            "You took the peak of the whole training step, in which the activations "
            "are: set `peak` to 0 just before `step`.",
        ),
    )

    def draw(self, rng):
        return [
            {"layers": rng.randint(1, 4), "hidden": 12 * rng.randint(3, 9), "tokens": 8}
            for _ in range(2)
        ]

    @staticmethod
    def run(answer, layers, hidden, tokens):
        from minizero.lab.models.gpt import GPT, GPTConfig

        seen = {}
        for name, options in (
            ("loop", {}),
            ("foreach", {"foreach": True}),
            ("fused", {"fused": True}),
        ):
            torch.manual_seed(0)
            net = GPT(GPTConfig(layers=layers, hidden=hidden, heads=3, sequence=tokens))
            text = torch.randint(256, (1, tokens))
            seen[f"rise of {name}"] = float(answer(net, text, **options))
        return seen


class EighteenBytes(Exercise):
    label = "ex-memory-3"
    answer = "heavier"
    book = {"params": 7e9, "ranks": 8}
    starter = """
from minizero import estimate


def heavier(params: float, ranks: int) -> list[float]:
    "GB a GPU under stages 0, 1, 2 and 3, in bf16 with Adam, gradients in float32."
    return [0.0, 0.0, 0.0, 0.0]
"""
    public = """
assert len(heavier(1e9, 2)) == 4 and heavier(1e9, 1)[0] == heavier(1e9, 1)[3]
"""
    reference = """
def heavier(params, ranks):
    p, g, s = 2, 4, 12
    held = [
        p + g + s,
        p + g + s / ranks,
        p + (g + s) / ranks,
        (p + g + s) / ranks,
    ]
    return [params * each / 1e9 for each in held]
"""
    wrong = (
        Wrong(
            "both gradients",
            "2, 4, 12",
            "2, 6, 12",
            "You kept the bf16 gradient beside the float32 one: it is stored in "
            "float32 instead.",
        ),
        Wrong(
            "DeepSpeed's ZeRO-2",
            "p + (g + s) / ranks,",
            "p + (p + g + s) / ranks,",
            "That is what DeepSpeed prints for ZeRO-2, the parameters counted twice; "
            "here a rank keeps them once.",
        ),
        Wrong(
            "bf16 gradients",
            "2, 4, 12",
            "2, 2, 12",
            "That is the usual count, with gradients in bf16.",
        ),
    )

    def draw(self, rng):
        return [
            {
                "params": rng.randint(5, 900) * 1e8,
                "ranks": rng.choice([3, 5, 6, 12, 48]),
            }
            for _ in range(2)
        ]


class Validation(Exercise):
    label = "ex-memory-4"
    answer = "validate"
    starter = """
def validate(net, batches) -> float:
    "The mean loss over `batches`, which has a length and gives pairs x, y."
    net.eval()
    total = 0
    for x, y in batches:
        total += net(x, y)
    return total / len(batches)
"""
    public = """
import torch
from minizero.lab.models.gpt import GPT, GPTConfig

net = GPT(GPTConfig(layers=1, hidden=32, heads=2, sequence=8))
x = torch.zeros(1, 8, dtype=torch.long)
assert isinstance(validate(net, [(x, x)]), float)
"""
    reference = """
import torch


@torch.no_grad()
def validate(net, batches):
    net.eval()
    total = 0.0
    for x, y in batches:
        total += net(x, y).item()
    return total / len(batches)
"""
    wrong = (
        Wrong(
            "only eval",
            "",
            """
def validate(net, batches):
    net.eval()
    total = 0
    for x, y in batches:
        total = total + net(x, y)
    return float(total / len(batches))
""",
            "`eval()` changes dropout and batch norm; autograd still keeps the graph "
            "of every batch that `total` refers to.",
        ),
        Wrong(
            "item alone",
            "@torch.no_grad()\n",
            "",
            "`item()` lets go of each graph, but while a batch is computed its whole "
            "graph is kept: nothing told autograd not to.",
        ),
        Wrong(
            "sum",
            " / len(batches)",
            "",
            "You returned the sum of the losses, not their mean.",
        ),
    )

    def draw(self, rng):
        return [
            {
                "batches": n,
                "hidden": 16 * rng.randint(2, 5),
                "seed": rng.randint(0, 999),
            }
            for n in (rng.randint(4, 5), rng.randint(6, 8))
        ]

    @staticmethod
    def run(answer, batches, hidden, seed):
        from minizero import Tracker
        from minizero.lab.models.gpt import GPT, GPTConfig

        torch.manual_seed(seed)
        net = GPT(GPTConfig(layers=3, hidden=hidden, heads=2, sequence=64))
        data = [torch.randint(256, (1, 64)) for _ in range(batches)]
        with Tracker(net) as tracker:
            net(data[0], data[0])
            graph = tracker.peaks["activations"]

        class Watched:
            live: list[int] = []

            def __len__(self):
                return batches

            def __iter__(self):
                for x in data:
                    self.live.append(tracker.live["activations"])
                    yield x, x

        with Tracker(net) as tracker:
            mean = float(answer(net, Watched()))
        peak = tracker.peaks["activations"]
        return {
            "mean": mean,
            "graphs stay from batch to batch": Watched.live[-1] > graph,
            "a graph is kept while a batch is computed": peak > 0.7 * graph,
        }


class ChoosePlan(Exercise):
    label = "ex-memory-5"
    answer = "smallest"
    points = 6
    book = {
        "params": 30e9,
        "layers": 60,
        "hidden": 6656,
        "heads": 52,
        "sequence": 4096,
        "capacity": 80,
    }
    starter = """
from minizero import estimate, estimate_activations


def smallest(
    params: float, layers: int, hidden: int, heads: int, sequence: int, capacity: float
) -> tuple[float, list[int | None]]:
    # GB of activations at their peak (micro-batch 1, full checkpointing, fused
    # attention); the smallest number of GPUs of `capacity` GB, of 1, 2, 4, ... 256,
    # for stages 0 to 3, or None.
    return 0.0, [None, None, None, None]
"""
    public = """
gigabytes, gpus = smallest(1e9, 10, 1024, 16, 1024, 1000)
assert gigabytes > 0 and gpus == [1, 1, 1, 1]
"""
    reference = """
from minizero import estimate, estimate_activations


def smallest(params, layers, hidden, heads, sequence, capacity):
    sizes = dict(hidden=hidden, heads=heads, sequence=sequence, micro_batch=1)
    inputs = estimate_activations(layers=layers, **sizes, checkpointing="full")
    again = estimate_activations(layers=1, **sizes)
    taken = inputs + again
    room = 0.9 * capacity * 1e9 - taken
    found = []
    for stage in range(4):
        counts = (2**i for i in range(9))
        fits = (n for n in counts if estimate(params, n, stage).total <= room)
        found.append(next(fits, None))
    return taken / 1e9, found
"""
    wrong = (
        Wrong(
            "no tenth free",
            "0.9 * capacity",
            "capacity",
            "You filled the devices to the last byte: leave a tenth of each free.",
        ),
        Wrong(
            "layer forgotten",
            "inputs + again",
            "inputs",
            "You counted the saved inputs only: the layer that is computed again in "
            "backward is alive as a whole for a moment.",
        ),
        Wrong(
            "nothing recomputed",
            'checkpointing="full"',
            'checkpointing="selective"',
            "You counted what all layers keep without full checkpointing.",
        ),
    )
    explain = (
        "What the count leaves out: logits, communication buffers, the gathered "
        "layer, float32 copies of gradients; and that it says nothing of time."
    )

    def draw(self, rng):
        cases = []
        while len(cases) < 3:
            heads = rng.randint(20, 70)
            layers, hidden = rng.randint(30, 90), 128 * heads
            case = {
                "params": 12.0 * layers * hidden**2,
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "sequence": rng.choice([2048, 3072, 4096, 6144]),
                "capacity": 80,
            }
            names = {}
            exec(self.reference, names)
            full = names["smallest"](**case)[1]
            tight = names["smallest"](**case | {"capacity": 80 / 0.9})[1]
            if full != tight:  # the tenth makes a difference
                cases.append(case)
        return cases
