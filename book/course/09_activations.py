"""Chapter 9: activations."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from minizero.activations import Recompute, SavedTensors, recompute_units
from minizero.lab.course import Exercise, Wrong, always_fails
from minizero.lab.course.drivers import kills
from minizero.lab.models.gpt import GPT, GPTConfig


class DropoutAndReLU(Exercise):
    label = "ex-activations-1"
    answer = "saved"
    book = {"width": 4, "dropouts": 2, "size": 2}
    starter = """
def saved(width: int, dropouts: int, size: int) -> float:
    # What a block with ReLU saves, in units of sbh elements of `size` bytes. Its MLP is
    # `width` times as wide as the block; it has so many dropouts, each of sbh elements.
    return 0.0
"""
    public = """
assert saved(1, 2, 1) - saved(1, 1, 1) == 1  # a mask of one byte an element
"""
    reference = """
def saved(width, dropouts, size):
    attention = 1 + 1 + 3 + 1  # norm, qkv, q and k and v, the projection
    mlp = 1 + 1 + width  # norm, the first layer, the ReLU
    return attention + mlp + dropouts * 1 / size
"""
    wrong = (
        Wrong(
            "twice",
            "+ width ",
            "+ 2 * width ",
            "You counted the ReLU's output and the next layer's input: they are one"
            " storage.",
        ),
        Wrong(
            "masks of elements",
            "dropouts * 1 / size",
            "dropouts",
            "You counted a whole element of each mask: it has one byte.",
        ),
        Wrong(
            "masks of two bytes",
            "dropouts * 1 / size",
            "dropouts * 2 / size",
            "You counted two bytes of each element of a mask: it has one.",
        ),
    )

    def draw(self, rng):
        return [
            {
                "width": rng.choice([2, 3, 5, 6, 8]), "dropouts": rng.choice([1, 3, 4]),
                "size": size,
            }
            for size in rng.sample([4, 8], 2)
        ]  # fmt: skip


class SquareRoot(Exercise):
    label = "ex-activations-2"
    answer = "segments"
    points = 6
    book = {"blocks": 16, "saves": 16}
    starter = """
def segments(blocks: int, saves: int) -> tuple[int, int]:
    # `blocks` blocks are recomputed in segments of k, which divides them; each saves
    # `saves` inputs' worth. The k with the lowest peak, and this peak in inputs.
    return 1, 0
"""
    public = """
assert segments(1, 5) == (1, 6)  # its input, and the block
"""
    reference = """
def segments(blocks, saves):
    peaks = {
        k: blocks // k + saves * k
        for k in range(1, blocks + 1)
        if blocks % k == 0
    }
    best = min(peaks, key=peaks.get)
    return best, peaks[best]
"""
    wrong = (
        Wrong(
            "blocks that save one input",
            "min(peaks, key=peaks.get)",
            "min(peaks, key=lambda k: blocks // k + k)",
            "You took the k of blocks that save one input: a block that saves more is"
            " worth a shorter segment.",
        ),
        Wrong(
            "inputs forgotten",
            "blocks // k + saves * k",
            "saves * k",
            "You counted the segment that is recomputed: the inputs of all segments are"
            " there too.",
        ),
        Wrong(
            "segment forgotten",
            "blocks // k + saves * k",
            "blocks // k",
            "You counted the kept inputs: in backward one segment is there as a whole.",
        ),
    )

    def draw(self, rng):
        def case():
            n, k = rng.choice([36, 48, 60, 64, 72, 96, 144]), rng.choice([2, 3, 4, 6])
            return {"blocks": n, "saves": max(2, n // k**2)}

        return self.telling(case, 2)


class NobodyReads(Exercise):
    label = "ex-activations-3"
    answer = "keep"
    points = 8
    starter = """
from minizero.activations import keep_matmuls


def keep(op, *args) -> bool:
    # Whether selective recomputation keeps the results of this operator; of any width.
    return keep_matmuls(op, *args)
"""
    public = """
import torch
from minizero.activations import Recompute

x = torch.ones(2, 2, requires_grad=True)
Recompute("selective", keep=keep)(torch.mm, x, x).sum().backward()
"""
    reference = """
from minizero.activations import keep_matmuls


def keep(op, *args):
    last = False
    if getattr(op, "__name__", "") == "addmm.default":
        _, x, weight = args[:3]
        last = x.shape[1] == 4 * weight.shape[1]
    return keep_matmuls(op, *args) and not last
