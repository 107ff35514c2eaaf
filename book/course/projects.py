"""The two projects: what a program can check of them; the rest is in `rubrics.md`."""

from dataclasses import replace

import torch

from minizero import Tracker, comm, launch
from minizero.lab.course import Exercise, Wrong
from minizero.lab.course.drivers import (
    PATIENCE,
    SEQUENCE,
    Odd,
    gpt_of,
    rows,
    seen_on,
    train,
    trained,
)
from minizero.lab.models.gpt import count_parameters
from minizero.lab.toymachine import TOY, shape_of
from minizero.ranks import rank
from minizero.scale import Candidate, Job, choose, predict
from minizero.scale.planner import ds_config


class FromZeRO1(Exercise):
    label = "ex-project-zero2"
    on_ranks = True
    answer = "MyZeRO2"
    points = 16
    starter = """
import torch

from minizero import Plan
from minizero.zero import ZeRO1


class MyZeRO2(ZeRO1):
    plan = Plan.stage(2)
"""
    public = """
assert issubclass(MyZeRO2, ZeRO1)
"""
    reference = """
import torch

from minizero import Plan
from minizero.zero import ZeRO1


class MyZeRO2(ZeRO1):
    plan = Plan.stage(2)

    def allocate(self, flat):
        flat.shard = self.owned(flat.full, flat)
        if flat.trainable:
            zeros = torch.zeros_like(flat.shard, dtype=flat.grad_dtype)
            flat.mean_shard = self.storage.store(zeros, "gradients")

    def reduced(self, flat):
        mean, first = self.owned(flat.full_grad(), flat), flat.mean is None
        self.storage.accumulate(flat.mean_shard, mean, first)
        flat.mean, flat.grad = flat.mean_shard, None

    def clear_grads(self, flat):
        flat.mean = flat.grad = None
"""
    wrong = (
        Wrong(
            "ZeRO-1",
            "",
            """
from minizero.zero import ZeRO1


class MyZeRO2(ZeRO1):
    pass
""",
            "That is ZeRO-1: every rank keeps the whole gradients.",
        ),
        Wrong(
            "the package's",
            "",
            """
from minizero.zero import ZeRO2


class MyZeRO2(ZeRO2):
    pass
""",
            "That is the package's ZeRO-2: write it from `ZeRO1`.",
        ),
        Wrong(
            "last micro-batch",
            "flat.mean is None",
            "True",
            "You keep the last micro-batch's mean: add it to what is stored.",
        ),
        Wrong(
            "never cleared",
            "flat.mean = flat.grad = None",
            "flat.grad = None",
            "The stored mean is not cleared after a step, so gradients of all steps "
            "add up.",
        ),
        Wrong(
            "whole mean",
            "zeros = torch.zeros_like(flat.shard, dtype=flat.grad_dtype)",
            "zeros = torch.zeros_like(flat.full, dtype=flat.grad_dtype)",
            "You store a mean of the whole buffer's size: a rank needs its shard's.",
        ),
    )
    explain = "The test, and the three mutants that it fails on."

    def draw(self, rng):
        odd = rng.sample([11, 13, 15, 17], 4)
        sizes = [(2, 1), (3, 1), (2, 4), (3, 4)]
        return [
            {"ranks": ranks, "width": width, "micro": micro}
            for width, (ranks, micro) in zip(odd, sizes, strict=True)
        ]

    @staticmethod
    def run(answer, ranks, width, micro):
        def most():
            model = Odd(width, depth=5)
            net = answer(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            with comm.algorithm("direct"), Tracker() as tracker:
                net.backward(net(rows(width, rank(), 0)))
            return tracker.peaks["gradients"]

        found = seen_on(ranks, train, answer, width, micro, clip=0.1, look=True)
        found["most bytes of gradients"] = launch(most, ranks, timeout=PATIENCE)[0]
        kinds = [kind.__module__ for kind in answer.__mro__]
        found["is the package's own"] = "minizero.zero.stage2" in kinds
        return found


class FitAndFast(Exercise):
    label = "ex-project-fit"
    on_ranks = True
    answer = "way"
    points = 8
    starter = """
from minizero.scale import Candidate, Job


def way(job: Job) -> Candidate:
    # The way to train this job.
    return Candidate(0, micro_batch=job.sequences_per_gpu)
"""
    public = """
from minizero.lab.models.gpt import GPTConfig
from minizero.lab.toymachine import TOY, shape_of

shape = shape_of(GPTConfig(layers=2, hidden=32, heads=2, sequence=32))
how = way(Job(shape, TOY, 2, 8, 32, "fp32"))
assert how.micro_batch * how.accumulation == 4  # all rows of a rank
"""
    reference = """
from minizero.scale import choose


def way(job):
    return choose(job).best.candidate
"""
    wrong = (
        Wrong(
            "does not fit",
            "",
            """
from minizero.scale import Candidate


def way(job):
    return Candidate(0, "full", 1, job.sequences_per_gpu)
""",
            "It does not fit: count the bytes of each category first.",
        ),
        Wrong(
            "to be safe",
            "",
            """
from minizero.scale import Candidate


def way(job):
    return Candidate(3, "full", 1, job.sequences_per_gpu, "cpu", "cpu")
""",
            "It fits, and is slower than it need be: you moved or computed again what "
            "would have fitted.",
        ),
        Wrong(
            "fewer rows",
            "",
            """
from minizero.scale import Candidate


def way(job):
    return Candidate(2, "full", 1, 1, "cpu")
""",
            "It trains on fewer rows: micro-batch times accumulation must be the rows "
            "of a rank.",
        ),
    )
    explain = "See the rubric: bytes before the change, seconds, what was taken back."

    def draw(self, rng):
        return [
            {
                "ranks": rng.choice([2, 3]),
                "layers": rng.choice([4, 5]),
                "hidden": rng.choice([64, 80]),
                "room": rng.randint(105, 125) / 10,
            }
        ]

    @staticmethod
    def run(answer, ranks, layers, hidden, room):
        gpt, count = gpt_of(layers, hidden), 2 * ranks
        toy = replace(TOY, memory=room * count_parameters(gpt))
        job = Job(shape_of(gpt), toy, ranks, count, SEQUENCE, "fp32")
        how, best = answer(job), choose(job)
        plain = Candidate(0, micro_batch=job.sequences_per_gpu)
        runs = [
            launch(
                trained, ranks, gpt, ds_config(job, each), each.checkpointing, count, 3,
                timeout=PATIENCE,
            )[0]
            for each in (how, plain)
        ]  # fmt: skip
        losses = [run["losses"] for run in runs]
        fastest = min(r.step_seconds for r in [best.best, *best.others] if r.fits)
        return {
            "all rows": how.micro_batch * how.accumulation == job.sequences_per_gpu,
            "fits": runs[0]["peak"] <= toy.memory,
            "losses as under plan 0": all(
                abs(a - b) < 1e-4 for a, b in zip(*losses, strict=True)
            ),
            "slower than need be": predict(job, how).step_seconds > 1.05 * fastest,
        }
