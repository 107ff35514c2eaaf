"""Chapter 4: precision."""

import torch

from minizero.lab.course import Exercise, Wrong


class ACounterStops(Exercise):
    label = "ex-precision-1"
    answer = "stops"
    book = {"step": 2.0**-7, "add": 1.0}
    starter = """
def stops(step: float, add: float) -> float:
    # Where a sum stops that starts at 0 and grows by `add`, a power of two, in a format
    # whose step at 1 is `step`.
    return 0.0
"""
    public = """
assert stops(2.0**-10, 1.0) > 0
"""
    reference = """
def stops(step, add):
    return 2 * add / step
"""
    wrong = (
        Wrong(
            "one step",
            "2 * add",
            "add",
            "Where the step is as large as `add`, the sum still grows.",
        ),
        Wrong(
            "below half a step",
            "2 * add",
            "4 * add",
            "It has stopped before: half a step goes to the even neighbor, back down.",
        ),
        Wrong(
            "always by 1",
            "2 * add",
            "2",
            "You left out `add`: larger summands get further.",
        ),
    )

    def draw(self, rng):
        return [
            {"step": 2.0 ** -rng.randint(8, 23), "add": 2.0 ** rng.randint(2, 6)}
            for _ in range(2)
        ]


class RoundSometimes(Exercise):
    label = "ex-precision-2"
    answer = "stochastic_round"
    points = 6
    starter = """
import torch
from torch import Tensor


def stochastic_round(x: Tensor) -> Tensor:
    # From fp32 to bf16: up or down at random, so that the mean is right.
    return x.bfloat16()
"""
    public = """
assert stochastic_round(torch.ones(3)).dtype == torch.bfloat16
"""
    reference = """
import torch


def stochastic_round(x):
    bits = x.view(torch.int32)
    noise = torch.randint_like(bits, 2**16)
    return ((bits + noise) & -(2**16)).view(torch.float32).to(torch.bfloat16)
"""
    wrong = (
        Wrong(
            "to the nearest",
            "",
            starter,
            "You round to the nearest: a small update is lost every time.",
        ),
        Wrong(
            "down",
            "bits + noise",
            "bits",
            "You cut the lower bits off, which always rounds towards zero.",
        ),
        Wrong(
            "a fair coin",
            "noise = torch.randint_like(bits, 2**16)",
            "noise = torch.randint_like(bits, 2) * (2**16 - 1)",
            "You go up in half of the draws: the probability must be the distance to "
            "the"
            " lower neighbor.",
        ),
    )

    def draw(self, rng):
        return [
            {
                "value": rng.choice([-1, 1]) * (1 + rng.randint(0, 30) / 128),
                "part": part,
            }
            for part in (rng.choice([0.8, 0.85]), rng.choice([0.2, 0.25]))
        ]

    @staticmethod
    def run(answer, value, part):
        torch.manual_seed(0)
        step = 1 / 128  # of bf16 between 1 and 2
        up = value + step * (1 if value > 0 else -1)
        between = value + part * (up - value)
        drawn = answer(torch.full((20_000,), between)).float()
        share = (drawn == up).float().mean().item()
        exact = answer(torch.full((1000,), value)).float()
        return {
            "the mean is right": abs(share - part) < 0.02,
            "always the same": share in (0, 1),
            "half go up": abs(share - 0.5) < 0.02,
            "away from zero": share > 0.5,
            "only neighbors": bool(((drawn == up) | (drawn == value)).all()),
            "exact values stay": bool((exact == value).all()),
        }


class ClipIn16Bit(Exercise):
    label = "ex-precision-3"
    answer = "ClipsInPlace"
    points = 6
    starter = """
from minizero.precision import MixedPrecision
from minizero.zero import Precision


class ClipsInPlace(MixedPrecision):
    "Clips the fp16 gradients in place, as plan 0's own `Precision` does in fp32."
"""
    public = """
assert issubclass(ClipsInPlace, MixedPrecision)
"""
    reference = """
from minizero.precision import MixedPrecision
from minizero.zero import Precision


class ClipsInPlace(MixedPrecision):
    def clip(self, grads, factor):
        Precision.clip(self, grads, factor)
"""
    wrong = (
        Wrong(
            "unchanged",
            "    def clip(self, grads, factor):\n"
            "        Precision.clip(self, grads, factor)",
            "    pass",
            "`MixedPrecision` keeps the factor until gradients are fp32: no element is"
            " lost, and nothing is clipped in place.",
        ),
        Wrong(
            "clips twice",
            "        Precision.clip(self, grads, factor)",
            "        Precision.clip(self, grads, factor)\n"
            "        super().clip(grads, factor)",
            "You clip in place and again in fp32: the norm is far below the limit.",
        ),
        Wrong(
            "clips nothing",
            "        Precision.clip(self, grads, factor)",
            "        pass",
            "Nothing is clipped: the optimizer gets gradients above the limit.",
        ),
    )

    def draw(self, rng):
        return [
            {
                "hidden": 12 * rng.randint(3, 5),
                "max_norm": limit,
                "seed": rng.randint(0, 99),
            }
            for limit in (1e-3, 2e-3)
        ]

    @staticmethod
    def run(answer, hidden, max_norm, seed):
        from minizero import Plan, parallelize
        from minizero.lab.models.gpt import GPT, GPTConfig
        from minizero.precision import LossScale, MixedPrecision

        def zeros(kind):
            found = {"zeros": 0, "square": 0.0}

            class Counted(kind):
                def cast_grad(self, grad):
                    grad = super().cast_grad(grad)
                    found["zeros"] += int((grad == 0).sum())
                    found["square"] += grad.double().square().sum().item()
                    return grad

            torch.manual_seed(seed)
            model = GPT(GPTConfig(layers=2, hidden=hidden, heads=3, sequence=16))
            adamw = torch.optim.AdamW(model.parameters())
            precision = Counted(torch.float16, loss_scale=LossScale(1024))
            net = parallelize(model, adamw, Plan.stage(0), precision=precision)
            text = torch.randint(256, (8, 17))
            net.backward(net(text[:, :-1], text[:, 1:]))
            net.clip_grad_norm(max_norm)
            net.step()
            return found["zeros"], found["square"] ** 0.5

        (few, _), (many, norm) = zeros(MixedPrecision), zeros(answer)
        return {
            "flushes many more than MixedPrecision": many > 3 * few,
            "the norm is at the limit": 0.9 < norm / max_norm < 1.1,
        }


