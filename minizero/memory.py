"""Where every byte of a training job lives: plans and estimates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

PLACES = ("device", "cpu", "nvme")


@dataclass(frozen=True)
class Placement:
    """Where one category of state rests between steps.

    `sharded`: each rank keeps 1/N of it (else every rank keeps all of it).
    `on`: "device", "cpu" (host memory) or "nvme" (files).
    """

    sharded: bool = False
    on: str = "device"

    def __post_init__(self) -> None:
        if self.on not in PLACES:
            raise ValueError(
                f"a placement is on one of {', '.join(PLACES)}, not on {self.on!r}"
            )
        if self.on != "device" and not self.sharded:
            raise ValueError(
                f"state on {self.on!r} must be sharded: replicated state would be "
                "written there once a rank; choose a stage that shards it"
            )


@dataclass(frozen=True)
class Plan:
    """One placement for each category of model state."""

    parameters: Placement = Placement()
    gradients: Placement = Placement()
    optimizer: Placement = Placement()

    @classmethod
    def stage(
        cls,
        stage: int,
        offload_optimizer: str | None = None,
        offload_param: str | None = None,
    ) -> Plan:
        """The plan that a ZeRO stage stands for (Rajbhandari et al. 2020, fig. 1).

        Gradients follow the optimizer state to the host, where they are used
        (Ren et al. 2021, sec. 4.1); they never go to disk.
        """
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, not {stage!r}")
        off = offload_optimizer or "device"
        with_optimizer = "cpu" if off != "device" and stage >= 2 else "device"
        return cls(
            parameters=Placement(stage >= 3, offload_param or "device"),
            gradients=Placement(stage >= 2, with_optimizer),
            optimizer=Placement(stage >= 1, off),
        )


# bytes per parameter: the parameter, its gradient, its fp32 master copy
PRECISIONS = {"fp32": (4, 4, 0), "bf16": (2, 2, 4), "fp16": (2, 2, 4)}
# bytes per parameter of optimizer state, always fp32
OPTIMIZERS = {"adam": 8, "momentum": 4, "sgd": 0}


@dataclass
class Bytes:
    """Bytes per rank of each category of model state."""

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


@dataclass
class Breakdown(Bytes):
    """Bytes per rank on the device, and off it in `host` and `disk`."""

    host: Bytes = field(default_factory=Bytes)
    disk: Bytes = field(default_factory=Bytes)


def _one_of(what: str, value: str, table: Iterable[str]) -> None:
    if value not in table:
        raise ValueError(f"{what} must be one of {', '.join(table)}, not {value!r}")


def estimate(
    n_params: float,
    world_size: int,
    stage: int | Plan,
    precision: str = "bf16",
    optimizer: str = "adam",
    offload_optimizer: str | None = None,
    offload_param: str | None = None,
) -> Breakdown:
    """Bytes of model state per rank; activations and buffers are not in it.

    Mixed-precision Adam costs 2 + 2 + 12 = 16 bytes a parameter; a sharded
    category costs 1/N of its share (Rajbhandari et al. 2020, sec. 3.1 and 5).
    """
    _one_of("precision", precision, PRECISIONS)
    _one_of("optimizer", optimizer, OPTIMIZERS)
    if not n_params > 0:
        raise ValueError(f"n_params must be above 0, not {n_params!r}")
    if isinstance(world_size, bool) or world_size < 1 or world_size % 1:
        raise ValueError(f"world_size must be a whole number >= 1, not {world_size!r}")
    plan = (
        stage
        if isinstance(stage, Plan)
        else Plan.stage(stage, offload_optimizer, offload_param)
    )
    parameter, gradient, master = PRECISIONS[precision]
    cost = Bytes(parameter, gradient, master + OPTIMIZERS[optimizer])
    result = Breakdown()
    where = {"device": result, "cpu": result.host, "nvme": result.disk}
    for category in ("parameters", "gradients", "optimizer"):
        placement: Placement = getattr(plan, category)
        share = n_params / world_size if placement.sharded else n_params
        setattr(where[placement.on], category, share * getattr(cost, category))
    return result


def estimate_activations(
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    micro_batch: int,
    checkpointing: str = "none",
) -> int:
    """Bytes that `layers` transformer layers save for backward, in 16 bit.

    Korthikanti et al. 2022, eq. 2 and table 2, without tensor parallelism:
    s·b·h·(34 + 5·a·s/h) a layer; "selective" recomputes the attention scores and
    saves 34·s·b·h; "full" saves each layer's input, 2·s·b·h. The 34 counts bytes.
    """
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "sequence": sequence,
        "micro_batch": micro_batch,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value!r}")
    sbh = sequence * micro_batch * hidden
    scores = 5 * heads * sequence * sequence * micro_batch
    per_layer = {"none": 34 * sbh + scores, "selective": 34 * sbh, "full": 2 * sbh}
    _one_of("checkpointing", checkpointing, per_layer)
    return layers * per_layer[checkpointing]
