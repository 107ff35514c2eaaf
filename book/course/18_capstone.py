"""Chapter 18: the capstone."""

import gc
import tempfile
from dataclasses import replace

from minizero import launch
from minizero.lab.course import Exercise, Wrong
from minizero.lab.course.drivers import (
    PATIENCE,
    SEQUENCE,
    batch,
    built,
    gpt_of,
    trained,
)
from minizero.lab.models.gpt import count_parameters
from minizero.lab.toygpu import ToyGPU
from minizero.lab.toymachine import TOY, shape_of
from minizero.scale import Job, choose
from minizero.scale.planner import ds_config


class MicroBatches(Exercise):
    label = "ex-capstone-5"
    answer = "by_stage"
    book = {"psi": 701_952, "units": 7, "ranks": 4, "micro": 2}
    starter = """
def by_stage(
    psi: int, units: int, ranks: int, micro: int
) -> list[tuple[float, float, float]]:
    # For stages 0 to 3: bytes of state of a rank in fp32 with Adam, elements that it
    # sends in a step of `micro` micro-batches, and calls, without padding and norm.
    return [(0.0, 0.0, 0.0)] * 4
"""
    public = """
assert [calls for *_, calls in by_stage(8, 1, 2, 1)][0] == 1
assert by_stage(8, 1, 1, 1)[3][:2] == (128, 0)  # one rank has everything
"""
    reference = """
def by_stage(psi, units, ranks, micro):
    shard = psi / ranks
    once = psi - shard
    return [
        (16 * psi, 2 * once, units),
        (8 * psi + 8 * shard, 2 * once, 2 * units),
        (4 * psi + 12 * shard, (micro + 1) * once, (micro + 1) * units),
        (16 * shard, 3 * micro * once, 3 * micro * units),
    ]
"""
    wrong = (
        Wrong(
            "one moment",
            "(8 * psi + 8 * shard, 2 * once",
            "(12 * psi + 4 * shard, 2 * once",
            "At stage 1 you sharded one moment: Adam has two, of 4 bytes each.",
        ),
        Wrong(
            "all-reduces",
            "(8 * psi + 8 * shard, 2 * once, 2 * units)",
            "(8 * psi + 8 * shard, 3 * once, 2 * units)",
            "At stage 1 you reduced every gradient to all ranks and then gathered: a "
            "reduce-scatter is enough, so stages 0 and 1 send the same.",
        ),
        Wrong(
            "reduced once",
            "(micro + 1) * once, (micro + 1) * units",
            "2 * once, 2 * units",
            "At stage 2 you reduced once a step: a rank has room for its shard of the "
            "sum only, so every micro-batch is reduced.",
        ),
        Wrong(
            "gathered once",
            "(16 * shard, 3 * micro * once, 3 * micro * units)",
            "(16 * shard, 2 * micro * once, 2 * micro * units)",
            "Stage 3 frees a unit after forward and gathers it again for backward.",
        ),
    )

    def draw(self, rng):
        return [
            {
                "psi": ranks * rng.randint(1_000, 9_000),
                "units": rng.randint(3, 30),
                "ranks": ranks,
                "micro": rng.randint(2, 6),
            }
            for ranks in rng.sample([2, 3, 5, 8], 2)
        ]


