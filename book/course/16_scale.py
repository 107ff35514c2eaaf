"""Chapter 16: planning at scale."""

from dataclasses import replace

from minizero.lab.course import Exercise, Wrong
from minizero.scale import MODELS, Candidate, Job, Memory
from minizero.scale.machines import MACHINES
from minizero.scale.published import rows


class ByHand(Exercise):
    label = "ex-scale-1"
    answer = "tokens"
    book = {"peak": 989e12, "matmul": 0.641, "link": 450e9, "network": 50e9}
    starter = """
def tokens(
    peak: float, matmul: float, link: float, network: float
) -> tuple[float, float]:
    # From so many tokens a GPU on, a block's forward hides the next all-gather: over
    # NVLink, over the network. Products reach `matmul` of the peak, NVLink 0.78 of
    # its speed, the network 0.9.
    return 0.0, 0.0
"""
    public = """
assert len(tokens(1e15, 0.5, 1e11, 1e10)) == 2
"""
    reference = """
def tokens(peak, matmul, link, network):
    # 2 P T / F seconds to compute, 2 P / speed to gather
    return matmul * peak / (0.78 * link), matmul * peak / (0.9 * network)
"""
    wrong = (
        Wrong(
            "at the peak",
            "matmul * peak",
            "peak",
            "You let products run at the peak: they reach only a share of it.",
        ),
        Wrong(
            "nominal links",
            "(0.78 * link), matmul * peak / (0.9 * network)",
            "link, matmul * peak / network",
            "You took the links' nominal speeds: a transfer reaches 78 and 90 %.",
        ),
        Wrong(
            "one byte",
            "matmul * peak",
            "matmul * peak / 2",
            "A factor of 2 is missing: a parameter has two bytes, and costs two "
            "operations a token.",
        ),
        Wrong(
            "chapter 8's",
            "matmul * peak / (0.78 * link), matmul * peak / (0.9 * network)",
            "0.4 * peak * 7 / 8 / link, 0.4 * peak * 7 / 8 / network",
            "These are chapter 8's shares: 40 % of the peak, and links at full speed.",
        ),
    )

    def draw(self, rng):
        return [
            {
                "peak": rng.randint(20, 240) * 1e13,
                "matmul": rng.randint(50, 80) / 100,
                "link": rng.randint(10, 90) * 1e10,
                "network": rng.randint(10, 90) * 1e9,
            }
            for _ in range(2)
        ]


class SmallerBucket(Exercise):
    label = "ex-scale-6"
    answer = "reductions"
    book = {"blocks": 80, "block": 855_654_400, "root": 2_101_354_496}
    book |= {"bucket": 50_000_000, "latency": 0.0001456}
    starter = """
def reductions(
    blocks: int, block: int, root: int, bucket: int, latency: float
) -> tuple[int, float]:
    # Reduce-scatters of a micro-batch under ZeRO-3, and the seconds that their latency
    # takes. There are so many blocks of `block` parameters, and a root. `bucket` is
    # the config's `reduce_bucket_size`, in elements.
    return 0, 0.0
"""
    public = """
assert reductions(1, 100, 100, 100, 0.5) == (2, 1.0)
"""
    reference = """
from math import ceil


def reductions(blocks, block, root, bucket, latency):
    calls = blocks * ceil(block / bucket) + ceil(root / bucket)
    return calls, calls * latency
"""
    wrong = (
        Wrong(
            "across units",
            "blocks * ceil(block / bucket) + ceil(root / bucket)",
            "ceil((blocks * block + root) / bucket)",
            "You let a bucket span units: each unit is reduced by itself.",
        ),
        Wrong(
            "rounded down",
            "blocks * ceil(block / bucket) + ceil(root / bucket)",
            "blocks * (block // bucket) + root // bucket",
            "You left out the last bucket of a unit, which is not full.",
        ),
        Wrong(
            "bytes",
            "blocks * ceil(block / bucket) + ceil(root / bucket)",
            "blocks * ceil(2 * block / bucket) + ceil(2 * root / bucket)",
            "You compared bytes with a number of elements: the key counts elements.",
        ),
        Wrong(
            "without the root",
            " + ceil(root / bucket)",
            "",
            "You left out the root, which has the embedding and the head.",
        ),
    )

    def draw(self, rng):
        return self.telling(
            lambda: {
                "blocks": rng.randint(20, 90),
                "block": rng.randint(100, 900) * 10**6,
                "root": rng.randint(200, 2_000) * 10**6,
                "bucket": rng.randint(30, 90) * 10**6,
                "latency": rng.randint(20, 900) * 1e-6,
            },
            2,
        )


