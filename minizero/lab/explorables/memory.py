"""An explorable: how much of a GPU a model takes in training, under each stage."""

from __future__ import annotations

from itertools import product
from typing import Any

import traitlets

from minizero.lab.explorables.base import Amount, Explorable, look, module, table
from minizero.lab.plots.style import CATEGORY_COLOURS, amount
from minizero.memory.plan import (
    OPTIMIZERS,
    PRECISIONS,
    Breakdown,
    estimate,
    estimate_activations,
)

STATES = ("parameters", "gradients", "optimizer")
RECOMPUTED = ("none", "selective", "full")
STAGES = ("Data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
DEVICE_MEMORIES = (24, 40, 80, 141)
"""Gigabytes of a GPU that can be chosen."""

PAPER = {
    "setting": {
        "n_params": 7.5e9, "world_size": 64, "precision": "bf16", "optimizer": "adam",
        "offload_optimizer": False, "offload_param": False,
    },
    "bytes": [120e9, 31.4e9, 16.6e9, 1.9e9],
}  # fmt: skip
"""The states of a GPU in Figure 1 of Rajbhandari et al. (2020), by stage."""


def gpt_shape(n_params: float) -> tuple[int, int, int]:
    """Layers, hidden size and heads of a GPT of about that size.

    As GPT-3's 175B: 128 hidden elements a layer and a head, 12 h² parameters a layer.
    """
    layers = max(1, round((n_params / (12 * 128**2)) ** (1 / 3)))
    return layers, 128 * layers, layers


class MemoryExplorer(Explorable):
    """How much of a GPU the five categories take, the four stages side by side.

    n_params: parameters of the model, 1e8 to 1e12.
    world_size: GPUs, a power of two from 1 to 1,024.
    stage: 0 to 3, the one that is described in words.
    precision: "bf16" or "fp32"; optimizer: "adam", "momentum" or "sgd".
    offload_optimizer, offload_param: keep these states in host memory, in the stages
        that shard them.
    device_memory: gigabytes (10^9 bytes) of a GPU, one of :data:`DEVICE_MEMORIES`.
    sequence: tokens of a sequence, 128 to 131,072. micro_batch: sequences, 1 to 256.
    recomputation: "none", "selective" or "full", as in chapter 9.
    """

    kind = "memory"
    _esm = module(kind)

    n_params = Amount(7e9, 1e8, 1e12).tag(sync=True)
    world_size = traitlets.Enum([2**i for i in range(11)], 8).tag(sync=True)
    stage = traitlets.Enum([0, 1, 2, 3], 3).tag(sync=True)
    precision = traitlets.Enum(("bf16", "fp32"), "bf16").tag(sync=True)
    optimizer = traitlets.Enum(list(OPTIMIZERS), "adam").tag(sync=True)
    offload_optimizer = traitlets.Bool(False).tag(sync=True)
    offload_param = traitlets.Bool(False).tag(sync=True)
    device_memory = traitlets.Enum(DEVICE_MEMORIES, 80).tag(sync=True)
    sequence = traitlets.Enum([2**i for i in range(7, 18)], 2048).tag(sync=True)
    micro_batch = traitlets.Enum([2**i for i in range(9)], 1).tag(sync=True)
    recomputation = traitlets.Enum(RECOMPUTED, "full").tag(sync=True)
    device_memories = traitlets.List(list(DEVICE_MEMORIES)).tag(sync=True)
    coefficients = traitlets.Dict().tag(sync=True)
    published = traitlets.Dict(PAPER).tag(sync=True)
    palette = traitlets.Dict(
        {name: look(colour) for name, colour in CATEGORY_COLOURS.items()}
    ).tag(sync=True)

    @traitlets.default("coefficients")
    def _coefficients(self) -> dict[str, Any]:
        return coefficients()

    def breakdown(self, stage: int | None = None) -> Breakdown:
        """The estimate that the explorer shows for a stage, else for the chosen one.

        State that the stage does not shard stays on the device, offloaded or not.
        """
        stage = self.stage if stage is None else stage
        return estimate(
            self.n_params,
            self.world_size,
            stage,
            self.precision,
            self.optimizer,
            offload_optimizer="cpu" if self.offload_optimizer and stage >= 1 else None,
            offload_param="cpu" if self.offload_param and stage >= 3 else None,
        )

    def activations(self) -> float:
        """Bytes at the peak: what all layers keep, and one layer that is recomputed.

        By the formula of chapter 9 for fused attention, which is for 16 bit; twice as
        many in fp32.
        """
        layers, hidden, heads = gpt_shape(self.n_params)
        sizes = hidden, heads, self.sequence, self.micro_batch
        mode = self.recomputation
        kept = estimate_activations(layers, *sizes, mode)
        one = estimate_activations(1, *sizes) - estimate_activations(1, *sizes, mode)
        return (kept + one) * (1 if self.precision == "bf16" else 2)

    def buffers(self, stage: int) -> float:
        """Bytes of what is put together at once, as chapter 16 counts them.

        Two blocks' parameters at stage 3; from stage 2 on a block's gradients, before
        and while they are reduced.
        """
        block = self.n_params / gpt_shape(self.n_params)[0]
        return block * 2 * PRECISIONS[self.precision][0] * max(0, stage - 1)

    def config(self) -> dict[str, Any]:
        """The chosen plan as DeepSpeed's config; what a stage cannot offload stays."""
        adam, moving = self.optimizer == "adam", self.optimizer == "momentum"
        zero: dict[str, Any] = {"stage": self.stage}
        for block, least in (("optimizer", 1), ("param", 3)):
            if getattr(self, f"offload_{block}") and self.stage >= least:
                zero[f"offload_{block}"] = {"device": "cpu"}
        rate = {"lr": 3e-4} | ({"momentum": 0.9} if moving else {})
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "bf16": {"enabled": self.precision == "bf16"},
            "optimizer": {"type": "AdamW" if adam else "SGD", "params": rate},
            "zero_optimization": zero,
        }

    def numbers(self) -> list[list[Any]]:
        """Bytes of each category a GPU, and on its host, for each stage."""
        rows, own = [], self.activations()
        for stage, name in enumerate(STAGES):
            b, more = self.breakdown(stage), self.buffers(stage)
            states = b.parameters, b.gradients, b.optimizer
            rows.append([name, *states, own, more, b.host.total])
        return rows

    def fallback(self) -> str:
        rows = {str(stage): total for stage, total in enumerate(self._totals())}
        return table(self._title(), ("ZeRO stage", "bytes per GPU"), rows)

    def describe(self) -> str:
        totals = ", ".join(self._totals())
        return f"{self._title()}: stages 0 to 3 take {totals} each."

    def _title(self) -> str:
        return (
            f"Training {self.n_params / 1e9:g}B parameters, {self.precision}, "
            f"{self.optimizer}, on {self.world_size} GPUs, with "
            f"{amount(self.activations())} of activations"
        )

    def _totals(self) -> list[str]:
        return [amount(sum(row[1:-1])) for row in self.numbers()]