class SmallestDevice(Exercise):
    label = "ex-capstone-1"
    on_ranks = True
    answer = "smallest"
    points = 8
    starter = """
from minizero.scale import Candidate, Job, predict


def smallest(job: Job) -> tuple[Candidate, float]:
    # The way to train this job that needs least of a device, with all rows of a rank
    # in one micro-batch; and the bytes that you predict, to 10 %.
    return Candidate(0, micro_batch=job.sequences_per_gpu), 0.0
"""
    public = """
from minizero.lab.models.gpt import GPTConfig
from minizero.lab.toymachine import TOY, shape_of
from minizero.scale import Job

shape = shape_of(GPTConfig(layers=2, hidden=32, heads=2, sequence=32))
how, said = smallest(Job(shape, TOY, 2, 4, 32, "fp32"))
assert how.micro_batch == 2 and said > 0
"""
    reference = """
from minizero.scale import Candidate, predict


def smallest(job):
    how = Candidate(
        3, "full", job.sequences_per_gpu, offload_optimizer="cpu", offload_param="cpu"
    )
    return how, predict(job, how).memory.total
"""
    wrong = (
        Wrong(
            "no activations",
            "predict(job, how).memory.total",
            "predict(job, how).memory.total - predict(job, how).memory.activations",
            "You left the activations out: with full checkpointing a block's input "
            "remains of each, and all of the one that is computed again.",
        ),
        Wrong(
            "keeps activations",
            '3, "full"',
            '3, "none"',
            "You keep all activations: with full checkpointing only a block's input "
            "is left.",
        ),
        Wrong(
            "parameters stay",
            ', offload_param="cpu"',
            "",
            "You leave the parameters' shards on the device: they can go, too.",
        ),
        Wrong(
            "stage 2",
            '3, "full", job.sequences_per_gpu, offload_optimizer="cpu", '
            'offload_param="cpu"',
            '2, "full", job.sequences_per_gpu, offload_optimizer="cpu"',
            "Under stage 2 a device holds all parameters at all times.",
        ),
    )
    explain = "The prediction in parts, written down before the run; the measured peak."

    def draw(self, rng):
        return [
            {"ranks": n, "layers": rng.randint(3, 7), "hidden": 16 * rng.randint(4, 6)}
            for n in (2, 3)
        ]

    @staticmethod
    def run(answer, ranks, layers, hidden):
        gpt, rows = gpt_of(layers, hidden), 2 * ranks
        job = Job(shape_of(gpt), TOY, ranks, rows, SEQUENCE, "fp32")
        how, said = answer(job)
        config = ds_config(job, how)
        ran = [gpt, config, how.checkpointing, rows, 2]
        peak = launch(trained, ranks, *ran, timeout=PATIENCE)[0]["peak"]
        return {"peak": peak, "prediction within 10 %": abs(said / peak - 1) < 0.1}


class FasterLink(Exercise):
    label = "ex-capstone-2"
    answer = "leaves"
    points = 6
    starter = """
from dataclasses import replace

from minizero.scale import Job, choose


def leaves(job: Job) -> float:
    # The speed of `job.machine.network`, in bytes a second and to one part in 10,000,
    # at which the planner leaves full checkpointing. It is between 10 MB/s and 10 GB/s.
    return 0.0
"""
    public = """
assert callable(leaves)
"""
    reference = """
from dataclasses import replace

from minizero.scale import choose


def leaves(job):
    low, high = 1e7, 1e10
    while high / low > 1.0001:
        speed = (low * high) ** 0.5
        machine = replace(job.machine, network=speed)
        if choose(replace(job, machine=machine)).best.candidate.checkpointing == "full":
            low = speed
        else:
            high = speed
    return high
"""
    wrong = (
        Wrong(
            "four speeds",
            "",
            """
from dataclasses import replace

from minizero.scale import choose


def leaves(job):
    for speed in (1e7, 1e8, 1e9, 1e10):
        machine = replace(job.machine, network=speed)
        if choose(replace(job, machine=machine)).best.candidate.checkpointing != "full":
            return speed
""",
            "You tried powers of ten: between two of them you know nothing. Halve the "
            "interval.",
        ),
        Wrong(
            "megabytes",
            "return high",
            "return high / 1e6",
            "You gave MB/s: the question is about bytes a second.",
        ),
        Wrong(
            "other sheet",
            "network=speed)",
            "pcie=speed)",
            "You changed the slot to the host: the link between ranks is `network`.",
        ),
    )
    explain = "What the planner takes instead, and why."

    def draw(self, rng):
        layers, hidden = rng.choice([(5, 112), (7, 96), (6, 80), (8, 80)])
        room = rng.randint(119, 121) / 10
        return [{"layers": layers, "hidden": hidden, "room": room}]

    @staticmethod
    def run(answer, layers, hidden, room):
        gpt = replace(gpt_of(layers, hidden), sequence=64)
        toy = replace(TOY, memory=room * count_parameters(gpt))
        return answer(Job(shape_of(gpt), toy, 4, 8, 64, "fp32"))


