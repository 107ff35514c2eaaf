"""Chapter 13: an engine and its config."""

import copy

from minizero.config import ConfigError
from minizero.lab.course import Exercise, Wrong


class HowMany(Exercise):
    label = "ex-engine-1"
    answer = "usable"
    book = {"batch": 480, "most": 6, "gpus": 64}
    starter = """
def usable(batch: int, most: int, gpus: int) -> tuple[int, int, int]:
    # The largest number of ranks that a run of this `train_batch_size` can use, the
    # largest micro-batch of at most `most` samples that works then, the accumulation.
    return 0, 0, 0
"""
    public = """
assert usable(8, 8, 1) == (1, 8, 1)
"""
    reference = """
def usable(batch, most, gpus):
    ranks = max(n for n in range(1, gpus + 1) if batch % n == 0)
    share = batch // ranks
    micro = max(n for n in range(1, most + 1) if share % n == 0)
    return ranks, micro, share // micro
"""
    wrong = (
        Wrong(
            "all of them",
            "max(n for n in range(1, gpus + 1) if batch % n == 0)",
            "gpus",
            "You used all GPUs: they do not divide the batch, so an update would have"
            " fewer samples.",
        ),
        Wrong(
            "most that fits",
            "max(n for n in range(1, most + 1) if share % n == 0)",
            "min(most, share)",
            "You took as many samples as fit: they do not divide the share of a rank.",
        ),
        Wrong(
            "power of two",
            "if batch % n == 0)",
            "if batch % n == 0 and n & (n - 1) == 0)",
            "You looked at powers of two only: any number of ranks works that divides"
            " the batch.",
        ),
    )

    def draw(self, rng):
        def case():
            n, share = rng.choice([9, 12, 15, 20, 30]), rng.choice([4, 8, 9, 10, 14])
            gpus = n + rng.randint(1, 7)
            return {"batch": n * share, "most": rng.randint(3, 8), "gpus": gpus}

        return self.telling(case, 2)


class Kilobytes(Exercise):
    label = "ex-engine-2"
    answer = "sent"
    points = 6
    book = {
        "units": [8_768, 12_704, 12_704], "threshold": 10_000, "micro_batches": 4,
        "ranks": 4,
    }  # fmt: skip
    starter = """
def sent(units: list[int], threshold: int, micro_batches: int, ranks: int) -> int:
    # Elements that a rank sends in one step at stage 3. The units have so many
    # elements, each a multiple of the ranks; the config's
    # `stage3_param_persistence_threshold` is `threshold`.
    return 0
"""
    public = """
assert sent([8], 0, 1, 2) == 12  # two gathers and a reduction, of half a unit each
"""
    reference = """
def sent(units, threshold, micro_batches, ranks):
    total = 0
    for n in units:
        times = 3 * micro_batches if n >= threshold else micro_batches + 1
        total += times * n
    return total * (ranks - 1) // ranks
"""
    wrong = (
        Wrong(
            "bytes",
            "n >= threshold",
            "4 * n >= threshold",
            "You compared bytes with the threshold: the key counts elements.",
        ),
        Wrong(
            "all sharded",
            "3 * micro_batches if n >= threshold else micro_batches + 1",
            "3 * micro_batches",
            "You left the threshold out: units with fewer elements stay unsharded.",
        ),
        Wrong(
            "reduced once",
            "else micro_batches + 1",
            "else 2",
            "You reduced a small unit's gradients once in a step: at stage 3 gradients"
            " are sharded, so each micro-batch reduces.",
        ),
        Wrong(
            "all of it",
            "total * (ranks - 1) // ranks",
            "total",
            "You sent the rank's own part, too: it sends (N - 1)/N of a unit.",
        ),
    )
    explain = "Why no unit was sharded, and what the key must be in fp32 and in bf16."

    def draw(self, rng):
        def case():
            n = rng.choice([2, 4, 8])
            threshold = n * rng.randint(200, 900)
            units = [n * rng.randint(30, 1500) for _ in range(rng.randint(3, 6))]
            return {
                "units": [*units, threshold], "threshold": threshold,
                "micro_batches": rng.randint(2, 9), "ranks": n,
            }  # fmt: skip

        return self.telling(case, 2)