def explorer(**controls: Any) -> MemoryExplorer:
    """The memory explorer, with any of its controls set."""
    return MemoryExplorer(**controls)


def coefficients() -> dict[str, dict[str, tuple[float, float]]]:
    """What `estimate` says, as two numbers a category, so that a page can multiply.

    A key is "stage/precision/optimizer/oo", the last two 1 where the optimizer state
    and the parameters are offloaded. Its bytes on N GPUs are
    ``n_params * (whole + split / N)``, on the device for the categories and off it
    for "host". What a stage refuses to offload has no key.
    """
    table = {}
    choices = product(range(4), ("bf16", "fp32"), OPTIMIZERS, (0, 1), (0, 1))
    for stage, precision, optimizer, state, param in choices:
        offload = {"offload_optimizer": state, "offload_param": param}
        options: dict[str, Any] = {
            name: "cpu" for name, chosen in offload.items() if chosen
        }
        try:
            one, two = (
                # A power of two as n_params, so that every division is exact.
                estimate(2**30, gpus, stage, precision, optimizer, **options)
                for gpus in (1, 2)
            )
        except ValueError:
            continue
        table[f"{stage}/{precision}/{optimizer}/{state}{param}"] = {
            name: ((2 * b - a) / 2**30, 2 * (a - b) / 2**30)
            for name, a, b in (
                *((s, getattr(one, s), getattr(two, s)) for s in STATES),
                ("host", one.host.total, two.host.total),
            )
        }
    return table
