"""Chapter 15: Hugging Face."""

import os
import tempfile

import torch

from minizero import comm, launch
from minizero.lab.course import Exercise, Wrong
from minizero.lab.course.drivers import PATIENCE, Odd, digest, rows
from minizero.ranks import rank
from minizero.zero import DataParallel, ZeRO3


class ThreeSizes(Exercise):
    label = "ex-hf-1"
    answer = "sizes"
    book = {"train_batch": 256, "micro": 4, "accumulation": 16, "ranks": 2}
    starter = """
def sizes(
    train_batch: int, micro: int, accumulation: int, ranks: int
) -> tuple[int, list[int]]:
    # On how many ranks a script with these three sizes runs; and, on `ranks` of them,
    # the two numbers that the sentence names: the config's, then the arguments'. No
    # number where there is nothing to say.
    return 0, []
"""
    public = """
assert sizes(8, 2, 2, 2) == (2, [])
"""
    reference = """
def sizes(train_batch, micro, accumulation, ranks):
    product = micro * accumulation * ranks
    said = [train_batch, product] if product != train_batch else []
    return train_batch // (micro * accumulation), said
"""
    wrong = (
        Wrong(
            "no accumulation",
            "train_batch // (micro * accumulation)",
            "train_batch // micro",
            "You left the accumulation out: a batch is micro-batch times accumulation "
            "times ranks.",
        ),
        Wrong(
            "of one rank",
            "product = micro * accumulation * ranks",
            "product = micro * accumulation",
            "You named the rows of one rank: the sentence compares those of all.",
        ),
        Wrong(
            "adapts",
            "[train_batch, product] if product != train_batch else []",
            "[]",
            "You let the batch adapt: nothing is changed silently, both numbers are "
            "named.",
        ),
    )

    def draw(self, rng):
        cases = []
        for ranks in rng.sample([3, 4, 5, 6, 8], 2):
            micro, accumulation = rng.randint(2, 9), rng.randint(2, 9)
            cases.append(
                {
                    "train_batch": micro * accumulation * ranks,
                    "micro": micro,
                    "accumulation": accumulation,
                    "ranks": ranks + rng.choice([-1, 1, 2]),
                }
            )
        return cases


class NormsLayerByLayer(Exercise):
    label = "ex-hf-2"
    on_ranks = True
    answer = "norms"
    points = 6
    starter = """
import torch

from minizero import utils


def norms(model: torch.nn.Module) -> dict[str, float]:
    # What the callback does in `on_pre_optimizer_step`: the norm of each parameter's
    # gradient, by its name. It is called on every rank.
    return {name: 0.0 for name, p in model.named_parameters()}
"""
    public = """
assert callable(norms)
"""
    reference = """
from minizero import utils


def norms(model):
    named = model.named_parameters()
    full = {name: utils.safe_get_full_grad(p) for name, p in named}
    return {name: 0.0 if g is None else g.norm().item() for name, g in full.items()}
"""
    wrong = (
        Wrong(
            "p.grad",
            "utils.safe_get_full_grad(p)",
            "p.grad",
            "You read `p.grad`: an engine keeps gradients in flat buffers, and it is "
            "None.",
        ),
        Wrong(
            "1-norm",
            "g.norm().item()",
            "g.norm(1).item()",
            "You summed magnitudes, the 1-norm; the 2-norm is asked for.",
        ),
        Wrong(
            "squares",
            "g.norm().item()",
            "g.square().sum().item()",
            "You gave the square of the norm.",
        ),
    )
    explain = "2 Psi (N-1)/N more elements for an update, beside ZeRO-3's 3."

    def draw(self, rng):
        return [
            {
                "ranks": rng.choice([2, 3]),
                "width": rng.choice([11, 13, 15, 17]),
                "plan": plan,
            }
            for plan in (0, 3)
        ]

    @staticmethod
    def run(answer, ranks, width, plan):
        def looked():
            model = Odd(width)
            adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
            net = (ZeRO3 if plan else DataParallel)(model, adamw)
            net.backward(net(rows(width, 0, 0)))
            with comm.algorithm("direct"), comm.ledger() as calls:
                found = answer(model)
            return {"norms": found, "elements sent": calls.sent()}

        return launch(looked, ranks, timeout=PATIENCE)[0]