class OneStepInAThousand(Exercise):
    label = "ex-precision-4"
    answer = "given"
    points = 6
    book = {"norms": [0.5, 1.5, 3.0], "limit": 1.0, "carried": 1024, "unscaled": 2048}
    starter = """
def given(norm: float, limit: float, carried: float, unscaled: float) -> float:
    # What a gradient of 1 becomes in `unscale_and_clip`, when the loss was multiplied
    # by `carried` and `self.loss_scale` is `unscaled`; `norm` is the true norm.
    return 0.0
"""
    public = """
assert given(0.5, 1.0, 1024, 1024) == 1
"""
    reference = """
def given(norm, limit, carried, unscaled):
    seen = norm * carried / unscaled
    return carried / unscaled / max(1.0, seen / limit)
"""
    wrong = (
        Wrong(
            "always half",
            " / max(1.0, seen / limit)",
            "",
            "You left clipping out: a norm above the limit shrinks the gradient as "
            "well.",
        ),
        Wrong(
            "the true norm",
            "norm * carried / unscaled",
            "norm",
            "You clipped by the true norm, but the code divides the norm by the new "
            "scale"
            " too: the scale cancels in a step that is clipped.",
        ),
        Wrong(
            "the other way",
            "carried / unscaled / max",
            "unscaled / carried / max",
            "The gradients carry the old scale and are divided by the new one.",
        ),
    )
    explain = "Which steps are wrong, by what factor, and why Adam hides it."

    def draw(self, rng):
        return [
            {
                "norms": [
                    limit * part
                    for part in (
                        0.4,
                        rng.randint(11, 19) / 10,
                        rng.randint(22, 39) / 10,
                    )
                ],
                "limit": limit,
                "carried": 2.0**power,
                "unscaled": 2.0 ** (power + 1),
            }
            for limit, power in zip(
                rng.sample([0.25, 0.5, 2.0, 4.0], 2),
                rng.sample(range(5, 14), 2),
                strict=True,
            )
        ]

    @staticmethod
    def run(answer, norms, limit, carried, unscaled):
        return [float(answer(norm, limit, carried, unscaled)) for norm in norms]


class GatherIn8Bit(Exercise):
    label = "ex-precision-5"
    answer = "sent"
    points = 6
    book = {"ranks": 8}
    starter = """
def sent(ranks: int) -> tuple[float, float]:
    # Bytes per parameter that a rank sends in a step of ZeRO-3: all in bf16; with
    # gathers in e4m3 and reduce-scatters in bf16.
    return 0.0, 0.0
"""
    public = """
assert sent(1) == (0, 0)
"""
    reference = """
def sent(ranks):
    share = (ranks - 1) / ranks
    return share * (2 + 2 + 2), share * (1 + 1 + 2)
"""
    wrong = (
        Wrong(
            "reduce too",
            "1 + 1 + 2",
            "1 + 1 + 1",
            "You reduced in 8 bit too: gradients are still sent in bf16.",
        ),
        Wrong(
            "one gather",
            "1 + 1 + 2",
            "1 + 2 + 2",
            "You quantized one of the two gathers: both read the same shards.",
        ),
        Wrong(
            "own shard sent",
            "(ranks - 1) / ranks",
            "1",
            "You sent a rank's own shard too: it stays where it is.",
        ),
    )
    explain = (
        "A scale for each weight, agreed by an all-reduce of maxima after the update,"
        " one"
        " message; which parameters stay in bf16, and why."
    )

    def draw(self, rng):
        return [{"ranks": n} for n in rng.sample([3, 5, 6, 12, 24], 2)]
