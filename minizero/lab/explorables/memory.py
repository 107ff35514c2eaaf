"""An explorable: how much of a GPU a model takes in training, under each stage."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import traitlets

from minizero.config import read
from minizero.config.schema import Device
from minizero.lab.explorables.base import Amount, Computed, Explorable, look, module
from minizero.lab.plots.style import CATEGORY_COLOURS, amount
from minizero.memory.plan import (
    OPTIMIZERS,
    PRECISIONS,
    Breakdown,
    Plan,
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


def plans() -> dict[str, dict[str, Any]]:
    """What `read` makes of each choice, by "stage/optimizer's place/parameters'".

    By category: where it rests, and whether it is sharded. "idle": why an offload
    that was asked for does nothing, by its block.
    """
    table: dict[str, dict[str, Any]] = {}
    for stage, state, param in product(range(4), get_args(Device), get_args(Device)):
        chosen = {"offload_optimizer": state, "offload_param": param}
        blocks = {
            name: {"device": on, "nvme_path": "files" if on == "nvme" else None}
            for name, on in chosen.items()
        }
        config = read(
            {"train_batch_size": 1, "zero_optimization": {"stage": stage, **blocks}}
        )
        places: dict[str, Any] = {
            category: [place.on, place.sharded]
            for category, place in vars(config.plan).items()
        }
        places["idle"] = {
            name: said.partition(": ")[2]
            for name in chosen
            for said in config.warnings
            if f".{name} " in said
        }
        table[f"{stage}/{state}/{param}"] = places
    return table


def costs() -> dict[str, dict[str, float]]:
    """Bytes per parameter of each category, by "precision/optimizer".

    They are what `estimate` says of one parameter on one rank.
    """
    return {
        f"{precision}/{optimizer}": {
            category: getattr(estimate(1, 1, Plan(), precision, optimizer), category)
            for category in STATES
        }
        for precision, optimizer in product(PRECISIONS, OPTIMIZERS)
    }


class Planned(Explorable):
    """An explorable of what a plan keeps, and what its page computes it from."""

    n_params = Amount(7e9, 1e8, 1e12).tag(sync=True)
    plans = Computed(plans).tag(sync=True)
    costs = Computed(costs).tag(sync=True)


class MemoryExplorer(Planned):
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
    published = traitlets.Dict(PAPER).tag(sync=True)
    palette = traitlets.Dict(
        {name: look(colour) for name, colour in CATEGORY_COLOURS.items()}
    ).tag(sync=True)

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

    def numbers(self) -> list[list[Any]]:
        """Bytes of each category a GPU, and on its host, for each stage."""
        rows, own = [], self.activations()
        for stage, name in enumerate(STAGES):
            b, more = self.breakdown(stage), self.buffers(stage)
            states = b.parameters, b.gradients, b.optimizer
            rows.append([name, *states, own, more, b.host.total])
        return rows

    def describe(self) -> str:
        totals = ", ".join(amount(sum(row[1:-1])) for row in self.numbers())
        return (
            f"Training {self.n_params / 1e9:g}B parameters, {self.precision}, "
            f"{self.optimizer}, on {self.world_size} GPU{'s' * (self.world_size > 1)}, "
            f"with {amount(self.activations())} of activations: stages 0 to 3 take "
            f"{totals} each."
        )


explorer = MemoryExplorer