"""
    wrong = (
        Wrong(
            "all wide products",
            "last = x.shape[1] == 4 * weight.shape[1]",
            "last = 4 in (x.shape[1] / weight.shape[1], weight.shape[1] / x.shape[1])",
            "You drop the MLP's first product too: backward needs it, and computes it"
            " again.",
        ),
        Wrong(
            "the first product",
            "x.shape[1] == 4 * weight.shape[1]",
            "4 * x.shape[1] == weight.shape[1]",
            "You drop the MLP's first product, whose result backward needs; it is the"
            " last that nobody reads.",
        ),
        Wrong(
            "one width",
            "x.shape[1] == 4 * weight.shape[1]",
            "x.shape[1] == 256",
            "You compare with the width of the chapter's model: other models have"
            " others.",
        ),
    )

    def draw(self, rng):
        return [
            {"layers": rng.randint(2, 4), "hidden": hidden, "rows": rng.randint(2, 5)}
            for hidden in rng.sample([32, 40, 48, 56], 2)
        ]

    @staticmethod
    def run(answer, layers, hidden, rows):
        config = GPTConfig(layers=layers, hidden=hidden, heads=4, sequence=16)

        def trained(how):
            torch.manual_seed(0)
            model = GPT(config)
            x = torch.randint(256, (rows, 16))
            recompute_units(model, how)
            with SavedTensors(model) as saved:
                loss = model(x, x)
                kept = saved.nbytes
            with FlopCounterMode(display=False) as counter:
                loss.backward()
            grads = [p.grad for p in model.parameters()]
            return kept, counter.get_total_flops(), grads

        before, operations, grads = trained("selective")
        kept, again, found = trained(Recompute("selective", keep=answer))
        return {
            "inputs saved": (before - kept) / (4 * rows * 16 * hidden),
            "more operations in backward": again - operations,
            "equal gradients": all(map(torch.equal, grads, found)),
        }


class TwoCoins(Exercise):
    label = "ex-activations-4"
    answer = "check_recomputation"
    points = 8
    starter = """
import torch
from torch import nn


def check_recomputation(recompute) -> None:
    # A test: an AssertionError unless a model for which `recompute(model)` was called,
    # and whose units are then computed again in backward, has the gradients of one
    # that is left alone.
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    recompute(model)
    assert model(torch.ones(2, 8)).shape == (2, 8)
"""
    public = """
from minizero.activations import recompute_units

check_recomputation(recompute_units)  # nothing is wrong with it
"""
    reference = """
import torch
from torch import nn


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.dropout(self.layer(x), 0.5, True).tanh()


def check_recomputation(recompute):
    torch.manual_seed(0)
    model = nn.Sequential(*(Drops() for _ in range(3)))
    x = torch.randn(4, 8, requires_grad=True)

    def gradients():
        found = []
        for seed in range(2):
            torch.manual_seed(seed)
            found += torch.autograd.grad(model(x).square().sum(), [x])
        return torch.cat([each.flatten() for each in found])

    alone = gradients()
    recompute(model)
    assert torch.equal(gradients(), alone)
"""
    wrong = (
        Wrong(
            "one block",
            "range(3)",
            "range(1)",
            "Your model has one random block: what goes wrong in later ones is not"
            " seen.",
        ),
        Wrong(
            "the losses",
            "torch.autograd.grad(model(x).square().sum(), [x])",
            "[model(x).square().sum()]",
            "You compare losses. They come from the forward, which is right: the"
            " gradients belong to another mask.",
        ),
        Wrong(
            "no dropout",
            "torch.dropout(self.layer(x), 0.5, True)",
            "torch.dropout(self.layer(x), 0.0, True)",
            "Nothing in your model is random, so a recomputation that draws other"
            " numbers is not seen.",
        ),
        always_fails("assert torch.equal"),
    )
    explain = (
        "Both: another mask, which nothing notices, and another branch, which saves"
        " other tensors, as torch does notice."
    )

    def draw(self, rng):
        return [
            {"mutant": name, "first": rng.randint(1, 99)}
            for name in ("draws a number", "forgets", "remembers the first block")
        ]

    @staticmethod
    def run(answer, mutant, first):
        def make(name):
            def recompute(model):
                how = Recompute("full")
                how.options["preserve_rng_state"] = name in ("", "draws a number")
                recompute_units(model, how)
                first, *_ = (m for m in model.modules() if "forward" in vars(m))
                if name == "remembers the first block":
                    del first.forward
                    Recompute("full").wrap("0", first)
                if name == "draws a number":
                    first.register_forward_pre_hook(lambda *_: torch.rand(1) and None)

            return recompute

        def seeded(recompute):
            torch.manual_seed(first)  # that of a test that sets none
            answer(recompute)

        return kills(0, seeded, make, mutant)


class OneNumber(Exercise):
    label = "ex-activations-5"
    answer = "probe"
    starter = """
def probe(outputs: list) -> list:
    # The first number of each block's output, [batch, sequence, hidden].
    return [h[0, 0, 0] for h in outputs]
"""
    public = """
import torch