class WhoSaves(Exercise):
    label = "ex-hf-3"
    on_ranks = True
    answer = "save"
    starter = """
def save(trainer, folder: str) -> None:
    # Called on every rank. The trainer has what a `Trainer` has for this:
    # `is_world_process_zero()`, `save_model(folder)`, `model.save_pretrained(folder)`.
    if trainer.is_world_process_zero():
        trainer.model.save_pretrained(folder)
"""
    public = """
assert callable(save)
"""
    reference = """
def save(trainer, folder):
    trainer.save_model(folder)
"""
    wrong = (
        Wrong(
            "no weights",
            "trainer.save_model(folder)",
            "if trainer.is_world_process_zero():\n"
            "        trainer.model.save_pretrained(folder)",
            "No rank has the weights under ZeRO-3, so the bare model refuses to write "
            "them.",
        ),
        Wrong(
            "gathered by one",
            "trainer.save_model(folder)",
            "if trainer.is_world_process_zero():\n        trainer.save_model(folder)",
            "`save_model` gathers, which every rank has to join; the `if` keeps all "
            "but one away. It decides by itself which rank writes.",
        ),
        Wrong(
            "a folder a rank",
            "trainer.save_model(folder)",
            "trainer.save_model(f'{folder}-rank')",
            "`save_model` decides which rank writes: give it the folder itself.",
        ),
    )
    explain = (
        "Why the script fails with the first line, and does not end with the second."
    )

    def draw(self, rng):
        odd = rng.sample([7, 9, 11, 13], 2)
        return [{"ranks": n, "width": w} for n, w in zip((2, 3), odd, strict=True)]

    @staticmethod
    def run(answer, ranks, width):
        class Model(Odd):
            def save_pretrained(self, folder, state_dict=None):
                """As transformers': of the bare model's own weights if not given."""
                weights = state_dict or self.state_dict()
                os.makedirs(folder, exist_ok=True)
                torch.save(dict(weights), os.path.join(folder, "model"))

        class Trainer:
            def __init__(self):
                self.model = Model(width)
                adamw = torch.optim.AdamW(self.model.parameters(), lr=0.01)
                self.net = ZeRO3(self.model, adamw)

            def is_world_process_zero(self):
                return rank() == 0

            def save_model(self, folder):
                weights = self.net.state_dict()
                if rank() == 0:
                    self.model.save_pretrained(folder, weights)

        folder = os.path.join(tempfile.mkdtemp(), "saved")

        def saved():
            answer(Trainer(), folder)

        launch(saved, ranks, timeout=15)
        weights = torch.load(os.path.join(folder, "model"), weights_only=True)
        bad = [k for k, w in weights.items() if w.isnan().any()]
        return {"NaN in": len(bad), "weights": digest(weights)}


SMALL = '''
from contextlib import nullcontext

import accelerate
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

import minizero


class SmallStep(AcceleratedOptimizer):
    """The optimizer that the Trainer holds."""

    def __init__(self, engine):
        super().__init__(engine.optimizer, device_placement=False)
        self.engine = engine

    def step(self, closure=None):
        self.engine.step()


class SmallAccelerator(accelerate.Accelerator):
    """An engine where DDP would be."""

    engine = None

    def prepare(self, *objects, **options):
        if not isinstance(objects[0], nn.Module):
            return super().prepare(*objects, **options)  # data
        model, optimizer = objects
        self.engine, *_ = minizero.initialize(
            model=model, optimizer=optimizer, config=self.config
        )
        return self.engine, SmallStep(self.engine)

    def backward(self, loss, **options):
        self.engine.backward(loss)

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        return self.engine.net.clip_grad_norm(max_norm)

    def unwrap_model(self, model, *args, **options):
        return model.module if model is self.engine else model


class SmallTrainer(transformers.Trainer):
    """Trains under the plan of a stage."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = SmallAccelerator
        batch = self.args.per_device_train_batch_size
        self.accelerator.config = {
            "train_micro_batch_size_per_gpu": batch,
            "gradient_clipping": 0.0,  # the Trainer asks for it
            "zero_optimization": {"stage": self.stage},
        }

'''