class EndOfEpoch(Exercise):
    label = "ex-engine-3"
    answer = "sums"
    points = 6
    book = {"epochs": 3, "length": 10, "m": 4}
    starter = """
def sums(epochs: int, length: int, m: int) -> tuple[list[float], list[float]]:
    # Of each update, how many micro-batches its gradient has summed, divided by m:
    # of the loop with so many micro-batches an epoch, and of the package's engine.
    return [], []
"""
    public = """
assert sums(1, 8, 4) == ([1, 1], [1, 1])
"""
    reference = """
def sums(epochs, length, m):
    by_loop, left = [], 0
    for _ in range(epochs):
        for i in range(length):
            left += 1
            if (i + 1) % m == 0:
                by_loop.append(left / m)
                left = 0
    return by_loop, [1.0] * (epochs * length // m)
"""
    wrong = (
        Wrong(
            "left ones lost",
            "    for _ in range(epochs):\n",
            "    for _ in range(epochs):\n        left = 0\n",
            "You dropped what is left at the end of an epoch: nothing sets its "
            "gradients to zero before the next update.",
        ),
        Wrong(
            "the engine, too",
            "[1.0] * (epochs * length // m)",
            "by_loop",
            "You let the engine count anew in each epoch: it sees calls of `step`, and "
            "no epochs.",
        ),
        Wrong(
            "whole epochs",
            "epochs * length // m",
            "epochs * (length // m)",
            "You let the engine lose the end of each epoch: what is left there belongs "
            "to its next update.",
        ),
        Wrong(
            "a last update",
            "    return by_loop,",
            "    if left:\n        by_loop.append(left / m)\n    return by_loop,",
            "You made an update of what is left at the end: the loop has none.",
        ),
    )
    explain = "Two repairs of the loop, and what each does to the last micro-batches."

    def draw(self, rng):
        def case():
            m = rng.choice([3, 4, 5, 6])
            length = m * rng.randint(1, 3) + rng.randint(1, m - 1)
            return {"epochs": rng.randint(3, 6), "length": length, "m": m}

        return self.telling(case, 2)


class KeyOfYourOwn(Exercise):
    label = "ex-engine-4"
    answer = "scaled"
    points = 8
    starter = """
from minizero.config import ConfigError, read


def scaled(config: dict, ranks: int) -> dict:
    # The config for `initialize`, without the key "reference_batch_size", with the
    # optimizer's `lr` multiplied by train_batch_size / reference_batch_size. A value
    # that is no number of samples raises a ConfigError. `config` stays as it is.
    return config
"""
    public = """
from minizero.config import read

plain = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}
assert scaled(plain, 2) == plain  # without the key nothing changes
"""
    reference = """
from minizero.config import ConfigError, read


def scaled(config, ranks):
    rest = dict(config)
    own = rest.pop("reference_batch_size", None)
    if own is None:
        return rest
    if not isinstance(own, int) or own < 1:
        raise ConfigError([f"reference_batch_size counts samples, not {own!r}"])
    factor = read(rest, ranks).train_batch_size / own
    optimizer = rest["optimizer"]
    params = optimizer["params"]
    params = params | {"lr": params["lr"] * factor}
    return rest | {"optimizer": optimizer | {"params": params}}
"""
    wrong = (
        Wrong(
            "the key stays",
            "return rest | {",
            "return config | {",
            "Your config still has the key: `initialize` refuses it as unknown.",
        ),
        Wrong(
            "changed in place",
            '    params = params | {"lr": params["lr"] * factor}\n',
            '    params["lr"] *= factor\n',
            "You change the caller's dict: a second call scales the rate twice.",
        ),
        Wrong(
            "ranks forgotten",
            "read(rest, ranks)",
            "read(rest, 1)",
            "You completed the sizes for one rank: the batch is that of all ranks.",
        ),
        Wrong(
            "no check",
            "    if not isinstance(own, int) or own < 1:\n",
            "    if False:\n",
            "A value of 0 or a string ends in an error of Python's, not in a sentence"
            " about the key.",
        ),
    )
    explain = "Who reports a misspelling, and where the run shows the rate."

    def draw(self, rng):
        return [
            {
                "ranks": n, "micro": rng.randint(2, 6), "steps": rng.randint(2, 5),
                "reference": rng.choice([8, 16, 24]), "lr": rng.randint(1, 9) / 1000,
            }
            for n in rng.sample([3, 4, 6], 2)
        ]  # fmt: skip

    @staticmethod
    def run(answer, ranks, micro, steps, reference, lr):
        def config(**more):
            optimizer = {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.1}}
            return {
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": steps, "optimizer": optimizer,
            } | more  # fmt: skip

        def refused(value):
            try:
                answer(config(reference_batch_size=value), ranks)
            except ConfigError as error:
                return "reference_batch_size" in str(error)
            except Exception:
                return False
            return False

        given = config(reference_batch_size=reference)
        before = copy.deepcopy(given)
        found = answer(given, ranks)
        misspelt = answer(config(reference_batchsize=reference), ranks)
        return {
            "rate": found["optimizer"]["params"]["lr"],
            "keys": sorted(found),
            "other options": found["optimizer"]["params"].get("weight_decay"),
            "the caller's config is as before": given == before,
            "a sentence for 0": refused(0),
            "a sentence for a string": refused("16"),
            "a misspelt key is left to initialize": "reference_batchsize" in misspelt,
            "without the key": answer(config(), ranks) == config(),
        }