class LastRank(Exercise):
    label = "ex-capstone-3"
    on_ranks = True
    answer = "alone"
    points = 8
    starter = """
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from minizero.scale import Job, choose
from minizero.scale.planner import ds_config


def alone(
    job: Job,
    folder: str,
    build: Callable[[dict[str, Any], str], Any],
    batch: Callable[[int], Tensor],
    last: int,
) -> dict[int, float]:
    # Several ranks trained this job, and saved in `folder`. One is left: go on, and
    # return the mean loss of each step that is left before step `last`.
    # `build(config, checkpointing)` makes the engine, on a device of the job's
    # machine; `batch(step)` has all rows of a step, which are inputs and targets.
    mine = choose(job).best.candidate
    engine = build(ds_config(job, mine), mine.checkpointing)
    losses = {}
    while (step := engine.global_steps) < last:
        losses[step], rows = 0.0, batch(step)
        for x in rows.split(mine.micro_batch):
            loss = engine(x, x)
            engine.backward(loss)
            engine.step()
            losses[step] += loss.item() * len(x) / len(rows)
    return losses
"""
    public = """
assert callable(alone)
"""
    reference = starter.replace(
        "    mine =", "    job = replace(job, gpus=1)\n    mine ="
    ).replace(
        "    losses = {}\n", "    engine.load_checkpoint(folder)\n    losses = {}\n"
    )
    wrong = (
        Wrong(
            "starts at 0",
            "    engine.load_checkpoint(folder)\n",
            "",
            "You train from the beginning: load the checkpoint first.",
        ),
        Wrong(
            "as on all ranks",
            "    job = replace(job, gpus=1)\n",
            "",
            "You kept the plan and the micro-batches of all ranks: ask for one of one "
            "rank, and take all rows.",
        ),
        Wrong(
            "on the device",
            "    mine = choose(job).best.candidate\n",
            "    mine = choose(job).best.candidate\n"
            "    mine = replace(mine, offload_optimizer=None, offload_param=None)\n",
            "One rank holds all state, and its device does not: what does not fit goes "
            "to the host.",
        ),
        Wrong(
            "last micro-batch",
            "losses[step] +=",
            "losses[step] =",
            "You kept the last micro-batch's part: a step's loss is the mean over all.",
        ),
    )
    explain = "Which plan fits, and how far the losses are from those of all ranks."

    def draw(self, rng):
        return [
            {
                "ranks": rng.choice([2, 3]),
                "layers": rng.choice([4, 5]),
                "hidden": rng.choice([64, 80]),
                "stop": rng.randint(2, 4),
            }
        ]

    @staticmethod
    def run(answer, ranks, layers, hidden, stop):
        gpt, rows, last = gpt_of(layers, hidden), 2 * ranks, stop + 3
        toy = replace(TOY, memory=12 * count_parameters(gpt))
        job = Job(shape_of(gpt), toy, ranks, rows, SEQUENCE, "fp32")
        how, folder = choose(job).best.candidate, tempfile.mkdtemp()
        ran = [gpt, ds_config(job, how), how.checkpointing, rows, stop, folder]
        launch(trained, ranks, *ran, timeout=PATIENCE)
        gc.collect()  # engines of earlier cases
        with ToyGPU(toy.memory):
            found = answer(
                job,
                folder,
                lambda config, checkpointing: built(gpt, config, checkpointing),
                lambda step: batch(step, rows),
                last,
            )
        return {"steps": sorted(found), "losses": [found[i] for i in sorted(found)]}