class MachineOfYourOwn(Exercise):
    label = "ex-scale-2"
    answer = "fit"
    points = 6
    starter = """
from dataclasses import replace

from minizero.scale.machines import Machine
from minizero.scale.published import Row, calibrate


def fit(
    machine: Machine, published: list[Row], model: str, sequences: list[int]
) -> tuple[float, float]:
    # `matmul` and `attention`, fitted from 0.5 and 0.5 on those of the published rows
    # that are of this model on this machine ("DGX A100" has the rows "a100-80gb"),
    # with these lengths.
    return 0.5, 0.5
"""
    public = """
from minizero.scale.machines import A100
from minizero.scale.published import rows

assert len(fit(A100, rows(), "mpt-125m", [512])) == 2
"""
    reference = """
from dataclasses import replace

from minizero.scale.published import calibrate


def fit(machine, published, model, sequences):
    chosen = [
        row
        for row in published
        if row.machine == "a100-80gb"
        and row.model == model
        and row.sequence in sequences
    ]
    mine = calibrate(replace(machine, matmul=0.5, attention=0.5), chosen)
    return mine.matmul, mine.attention
"""
    wrong = (
        Wrong(
            "from the fitted ones",
            "replace(machine, matmul=0.5, attention=0.5)",
            "machine",
            "You began with constants that were fitted to all rows: begin with 0.5 "
            "and 0.5.",
        ),
        Wrong(
            "any machine",
            'row.machine == "a100-80gb"\n        and row.model',
            "row.model",
            "You fitted rows of other machines as well.",
        ),
        Wrong(
            "shortest only",
            "row.sequence in sequences",
            "row.sequence == min(sequences)",
            "You left out the long sequences: they alone say what attention reaches.",
        ),
        Wrong(
            "any length",
            "        and row.sequence in sequences\n",
            "",
            "You fitted all lengths: you have three runs.",
        ),
    )
    explain = (
        "The long sequence pins attention; of a narrow block's time products are "
        "little more than half, so errors of the rest go into `matmul`."
    )

    def draw(self, rng):
        model = rng.choice(["mpt-350m", "mpt-760m"])
        lengths = [rng.choice([512, 1024]), rng.choice([4096, 8192]), 32_768]
        return [{"model": model, "sequences": lengths}]

    @staticmethod
    def run(answer, model, sequences):
        some = [
            row
            for row in rows()
            if row.model == model and row.sequence in (*sequences, 2048)
        ]
        start = replace(MACHINES["a100-80gb"], matmul=0.9, attention=0.9)
        found = answer(start, some, model, sequences)
        return dict(zip(("matmul", "attention"), found, strict=True))


def on_h100s(model, gpus, sequence):
    """One sequence a GPU, on H100s."""
    return Job(MODELS[model], MACHINES["h100-80gb"], gpus, gpus, sequence)


class WhatTheScriptLeavesOut(Exercise):
    label = "ex-scale-3"
    answer = "left_out"
    starter = """
from minizero.memory import estimate
from minizero.scale import Candidate, Job, predict


def left_out(job: Job) -> tuple[float, float, bool]:
    # Of a GPU under ZeRO-3, with one sequence and all blocks recomputed: bytes of the
    # units in use, which the script leaves out; bytes of the activations; and whether
    # the job fits, with a tenth of the GPU left free.
    return 0.0, 0.0, estimate(job.shape.parameters, job.gpus, 3).total < 80e9
"""
    public = """
from minizero.scale import MACHINES, MODELS, Job

units, activations, fits = left_out(
    Job(MODELS["llama-8b"], MACHINES["h100-80gb"], 8, 8, 2048)
)
assert fits
"""
    reference = """
from minizero.memory import estimate
from minizero.scale import Candidate, predict


def left_out(job):
    result = predict(job, Candidate(3, "full"))
    state = estimate(job.shape.parameters, job.gpus, 3).total
    held = result.memory
    return held.total - state - held.activations, held.activations, result.fits
"""
    wrong = (
        Wrong(
            "one number",
            "held.total - state - held.activations",
            "held.total - state",
            "You counted the activations among the units: take them off.",
        ),
        Wrong(
            "all kept",
            'Candidate(3, "full")',
            "Candidate(3)",
            "You kept all activations: this run computes its blocks again.",
        ),
        Wrong(
            "no tenth free",
            "result.fits",
            "held.total <= job.machine.memory",
            "You filled the GPU to the last byte: leave a tenth of it free.",
        ),
    )
    explain = "Why these bytes are as many on 64 GPUs as on 8, unlike the state."

    def draw(self, rng):
        rooms = {0.9: [], 1.0: [], 2.0: []}  # by the share of a GPU
        for model in ("llama-8b", "llama-70b"):
            for gpus in range(2, 65):
                for sequence in (1024, 2048, 3072, 4096):
                    job = on_h100s(model, gpus, sequence)
                    used = Memory.of(job, Candidate(3, "full")).total
                    most = next((m for m in rooms if used < m * job.machine.memory), 0)
                    if most:
                        case = {"model": model, "gpus": gpus, "sequence": sequence}
                        rooms[most].append(case)
        return [rng.choice(cases) for cases in rooms.values()]

    @staticmethod
    def run(answer, model, gpus, sequence):
        return answer(on_h100s(model, gpus, sequence))