class DoesNotDivide(Exercise):
    label = "ex-engine-5"
    answer = "shares"
    points = 10
    starter = """
def shares(batch: int, ranks: int, most: int) -> list[list[tuple[int, float]]]:
    # Of each rank a list of its micro-batches: the samples of each, and the factor by
    # which its mean loss is multiplied, as the chapter asks. `batch` >= `ranks`, and
    # `most` >= 2.
    return [[(most, 1.0)] for _ in range(ranks)]
"""
    public = """
assert shares(8, 2, 4) == [[(4, 1.0)], [(4, 1.0)]]
assert sum(size for mine in shares(10, 4, 3) for size, _ in mine) == 10
"""
    reference = """
def shares(batch, ranks, most):
    m = -(-batch // (ranks * most))
    size, larger = divmod(batch, ranks * m)
    sizes = [size + (i < larger) for i in range(ranks * m)]
    pieces = [(s, s * ranks / batch) for s in sizes]
    return [pieces[r * m : (r + 1) * m] for r in range(ranks)]
"""
    wrong = (
        Wrong(
            "every micro-batch alike",
            "s * ranks / batch) for",
            "1 / m) for",
            "You gave micro-batches of different sizes one factor: a sample of a small "
            "one weighs more.",
        ),
        Wrong(
            "ranks forgotten",
            "s * ranks / batch) for",
            "s / batch) for",
            "You forgot that `backward` averages over ranks: gradients are too small.",
        ),
        Wrong(
            "not all alike",
            "    return [pieces[r * m : (r + 1) * m] for r in range(ranks)]",
            "    sizes = [min(most, batch - i) for i in range(0, batch, most)]\n"
            "    pieces = [(s, s * ranks / batch) for s in sizes]\n"
            "    return [pieces[r::ranks] for r in range(ranks)]",
            "Your ranks have different numbers of micro-batches: under ZeRO-3 those "
            "with more wait for the others' collectives.",
        ),
        Wrong(
            "one sample each",
            "-(-batch // (ranks * most))",
            "batch // ranks",
            "You took more micro-batches than are needed: each of them gathers and"
            " reduces.",
        ),
    )
    explain = "Why all ranks need equally many micro-batches, and from which stage on."

    def draw(self, rng):
        cases = []
        for n in rng.sample([3, 4, 5, 6, 7], 4):
            most = rng.randint(4, 7)
            m = rng.randint(2, 4)
            rest = rng.randint(1, most * (n - 1) - 1)  # too few for all ranks
            batch = n * most * (m - 1) + rest
            batch += batch % (n * m) == 0
            cases.append({"batch": batch, "ranks": n, "most": most})
        return cases

    @staticmethod
    def run(answer, batch, ranks, most):
        lists = answer(batch, ranks, most)
        found = [[(int(s), float(f)) for s, f in mine] for mine in lists]
        every = [piece for mine in found for piece in mine]
        sizes = [size for size, _ in every]
        start, mean, total = 0, 0.0, 0.0
        for size, factor in every:
            rows = [i * i for i in range(start, start + size)]
            mean += factor * sum(rows) / max(1, size) / ranks
            total += factor / ranks
            start += size
        return {
            "ranks": len(found),
            "samples": sum(sizes),
            "at most so many at a time": max(sizes) <= most,
            "none is empty": min(sizes) > 0,
            "sizes differ by at most one": max(sizes) - min(sizes) <= 1,
            "micro-batches of each rank": [len(mine) for mine in found],
            "sum of the weights": total,
            "mean over samples": mean,
        }