assert [float(x) for x in probe([torch.ones(1, 1, 1)])] == [1.0]
"""
    reference = """
def probe(outputs):
    return [h[0, 0, 0].item() for h in outputs]
"""
    wrong = (
        Wrong(
            "detach alone",
            ".item()",
            ".detach()",
            "`detach` lets go of the graph; what you keep is still a view, and a view"
            " keeps its whole storage.",
        ),
        Wrong(
            "clone alone",
            ".item()",
            ".clone()",
            "`clone` has a small storage of its own; through it the graph is kept, and"
            " with it all that is saved for backward.",
        ),
        Wrong(
            "the mean",
            "h[0, 0, 0].item()",
            "h.mean().item()",
            "You keep the mean of all numbers: one of them was asked for.",
        ),
    )

    def draw(self, rng):
        return [
            {"blocks": rng.randint(2, 6), "hidden": 8 * n, "rows": rng.randint(2, 9)}
            for n in rng.sample([3, 4, 5, 7], 2)
        ]

    @staticmethod
    def run(answer, blocks, hidden, rows):
        torch.manual_seed(hidden)
        outputs, h = [], torch.randn(rows, 4, hidden, requires_grad=True)
        for _ in range(blocks):
            h = h.sin()
            outputs.append(h)
        kept = list(answer(outputs))
        tensors = [each for each in kept if isinstance(each, torch.Tensor)]
        sizes = [each.untyped_storage().nbytes() for each in tensors]
        return {
            "numbers": [torch.as_tensor(each).item() for each in kept],
            "a storage of more than a number": any(size > 8 for size in sizes),
            "the graph is kept": any(each.grad_fn is not None for each in tensors),
        }


class FitIt(Exercise):
    label = "ex-activations-6"
    answer = "fit"
    points = 8
    book = {"ranks": 16, "memory": 24, "batch": 4}
    starter = """
import torch

from minizero.lab.models.activations import Activations, step_flops
from minizero.lab.models.gpt import GPTConfig

seven = GPTConfig(32, 4096, 32, sequence=2048, vocabulary=32000)


def fit(ranks: int, memory: float, batch: int) -> tuple[float, str, int, bool] | None:
    # 7 billion parameters on GPUs of `memory` GB: operations relative to none, the
    # mode, for how many of the first units, and whether their inputs are offloaded; of
    # what fits the fewest operations, and on the device if that is as good. "none" is
    # ("full", 0). None if nothing fits.
    return None
"""
    public = """
assert fit(1, 24, 1) is None
"""
    reference = """
import torch

from minizero.lab.models.activations import Activations, step_flops
from minizero.lab.models.gpt import GPTConfig

seven = GPTConfig(32, 4096, 32, sequence=2048, vocabulary=32000)


def peak_bytes(batch, mode, number, offload):
    def block(mode):
        return sum(Activations(seven, batch, torch.bfloat16, mode).block().values())

    total = sum(Activations(seven, batch, torch.bfloat16).model().values())
    total -= number * (block("none") - block(mode))
    total -= number * block("full") if offload else 0
    again = block("none") - block(mode) if number == 32 else 0
    return total + again + 4 * block("full")


def cost(batch, mode, number):
    base = step_flops(seven, batch, "none", "fused")
    more = step_flops(seven, batch, mode, "fused")
    return 1 + (more - base) / base * number / 32


def fit(ranks, memory, batch):
    room = 0.9 * memory * 1e9 - 16 * 7e9 / ranks - 1e9
    ladder = [("selective", 32, False)]
    ladder += [("full", m, off) for off in (False, True) for m in range(33)]
    fits = [
        (cost(batch, mode, m), off, mode, m)
        for mode, m, off in ladder
        if peak_bytes(batch, mode, m, off) <= room
    ]
    if not fits:
        return None
    found, off, mode, m = min(fits)
    return found, mode, m, off
"""
    wrong = (
        Wrong(
            "no tenth free",
            "0.9 * memory",
            "memory",
            "You filled the devices to the last byte: keep a tenth of each free.",
        ),
        Wrong(
            "blocks alone",
            "sum(Activations(seven, batch, torch.bfloat16).model().values())",
            '32 * block("none")',
            "You counted the blocks only: at 32,000 words the log-softmax, in float32,"
            " is not small.",
        ),
        Wrong(
            "state forgotten",
            " - 16 * 7e9 / ranks",
            "",
            "You left no room for this rank's share of parameters, gradients and"
            " optimizer.",
        ),
    )

    def draw(self, rng):
        def case():
            return {
                "ranks": rng.choice([12, 16, 20, 24]),
                "memory": rng.choice([24, 32, 40]), "batch": rng.randint(2, 12),
            }  # fmt: skip

        return self.telling(case, 2)
