"""An explorable: how much of a GPU the model states take, under each stage."""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path
from typing import Any

import traitlets

from minizero.lab.explorables.base import (
    STRIPES,
    Amount,
    Explorable,
    look,
    module,
    table,
)
from minizero.lab.plots.style import CATEGORY_COLOURS, CATEGORY_HATCHES, amount
from minizero.memory.plan import OPTIMIZERS, Breakdown, estimate

STATES = ("parameters", "gradients", "optimizer")
STAGES = ("Data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
PRECISIONS = ("bf16", "fp32")
DEVICE_MEMORIES = (24, 40, 80, 141)
"""Gigabytes of a GPU that can be chosen."""

PALETTE = {
    name: look(CATEGORY_COLOURS[name], STRIPES if CATEGORY_HATCHES[name] else None)
    for name in STATES
}
"""How each category of model state looks."""


class MemoryExplorer(Explorable):
    """How much of a GPU the model states take, for the four stages side by side.

    n_params: parameters of the model, 1e8 to 1e12.
    world_size: GPUs, a power of two from 1 to 1,024.
    stage: 0 to 3, the one that is described in words.
    precision: "bf16" or "fp32"; optimizer: "adam", "momentum" or "sgd".
    offload_optimizer, offload_param: keep these states in host memory, in the stages
        that shard them.
    device_memory: gigabytes (10^9 bytes) of a GPU, one of :data:`DEVICE_MEMORIES`.

    Where ranks were measured with a setting, their bytes stand beside the estimate.
    """

    kind = "memory"
    _esm = module(kind)

    n_params = Amount(7e9, 1e8, 1e12).tag(sync=True)
    world_size = traitlets.Enum([2**i for i in range(11)], 8).tag(sync=True)
    stage = traitlets.Enum([0, 1, 2, 3], 3).tag(sync=True)
    precision = traitlets.Enum(PRECISIONS, "bf16").tag(sync=True)
    optimizer = traitlets.Enum(list(OPTIMIZERS), "adam").tag(sync=True)
    offload_optimizer = traitlets.Bool(False).tag(sync=True)
    offload_param = traitlets.Bool(False).tag(sync=True)
    device_memory = traitlets.Enum(DEVICE_MEMORIES, 80).tag(sync=True)
    device_memories = traitlets.List(list(DEVICE_MEMORIES)).tag(sync=True)
    coefficients = traitlets.Dict().tag(sync=True)
    measured: traitlets.List[Any] = traitlets.List().tag(sync=True)
    palette = traitlets.Dict(PALETTE).tag(sync=True)

    @traitlets.default("measured")
    def _measured(self) -> list[dict[str, Any]]:
        return measured()

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

    def numbers(self) -> list[list[Any]]:
        """Bytes of each category a GPU, and on its host, for each stage."""
        there = [self.breakdown(stage) for stage in range(4)]
        return [
            [name, b.parameters, b.gradients, b.optimizer, b.host.total]
            for name, b in zip(STAGES, there, strict=True)
        ]

    def fallback(self) -> str:
        rows = {str(stage): total for stage, total in enumerate(self._totals())}
        return table(self._title(), ("ZeRO stage", "bytes per GPU"), rows)

    def describe(self) -> str:
        totals = ", ".join(self._totals())
        return f"{self._title()}: stages 0 to 3 take {totals} each."

    def _title(self) -> str:
        return (
            f"Model states of {self.n_params / 1e9:g}B parameters, "
            f"{self.precision}, {self.optimizer}, on {self.world_size} GPUs"
        )

    def _totals(self) -> list[str]:
        return [amount(self.breakdown(stage).total) for stage in range(4)]


def explorer(**controls: Any) -> MemoryExplorer:
    """The memory explorer, with any of its controls set."""
    return MemoryExplorer(**controls)


def measured() -> list[dict[str, Any]]:
    """The recorded runs by their number of ranks: parameters, and bytes by stage.

    `measured.csv` has what tests/bench/held.py found in a run of GPT-2's smallest.
    """
    by_ranks: dict[int, dict[str, Any]] = {}
    with Path(__file__).with_name("measured.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            ranks, size = int(line["world_size"]), int(line["n_params"])
            run = {"world_size": ranks, "n_params": size, "held": []}
            held = by_ranks.setdefault(ranks, run)["held"]
            held.append(sum(int(line[name]) for name in STATES))
    return list(by_ranks.values())


def coefficients() -> dict[str, dict[str, tuple[float, float]]]:
    """What `estimate` says, as two numbers a category, so that a page can multiply.

    A key is "stage/precision/optimizer/oo", the last two 1 where the optimizer state
    and the parameters are offloaded. Its bytes on N GPUs are
    ``n_params * (whole + split / N)``, on the device for the categories and off it
    for "host". What a stage refuses to offload has no key.
    """
    table = {}
    choices = product(range(4), PRECISIONS, OPTIMIZERS, (0, 1), (0, 1))
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