class LetTheSmallOneAccumulate(Exercise):
    label = "ex-hf-4"
    needs = ("minizero.hf", "transformers.models.llama.modeling_llama")
    on_ranks = True
    answer = "AccumulatingTrainer"
    points = 8
    starter = (
        SMALL
        + """
class AccumulatingTrainer(SmallTrainer):
    # It fails with gradient_accumulation_steps=2 at stage 2: mend it.
    pass
"""
    )
    public = """
assert issubclass(AccumulatingTrainer, SmallTrainer)
"""
    reference = (
        SMALL
        + """
class Accumulating(SmallAccelerator):
    def no_sync(self, model):
        return nullcontext()  # the plan says when to reduce

    def backward(self, loss, **options):
        self.engine.backward(loss, scale_wrt_gas=False)
        if not self.sync_gradients:
            self.engine.step()


class AccumulatingTrainer(SmallTrainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accumulating
        steps = self.args.gradient_accumulation_steps
        self.accelerator.config["gradient_accumulation_steps"] = steps
"""
    )
    wrong = (
        Wrong(
            "divided twice",
            "(loss, scale_wrt_gas=False)",
            "(loss)",
            "The loss is divided twice: the `Trainer` has divided it by the number of "
            "micro-batches, and the engine does it again.",
        ),
        Wrong(
            "updates each micro-batch",
            "        steps = self.args.gradient_accumulation_steps\n        self."
            'accelerator.config["gradient_accumulation_steps"] = steps\n',
            "",
            "The engine knows of no accumulation, so it updates after each "
            "micro-batch.",
        ),
        Wrong(
            "no step between",
            "        if not self.sync_gradients:\n            self.engine.step()\n",
            "",
            "The `Trainer` calls `optimizer.step` once an update, and the engine wants "
            "a `step` for each micro-batch.",
        ),
        Wrong(
            "no_sync left",
            "    def no_sync(self, model):\n"
            "        return nullcontext()  # the plan says when to reduce\n",
            "",
            "Accelerate still calls the model's `no_sync`, which ZeRO-2 refuses.",
        ),
    )

    def draw(self, rng):
        return [{"seed": rng.randint(0, 10**6), "micro": rng.choice([2, 3, 4])}]

    @staticmethod
    def run(answer, seed, micro):
        def trains():
            import transformers

            torch.manual_seed(seed)
            torch.set_num_threads(1)
            shape = transformers.LlamaConfig(
                vocab_size=64, hidden_size=16, intermediate_size=40,
                num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                bos_token_id=0, eos_token_id=1,
            )  # fmt: skip
            model = transformers.LlamaForCausalLM(shape)
            ids = torch.randint(64, (64, 12))
            data = [{"input_ids": row, "labels": row} for row in ids]
            args = transformers.TrainingArguments(
                output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4,
                learning_rate=4.0, max_steps=3, logging_steps=1, save_strategy="no",
                gradient_accumulation_steps=micro, use_cpu=True, report_to="none",
                disable_tqdm=True, optim="sgd", max_grad_norm=0.0,
            )  # fmt: skip
            answer.stage = 2
            trainer = answer(model, args, train_dataset=data)
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
            engine = trainer.accelerator.engine
            return {
                "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e],
                "updates": engine.global_steps,
                "micro-batches": engine.micro_steps,
                "weights": digest(engine.module_state_dict()),
            }

        return launch(trains, 2, timeout=PATIENCE)[0]


class SeventyBillion(Exercise):
    label = "ex-hf-5"
    answer = "frozen"
    points = 6
    book = {
        "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "rank": 16,
        "base": 70.6e9, "capacity": 80e9,
    }  # fmt: skip
    starter = """
def frozen(
    layers: int, hidden: int, heads: int, kv_heads: int, rank: int, base: float,
    capacity: float,
) -> tuple[float, float, int, int]:
    # GB of the base and of the adapters on the four attention matrices; on how many
    # GPUs plan 3 leaves half of each free between steps; what it sends for a
    # micro-batch, in units of psi (N-1)/N.
    return 0.0, 0.0, 0, 0
"""
    public = """
assert frozen(1, 64, 4, 4, 1, 1e9, 80e9)[0] == 2
"""
    reference = """
def frozen(layers, hidden, heads, kv_heads, rank, base, capacity):
    kv = hidden // heads * kv_heads
    adapters = layers * rank * (2 * (hidden + hidden) + 2 * (hidden + kv))
    n, held = 1, 2 * base + 16 * adapters
    while held / n > capacity / 2:
        n += 1
    return 2 * base / 1e9, 16 * adapters / 1e9, n, 2
"""
    wrong = (
        Wrong(
            "keys like queries",
            "hidden // heads * kv_heads",
            "hidden",
            "You gave keys and values as many heads as queries: several queries share "
            "one.",
        ),
        Wrong(
            "base reduced",
            "1e9, n, 2",
            "1e9, n, 3",
            "The frozen base has no gradients, so nothing of it is reduced: it is "
            "gathered for forward and for backward.",
        ),
        Wrong(
            "base trains",
            "n, held = 1, 2 * base",
            "n, held = 1, 16 * base",
            "You gave the base gradients and Adam's state: it is frozen, and has its "
            "two bytes alone.",
        ),
        Wrong(
            "adapters of two bytes",
            "16 * adapters / 1e9",
            "2 * adapters / 1e9",
            "You counted the adapters' weights only: they train, at 16 bytes each.",
        ),
        Wrong(
            "whole matrices",
            "rank * (2 * (hidden + hidden) + 2 * (hidden + kv))",
            "(2 * hidden * hidden + 2 * hidden * kv)",
            "You counted the matrices: a matrix of a x b gets r (a + b) parameters.",
        ),
    )

    def draw(self, rng):
        cases = []
        for shared in rng.sample([2, 4, 8, 16], 2):
            heads = shared * rng.randint(2, 8)
            cases.append(
                {
                    "layers": rng.randint(20, 90),
                    "hidden": 128 * heads,
                    "heads": heads,
                    "kv_heads": heads // shared,
                    "rank": rng.choice([4, 8, 32, 64]),
                    "base": rng.randint(300, 1800) * 1e8,
                    "capacity": rng.choice([24e9, 40e9, 48e9]),
                }
            )
        return cases
