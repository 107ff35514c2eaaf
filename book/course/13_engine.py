"""Chapter 13: an engine and its config."""

import copy

from minizero.config import ConfigError
from minizero.lab.course import Exercise, Wrong


class ThirdSize(Exercise):
    label = "ex-engine-1"
    answer = "accumulation"
    book = {"batch": 512, "micro": 4, "ranks": 48}
    starter = """
def accumulation(batch: int, micro: int, ranks: int) -> tuple[int | None, list[int]]:
    # Micro-batches a step, or None where it does not work; and the `train_batch_size`
    # that you would choose: the largest possible that is not above `batch`, the
    # smallest that is not below it.
    return 0, [0, 0]
"""
    public = """
assert accumulation(8, 8, 1) == (1, [8, 8])
"""
    reference = """
def accumulation(batch, micro, ranks):
    at_once = micro * ranks
    steps, rest = divmod(batch, at_once)
    if rest:
        return None, [steps * at_once, (steps + 1) * at_once]
    return steps, [batch, batch]
"""
    wrong = (
        Wrong(
            "rounded down",
            "return None, [",
            "return steps, [",
            "You rounded the accumulation down: the step would have fewer samples than"
            " the config says, so it is an error.",
        ),
        Wrong(
            "ranks forgotten",
            "at_once = micro * ranks",
            "at_once = micro",
            "You divided by the micro-batch: all ranks take one at the same time.",
        ),
        Wrong(
            "micro-batch forgotten",
            "at_once = micro * ranks",
            "at_once = ranks",
            "You divided by the ranks: each takes a whole micro-batch at a time.",
        ),
    )

    def draw(self, rng):
        cases = []
        for divides in (False, True, False):
            micro, n = rng.choice([2, 3, 4, 6]), rng.choice([6, 12, 24, 40])
            rest = 0 if divides else micro * rng.randint(1, n - 1)
            batch = rng.randint(3, 9) * micro * n + rest
            cases.append({"batch": batch, "micro": micro, "ranks": n})
        return cases


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


class RunsAhead(Exercise):
    label = "ex-engine-3"
    answer = "moved"
    points = 6
    book = {"micro_batches": 8, "accumulation": 4, "skipped": 1}
    starter = """
def moved(micro_batches: int, accumulation: int, skipped: int) -> tuple[int, int]:
    # How often the schedule has moved after so many micro-batches, of whose updates
    # some were skipped: with the script's own `scheduler.step()`, and without it.
    return 0, 0
"""
    public = """
assert moved(4, 4, 0)[1] == 1
"""
    reference = """
def moved(micro_batches, accumulation, skipped):
    by_engine = micro_batches // accumulation - skipped
    return micro_batches + by_engine, by_engine
"""
    wrong = (
        Wrong(
            "the engine's forgotten",
            "return micro_batches + by_engine",
            "return micro_batches",
            "You counted the script's own steps: the engine has the scheduler too, and"
            " moves it with each update.",
        ),
        Wrong(
            "skipped updates",
            " - skipped",
            "",
            "You counted the update that was skipped: the engine leaves the schedule"
            " where it was.",
        ),
        Wrong(
            "once an update",
            "return micro_batches + by_engine",
            "return micro_batches // accumulation + by_engine",
            "The script's own step is in the loop: it comes with each micro-batch, not"
            " with each update.",
        ),
    )
    explain = "Two repairs, and when each is the better one."

    def draw(self, rng):
        def case():
            m, updates = rng.choice([2, 3, 4, 6]), rng.randint(3, 9)
            return {
                "micro_batches": m * updates + rng.randint(0, 1), "accumulation": m,
                "skipped": rng.randint(1, updates - 1),
            }  # fmt: skip

        return self.telling(case, 2)


class KeyOfYourOwn(Exercise):
    label = "ex-engine-5"
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
