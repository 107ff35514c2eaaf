"""Chapter 3: data parallelism."""

import torch

from minizero import comm, launch
from minizero.lab.course import Exercise, Wrong
from minizero.lab.course.drivers import PATIENCE, Odd, digest, rows
from minizero.ranks import rank
from minizero.zero import DataParallel


class CountBefore(Exercise):
    label = "ex-ddp-1"
    answer = "count"
    book = {"params": 1.5e9, "ranks": 64}
    starter = """
def count(params: float, ranks: int) -> tuple[float, float, float]:
    # GB that a rank holds, TB that all ranks hold together, GB that a rank sends in a
    # step: in fp32 with AdamW, by data parallelism.
    return 0.0, 0.0, 0.0
"""
    public = """
assert count(1e9, 1)[2] == 0
"""
    reference = """
def count(params, ranks):
    held = 16 * params
    sent = 4 * 2 * params * (ranks - 1) / ranks
    return held / 1e9, ranks * held / 1e12, sent / 1e9
"""
    wrong = (
        Wrong(
            "elements",
            "4 * 2 * params",
            "2 * params",
            "You gave the elements that are sent, in billions: each has 4 bytes.",
        ),
        Wrong(
            "one pass",
            "4 * 2 * params",
            "4 * params",
            "An all-reduce sends twice: sums are collected, and then handed out.",
        ),
        Wrong(
            "parameters and gradients",
            "16 * params",
            "8 * params",
            "You left out AdamW's two moments, 8 bytes per parameter.",
        ),
    )

    def draw(self, rng):
        return [
            {"params": rng.randint(2, 90) * 1e8, "ranks": rng.choice([3, 6, 12, 48])}
            for _ in range(2)
        ]


class FewerCalls(Exercise):
    label = "ex-ddp-2"
    answer = "count"
    book = {
        "sizes": [8640, 60, 392, 10800, 392, 10800],
        "ranks": 4,
        "bucket_size": 500,
    }
    starter = """
def count(sizes: list[int], ranks: int, bucket_size: int) -> tuple[int, int]:
    # All-reduces that a step makes with buffers of these sizes, in elements, and
    # elements that each rank sends in them.
    return 0, 0
"""
    public = """
assert count([100], 1, 100) == (1, 0)
"""
    reference = """
def count(sizes, ranks, bucket_size):
    shards = [-(-size // ranks) for size in sizes]
    width = max(1, bucket_size // ranks)
    calls = sum(-(-shard // width) for shard in shards)
    return calls, 2 * (ranks - 1) * sum(shards)
"""
    wrong = (
        Wrong(
            "across buffers",
            "sum(-(-shard // width) for shard in shards)",
            "-(-sum(shards) // width)",
            "You cut all buffers in one go: each is cut by itself, and its last bucket "
            "may be smaller.",
        ),
        Wrong(
            "as wide as a bucket",
            "max(1, bucket_size // ranks)",
            "bucket_size",
            "A bucket has an equal part of every shard: you took all of it from each.",
        ),
        Wrong(
            "one pass",
            "2 * (ranks - 1)",
            "(ranks - 1)",
            "An all-reduce sends twice: sums are collected, and then handed out.",
        ),
        Wrong(
            "padding left out",
            "2 * (ranks - 1) * sum(shards)",
            "2 * (ranks - 1) * sum(sizes) // ranks",
            "You left out the padding, which is sent too.",
        ),
    )

    def draw(self, rng):
        def case():
            sizes = [rng.randint(50, 9000) for _ in range(4)]
            size, ranks = 100 * rng.randint(3, 30), rng.choice([2, 3, 6, 8])
            return {"sizes": sizes, "ranks": ranks, "bucket_size": size}

        return self.telling(case, 3)


