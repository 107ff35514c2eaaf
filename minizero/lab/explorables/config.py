"""An explorable: a ds_config, and the bytes that a rank keeps under it."""

from __future__ import annotations

import json
from typing import Any

import traitlets

from minizero.config import MICRO, STEPS, TOTAL, ConfigError, read
from minizero.config.read import known_keys
from minizero.lab.explorables.base import Computed, look, module
from minizero.lab.explorables.memory import STATES, Planned
from minizero.lab.plots.style import CATEGORY_COLOURS, amount
from minizero.memory.plan import Breakdown, estimate

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


class ConfigExplorer(Planned):
    """What a rank keeps on its device, in host memory and in files.

    text: a config as JSON; keys that decide nothing here may be in it.
    n_params: parameters of the model, 1e8 to 1e12.
    world_size: ranks, 1 to 1,024.
    """

    kind = "config"
    _esm = module(kind)

    text = traitlets.Unicode(EXAMPLE).tag(sync=True)
    world_size = traitlets.Int(8, min=1, max=1024).tag(sync=True)
    known = Computed(known_keys).tag(sync=True)
    sizes = traitlets.List([TOTAL, MICRO, STEPS]).tag(sync=True)
    palette = traitlets.Dict(
        {name: look(CATEGORY_COLOURS[name]) for name in STATES}
    ).tag(sync=True)

    def __init__(self, config: dict[str, Any] | None = None, **controls: Any) -> None:
        if config is not None:
            controls["text"] = json.dumps(config, indent=2)
        super().__init__(**controls)

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

    def describe(self) -> str:
        try:
            there = self.breakdown()
        except ConfigError as error:
            return str(error)
        return (
            f"{self.n_params / 1e9:g}B parameters on {self.world_size} ranks: a rank "
            f"keeps {amount(there.total)} on its device, {amount(there.host.total)} on "
            f"the host, {amount(there.disk.total)} on disk."
        )
