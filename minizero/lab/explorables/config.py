"""An explorable: a ds_config, and the bytes that a rank keeps under it."""

from __future__ import annotations

import html
import json
from itertools import product
from typing import Any, get_args

import traitlets

from minizero.config import MICRO, STEPS, TOTAL, ConfigError, read
from minizero.config.read import known_keys
from minizero.config.schema import Place
from minizero.lab.explorables.base import Amount, Explorable, look, module, table
from minizero.lab.explorables.memory import STATES
from minizero.lab.plots.style import CATEGORY_COLOURS, amount
from minizero.memory.plan import OPTIMIZERS, PRECISIONS, Breakdown, Plan, estimate

EXAMPLE = """{
  "train_batch_size": 256,
  "gradient_accumulation_steps": 16,
  "fp16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "none"}
  }
}"""


class ConfigExplorer(Explorable):
    """What a rank keeps on its device, in host memory and in files.

    text: a config as JSON; keys that decide nothing here may be in it.
    n_params: parameters of the model, 1e8 to 1e12.
    world_size: ranks, 1 to 1,024.
    """

    kind = "config"
    _esm = module(kind)

    text = traitlets.Unicode(EXAMPLE).tag(sync=True)
    n_params = Amount(7e9, 1e8, 1e12).tag(sync=True)
    world_size = traitlets.Int(8, min=1, max=1024).tag(sync=True)
    plans = traitlets.Dict().tag(sync=True)
    costs = traitlets.Dict().tag(sync=True)
    known = traitlets.Dict().tag(sync=True)
    sizes = traitlets.List([TOTAL, MICRO, STEPS]).tag(sync=True)
    palette = traitlets.Dict(
        {name: look(CATEGORY_COLOURS[name]) for name in STATES}
    ).tag(sync=True)

    def __init__(self, config: dict[str, Any] | None = None, **controls: Any) -> None:
        if config is not None:
            controls["text"] = json.dumps(config, indent=2)
        super().__init__(**controls)

    @traitlets.default("plans")
    def _plans(self) -> dict[str, Any]:
        return plans()

    @traitlets.default("costs")
    def _costs(self) -> dict[str, Any]:
        return costs()

    @traitlets.default("known")
    def _known(self) -> dict[str, Any]:
        return known_keys()

    def breakdown(self) -> Breakdown:
        """The bytes that are shown; raises ConfigError for a config that is wrong.

        A config without an optimizer is taken to be given Adam.
        """
        config = read(self.text, self.world_size)
        kind, optimizer = config.dtypes.parameters, "adam"
        if config.optimizer is not None and config.optimizer.type == "SGD":
            moving = config.optimizer.params.get("momentum", 0)
            optimizer = "momentum" if moving else "sgd"
        precision = "fp32" if kind == "float32" else "bf16"
        plan = config.plan
        return estimate(self.n_params, self.world_size, plan, precision, optimizer)

    def numbers(self) -> list[list[Any]]:
        """Bytes of each category that a rank keeps in each place."""
        there = self.breakdown()
        places = {"device": there, "host": there.host, "disk": there.disk}
        return [
            [name, part.parameters, part.gradients, part.optimizer]
            for name, part in places.items()
        ]

    def fallback(self) -> str:
        try:
            there = self.breakdown()
        except ConfigError as error:
            return f"<p>{html.escape(str(error))}</p>"
        places = {"device": there, "host": there.host, "disk": there.disk}
        rows = {name: amount(part.total) for name, part in places.items()}
        return table(self._title(), ("place", "bytes a rank"), rows)

    def describe(self) -> str:
        try:
            there = self.breakdown()
        except ConfigError as error:
            return str(error)
        return (
            f"{self._title()}: a rank keeps {amount(there.total)} on its device, "
            f"{amount(there.host.total)} on the host, {amount(there.disk.total)} "
            "on disk."
        )

    def _title(self) -> str:
        return f"{self.n_params / 1e9:g}B parameters on {self.world_size} ranks"


def plans() -> dict[str, dict[str, Any]]:
    """What `read` makes of each choice, by "stage/optimizer's place/parameters'".

    By category: where it rests, and whether it is sharded. "idle": why an offload
    that was asked for does nothing, by its block.
    """
    table: dict[str, dict[str, Any]] = {}
    for stage, state, param in product(range(4), get_args(Place), get_args(Place)):
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
    """Bytes a parameter of each category, by "precision/optimizer".

    They are what `estimate` says of one parameter on one rank.
    """
    return {
        f"{precision}/{optimizer}": {
            category: getattr(estimate(1, 1, Plan(), precision, optimizer), category)
            for category in STATES
        }
        for precision, optimizer in product(PRECISIONS, OPTIMIZERS)
    }