class AClipThatWorks(Exercise):
    label = "ex-ddp-3"
    on_ranks = True
    answer = "average_and_clip"
    points = 6
    starter = """
import torch

from minizero import comm


def average_and_clip(model: torch.nn.Module, max_norm: float) -> None:
    # Called on every rank, each with gradients of its own in `p.grad`: afterwards they
    # are the mean over ranks, clipped to a norm of `max_norm`.
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for p in model.parameters():
        comm.all_reduce(p.grad, average=True)
"""
    public = """
import torch

layer = torch.nn.Linear(3, 2)
layer(torch.ones(1, 3)).sum().backward()
average_and_clip(layer, 0.1)  # one rank alone
norm = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()])
assert abs(norm - 0.1) < 1e-4
"""
    reference = """
import torch

from minizero import comm


def average_and_clip(model, max_norm):
    for p in model.parameters():
        comm.all_reduce(p.grad, average=True)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
"""
    wrong = (
        Wrong(
            "clips, then averages",
            "",
            starter,
            "Each rank clips its own gradient first: the mean of clipped gradients is"
            " not"
            " the clipped mean, and not in its direction.",
        ),
        Wrong(
            "clips by its own norm",
            "",
            """
import torch

from minizero import comm


def average_and_clip(model, max_norm):
    grads = [p.grad for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm(grads)
    for grad in grads:
        comm.all_reduce(grad, average=True)
        grad.mul_(min(1, max_norm / norm.item()))
""",
            "You took the norm before the mean: each rank has another, so the ranks "
            "do not"
            " even agree.",
        ),
        Wrong(
            "clips by the mean of norms",
            "",
            """
import torch

from minizero import comm


def average_and_clip(model, max_norm):
    grads = [p.grad for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm(grads).reshape(1)
    comm.all_reduce(norm, average=True)
    for grad in grads:
        comm.all_reduce(grad, average=True)
        grad.mul_(min(1, max_norm / norm.item()))
""",
            "You took the mean of the norms: the norm of the mean is smaller.",
        ),
    )
    explain = "Where the difference would be noticed."

    def draw(self, rng):
        odd = rng.sample([5, 7, 9, 11], 2)
        return [
            {"ranks": n, "width": w, "max_norm": 0.125}
            for n, w in zip((2, 3), odd, strict=True)
        ]

    @staticmethod
    def run(answer, ranks, width, max_norm):
        def clipped():
            torch.manual_seed(width)
            layer = torch.nn.Linear(width, 2)
            torch.manual_seed(rank())
            scale = 4.0 ** rank()  # one rank's gradients are much larger
            layer(scale * torch.randn(5, width)).square().mean().backward()
            answer(layer, max_norm)
            return [p.grad.flatten().tolist() for p in layer.parameters()]

        found = launch(clipped, ranks, timeout=PATIENCE)
        return {f"gradients on rank {r}": each for r, each in enumerate(found)}