class ThreeTerms(Exercise):
    label = "ex-scale-5"
    answer = "extended"
    points = 6
    starter = """
from minizero.scale.machines import Machine, bus
from minizero.scale.shapes import Shape


def extended(
    shape: Shape, machine: Machine, gpus: int, tokens: int, sequence: int
) -> float:
    # Tokens per second of a GPU under ZeRO-3 with full checkpointing: the chapter's
    # `tokens_per_second`, to which you add attention's scores, the latency of each
    # collective, and the bytes that Adam moves.
    flops = machine.matmul * machine.peak
    _, link = bus(machine, gpus)
    seconds = 0.0
    for units, n in ((shape.layers, shape.block), (1, shape.root)):
        forward = max(2 * n * tokens / flops, 2 * n / link)
        backward = max(6 * n * tokens / flops, 4 * n / link)
        seconds += units * (forward + backward)
    return tokens / seconds
"""
    public = """
from minizero.scale import MACHINES, MODELS

assert extended(MODELS["llama-8b"], MACHINES["a100-80gb"], 64, 2048, 2048) < 5000
"""
    reference = """
from minizero.scale.machines import bus


def extended(shape, machine, gpus, tokens, sequence):
    flops = machine.matmul * machine.peak
    latency, link = bus(machine, gpus)
    scores = 2 * shape.hidden * sequence * tokens / (machine.attention * machine.peak)
    seconds = 40 * shape.parameters / gpus / machine.hbm
    for units, n, more in ((shape.layers, shape.block, scores), (1, shape.root, 0)):
        forward = 2 * n * tokens / flops + more
        seconds += units * max(forward, latency + 2 * n / link)
        seconds += units * max(3 * forward, 2 * latency + 4 * n / link)
    return tokens / seconds
"""
    wrong = (
        Wrong(
            "scores of forward alone",
            "max(3 * forward, ",
            "max(3 * forward - 2 * more, ",
            "Backward has the scores too: it computes them again, and their gradients.",
        ),
        Wrong(
            "scores like products",
            "(machine.attention * machine.peak)",
            "flops",
            "You let attention run at the speed of large products: it reaches "
            "`machine.attention` of the peak.",
        ),
        Wrong(
            "one collective",
            "2 * latency + 4 * n",
            "latency + 4 * n",
            "Backward has two collectives for a unit, a gather and a reduce-scatter, "
            "each with its latency.",
        ),
        Wrong(
            "unsharded update",
            "40 * shape.parameters / gpus / machine.hbm",
            "40 * shape.parameters / machine.hbm",
            "Each rank updates its own shard only.",
        ),
    )

    def draw(self, rng):
        return [
            {
                "model": model,
                "gpus": 8 * rng.randint(2, 64),
                "tokens": rng.randint(*tokens),
                "sequence": rng.choice([2048, 4096]),
            }
            for model, tokens in (("llama-8b", (64, 256)), ("llama-70b", (4096, 9999)))
        ]

    @staticmethod
    def run(answer, model, gpus, tokens, sequence):
        shape, machine = MODELS[model], MACHINES["a100-80gb"]
        return answer(shape, machine, gpus, tokens, sequence)