class PaddedTokens(Exercise):
    label = "ex-ddp-4"
    on_ranks = True
    answer = "loss_of"
    points = 8
    starter = """
import torch.nn.functional as F
from torch import Tensor

from minizero import comm
from minizero.ranks import world_size


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    # Called on every rank before `net.backward(loss)`, which takes the mean over ranks.
    # Targets of -100 do not count.
    return F.cross_entropy(logits, targets, ignore_index=-100)
"""
    public = """
import torch

logits, targets = torch.randn(4, 3), torch.tensor([0, 2, -100, 1])
assert loss_of(logits, targets).isclose(F.cross_entropy(logits, targets))
"""
    reference = """
import torch
import torch.nn.functional as F

from minizero import comm
from minizero.ranks import world_size


def loss_of(logits, targets):
    total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    count = (targets != -100).sum().float().reshape(1)
    comm.all_reduce(count)
    return total * world_size() / count[0]
"""
    wrong = (
        Wrong(
            "own count",
            "    comm.all_reduce(count)\n    return total * world_size() / count[0]",
            "    return total / count[0]",
            "Each rank divides by its own count, so tokens of short sequences weigh "
            "more"
            " than others.",
        ),
        Wrong(
            "mean over ranks forgotten",
            "total * world_size() / count[0]",
            "total / count[0]",
            "`backward` takes the mean over ranks, which divides by N once more: "
            "multiply"
            " by the number of ranks.",
        ),
        Wrong(
            "padding counted",
            "(targets != -100).sum()",
            "torch.tensor(targets.numel())",
            "You divided by all tokens, those of the padding too.",
        ),
    )

    def draw(self, rng):
        return [
            {"ranks": n, "width": rng.choice([5, 7, 9]), "seed": rng.randint(0, 99)}
            for n in (2, 3)
        ]

    @staticmethod
    def run(answer, ranks, width, seed):
        def stepped():
            torch.manual_seed(seed)
            layer = torch.nn.Linear(width, 3)
            net = DataParallel(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
            torch.manual_seed(1000 * rank() + seed)
            targets = torch.randint(3, (12,))
            targets[3 + 4 * rank() :] = -100
            net.backward(answer(net(torch.randn(12, width)), targets))
            net.step()
            return [w.flatten().tolist() for w in net.state_dict().values()]

        return {"weights after a step": launch(stepped, ranks, timeout=PATIENCE)[0]}


class TwoAtATime(Exercise):
    label = "ex-ddp-5"
    on_ranks = True
    answer = "AtMost"
    points = 6
    starter = """
from minizero.zero import Action, Schedule


class AtMost(Schedule):
    # At most `most` units are being reduced at a time. Before another one is launched,
    # the one that was launched first is waited for.
    def __init__(self, most: int):
        self.most = most
"""
    public = """
assert isinstance(AtMost(2), Schedule)
"""
    reference = """
from minizero.zero import Action, Schedule


class AtMost(Schedule):
    def __init__(self, most):
        self.most, self.launched = most, []

    def grads_ready(self, unit):
        actions = []
        if len(self.launched) == self.most:
            actions.append(Action("wait", self.launched.pop(0)))
        self.launched.append(unit)
        return [*actions, Action("reduce", unit)]

    def backward_ends(self):
        self.launched.clear()
"""
    wrong = (
        Wrong(
            "unchanged",
            "",
            starter,
            "Backward still stands still at each unit until its sums are there.",
        ),
        Wrong(
            "never waits",
            "        if len(self.launched) == self.most:\n"
            '            actions.append(Action("wait", self.launched.pop(0)))\n',
            "",
            "You never wait, so all units are being reduced when backward ends.",
        ),
        Wrong(
            "the newest",
            "self.launched.pop(0)",
            "self.launched.pop()",
            "You wait for the unit that was launched last: it has had the least time.",
        ),
        Wrong(
            "one too many",
            "len(self.launched) == self.most",
            "len(self.launched) > self.most",
            "One unit too many is being reduced: wait before you launch another.",
        ),
    )
    explain = "Why the bits should be the same."

    def draw(self, rng):
        odd = rng.sample([11, 13, 15, 17], 2)
        most = rng.sample([2, 3], 2)
        return [
            {"ranks": n, "width": w, "most": m}
            for n, w, m in zip((2, 3), odd, most, strict=True)
        ]

    @staticmethod
    def run(answer, ranks, width, most):
        def trained():
            model = Odd(width, depth=6)
            adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
            net = DataParallel(model, adamw, schedule=answer(most))
            for step in range(2):
                with comm.algorithm("direct"), comm.ledger() as calls:
                    net.backward(net(rows(width, step, 0)))
                    net.step()
            calls = calls.select("all_reduce", "backward")
            starts = [c.launched for c in calls]
            at_once = [sum(c.launched <= t < c.waited for c in calls) for t in starts]
            return {
                "calls": len(calls),
                "under way at each launch": at_once,
                "waited for": [c.unit for c in sorted(calls, key=lambda c: c.waited)],
                "weights": digest(net.state_dict()) if rank() == 0 else "",
            }

        return launch(trained, ranks, timeout=PATIENCE)[0]


class AsDDPFills(Exercise):
    label = "ex-ddp-6"
    on_ranks = True
    answer = "Filled"
    points = 8
    starter = """
import torch
from torch import nn

from minizero import comm


class Filled:
    # Averages gradients over ranks, in buckets of at most `bucket_size` elements (or
    # one larger parameter), filled from the last parameter to the first. A call ends
    # a backward: each `p.grad` is the mean then.
    def __init__(self, model: nn.Module, bucket_size: int):
        self.parameters = [*model.parameters()]

    def __call__(self):
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            comm.all_reduce(p.grad, average=True)
"""
    public = """
layer = nn.Linear(3, 2)
average = Filled(layer, 6)
layer(torch.ones(1, 3)).sum().backward()
average()  # one rank alone
assert layer.weight.grad.tolist() == [[1.0] * 3] * 2
"""
    reference = """
import torch
from torch import nn

from minizero import comm


class Filled:
    def __init__(self, model, bucket_size):
        self.buckets, room = [], 0
        for p in reversed([*model.parameters()]):
            if p.numel() > room:
                self.buckets.append([])
                room = bucket_size
            self.buckets[-1].append(p)
            room -= p.numel()
            p.register_post_accumulate_grad_hook(self.arrived)
        self.missing, self.under_way = {*model.parameters()}, []

    def arrived(self, p):
        self.missing.discard(p)
        for params in self.buckets[len(self.under_way) :]:
            if not self.missing.isdisjoint(params):
                break
            self.launch(params)

    def launch(self, params):
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = torch.cat([p.grad.flatten() for p in params])
        work = comm.all_reduce(flat, async_op=True, average=True)
        self.under_way.append((params, flat, work))

    def __call__(self):
        for params in self.buckets[len(self.under_way) :]:
            self.launch(params)
        for params, flat, work in self.under_way:
            work.wait()
            parts = flat.split([p.numel() for p in params])
            for p, part in zip(params, parts):
                p.grad.copy_(part.view_as(p))
        self.missing = {p for params in self.buckets for p in params}
        self.under_way.clear()
"""
    wrong = (
        Wrong(
            "each alone",
            "",
            starter,
            "You make a call for each parameter, and all of them after backward.",
        ),
        Wrong(
            "after backward",
            "            p.register_post_accumulate_grad_hook(self.arrived)\n",
            "",
            "All buckets are launched after backward, so nothing overlaps with it.",
        ),
        Wrong(
            "first to last",
            "reversed([*model.parameters()])",
            "[*model.parameters()]",
            "The first bucket has the first parameters, whose gradients come last: the "
            "others wait for it.",
        ),
        Wrong(
            "too full",
            "if p.numel() > room:",
            "if room <= 0:",
            "A bucket is closed only when it is full already: it has more elements "
            "than it may.",
        ),
        Wrong(
            "sums",
            "async_op=True, average=True",
            "async_op=True",
            "You give the sum over ranks, not the mean.",
        ),
    )
    explain = "What would happen if a rank launched a later bucket first."

    def draw(self, rng):
        odd = rng.sample([7, 9, 11, 13], 2)
        return [
            {"ranks": n, "width": w, "bucket_size": 2 * w * w + rng.randint(1, w)}
            for n, w in zip((2, 3), odd, strict=True)
        ]

    @staticmethod
    def run(answer, ranks, width, bucket_size):
        def averaged():
            torch.manual_seed(width)
            layers = [torch.nn.Linear(width, width) for _ in range(6)]
            model = torch.nn.ModuleList(layers)
            average, launched = answer(model, bucket_size), []
            for step in range(2):
                model.zero_grad()
                with comm.algorithm("direct"), comm.ledger() as calls:
                    x = rows(width, step, 0)
                    for i, layer in enumerate(layers):
                        # each rank leaves another of the first layers out
                        x = x if i == rank() else x + layer(x).tanh()
                    x.square().mean().backward()
                    launched.append(len(calls))
                    average()
            norms = {k: p.grad.norm().item() for k, p in model.named_parameters()}
            return {
                "elements of calls": [c.elements for c in calls],
                "launched in backward": launched,
                "norms of means": norms,
            }

        found = launch(averaged, ranks, timeout=PATIENCE)
        return {f"rank {r}": each for r, each in enumerate(found)}
