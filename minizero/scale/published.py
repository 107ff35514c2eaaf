"""Runs that others published, and how far the predictions of them are off.

`published.csv`: MPT models under PyTorch's FSDP, the 216 rows of the page
`scripts/train/benchmarking` of MosaicML's llm-foundry. FULL_SHARD is stage 3,
SHARD_GRAD_OP stage 2; gradients are reduced in fp32 where the page says DEFAULT, in bf16
where it says PURE. `OTHERS`: ZeRO-3 elsewhere, in seconds a step.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from typing import Any

from ..overlap import Overlap
from ..zero.interfaces import Schedule
from .machines import A100, H100, V100, Machine
from .predict import Prediction, ahead, predict
from .shapes import MODELS, Shape


@dataclass(frozen=True)
class Row:
    """One row of `published.csv`; `tokens` a second and GPU, as published."""

    model: str
    machine: str
    gpus: int
    stage: int
    sequence: int
    micro_batch: int
    accumulation: int
    precision: str
    reduce: str
    checkpointing: str
    tokens: float

    def predict(self, machine: Machine | None = None) -> Prediction:
        """The prediction of this row, on its machine or on another."""
        options: dict[str, Any] = dict(vars(self))
        for name in ("model", "machine", "gpus", "tokens"):
            del options[name]
        return predict(
            **vars(MODELS[self.model]),
            **options,
            world_size=self.gpus,
            machine=machine or self.machine,
        )

    def error(self, machine: Machine | None = None) -> float:
        """Predicted over published tokens a second, less 1."""
        return self.predict(machine).tokens_per_second_per_gpu / self.tokens - 1


def rows() -> list[Row]:
    """All rows of `published.csv`."""
    with Path(__file__).with_name("published.csv").open(encoding="utf-8") as file:
        return [
            Row(**{k: _number(v) for k, v in line.items()})
            for line in csv.DictReader(file)
        ]


def _number(text: str) -> Any:
    return int(text) if text.isdigit() else text


def mean_error(errors: Iterable[float]) -> float:
    """The mean of their sizes."""
    sizes = [abs(e) for e in errors]
    return sum(sizes) / len(sizes)


def calibrate(machine: Machine, chosen: Sequence[Row], finest: float = 0.01) -> Machine:
    """The machine whose two constants fit these rows: its mean error is least.

    Steps of 8 % and of halves of it, down to `finest`, as long as they help.
    """

    def loss(machine: Machine) -> float:
        return mean_error(log(1 + row.error(machine)) for row in chosen)

    best, step = loss(machine), 0.08
    while step >= finest:
        helped = False
        for name in ("matmul", "attention"):
            for factor in (1 + step, 1 / (1 + step)):
                value = getattr(machine, name) * factor
                other = replace(machine, **{name: value})
                if (now := loss(other)) < best:
                    machine, best, helped = other, now, True
        step = step if helped else step / 2
    return machine


def deepspeed(largest: int) -> Schedule:
    """DeepSpeed's defaults: units above 5e7 elements are not gathered ahead."""
    return Overlap(50_000_000, 1 << 60, 0)


@dataclass(frozen=True)
class Other:
    """A published step of ZeRO-3, full checkpointing unless `options` say otherwise.

    seconds: of a step; where FLOP a second were published, 8 operations a parameter and
    token over them. DeepSpeed in fp16 with eager attention, unless `options` say else.
    """

    name: str
    source: str
    shape: Shape
    machine: Machine
    gpus: int
    sequence: int
    micro_batch: int
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)

    def predict(self) -> Prediction:
        """The prediction of this row."""
        options: dict[str, Any] = {
            "checkpointing": "full",
            "precision": "fp16",
            "attention": "eager",
            "schedule": deepspeed,
        }
        return predict(
            **vars(self.shape),
            machine=self.machine,
            world_size=self.gpus,
            sequence=self.sequence,
            micro_batch=self.micro_batch,
            stage=3,
            **(options | self.options),
        )


def own_port(machine: Machine) -> Machine:
    """As if each GPU fetched all that it gathers through its own port."""
    return replace(machine, network=machine.network / machine.gpus)


def _gpt(layers: int, hidden: int, heads: int) -> Shape:
    return Shape(layers, hidden, heads, 51_200)


def _rate(billions: float, tokens: int, teraflops: float) -> float:
    return 8e-3 * billions * tokens / teraflops


_175B, _530B = MODELS["gpt-175b"], _gpt(105, 20_480, 128)
_52B, _18B, _138B = _gpt(64, 8192, 64), _gpt(40, 6144, 48), _gpt(76, 12_288, 96)
_PORT = own_port(A100)
# four V100 a node, four ports of 100 Gbit/s; sixteen, with four such ports
_JEAN_ZAY = own_port(replace(V100, gpus=4, link=75e9, network=12.5e9))
_DGX2 = replace(V100, network=50e9 / 16)
_QUARTER = replace(_DGX2, network=4 * _DGX2.network)
# Grand Teton with HBM2e, at 500 W
_H100_96 = replace(H100, hbm=2400e9, memory=96e9)
_NODE_4 = {"gpus_per_node": 4}
_NODE_16 = {"gpus_per_node": 16}
_CPU = {"offload_optimizer": "cpu"}
_TITAN = {
    "checkpointing": "selective",
    "precision": "bf16",
    "attention": "flash",
    "reduce": "fp32",
    "schedule": ahead,
}
_N, _B, _Z = "narayanan2021", "bigscience2021gpt2", "wang2023zeropp"
OTHERS = [
    Other("175B, 384 A100", _N, _175B, _PORT, 384, 2048, 4, _rate(174.6, 8192, 144)),
    Other("175B, 768 A100", _N, _175B, _PORT, 768, 2048, 2, _rate(174.6, 4096, 88)),
    Other("175B, 1536 A100", _N, _175B, _PORT, 1536, 2048, 1, _rate(174.6, 2048, 44)),
    Other("530B, 640 A100", _N, _530B, _PORT, 640, 2048, 4, _rate(529.6, 8192, 138)),
    Other("530B, 1120 A100", _N, _530B, _PORT, 1120, 2048, 2, _rate(529.6, 4096, 98)),
    Other("530B, 2240 A100", _N, _530B, _PORT, 2240, 2048, 1, _rate(529.6, 2048, 48)),
    Other(
        "175B, 256 A100", "microsoft2022azure", _175B, A100, 256, 512, 32,
        _rate(175, 16_384, 204),
    ),
    Other("52B, 64 V100, batch 8", _B, _52B, _JEAN_ZAY, 64, 1024, 8, 117, _NODE_4),
    Other(
        "52B, batch 12, Adam on the CPU", _B, _52B, _JEAN_ZAY, 64, 1024, 12, 175,
        _NODE_4 | _CPU,
    ),
    Other(
        "52B, batch 12, all on the CPU", _B, _52B, _JEAN_ZAY, 64, 1024, 12, 177,
        _NODE_4 | _CPU | {"offload_param": "cpu"},
    ),
    Other("18B, 384 V100", _Z, _18B, _DGX2, 384, 1024, 1, _rate(18, 1024, 25), _NODE_16),
    Other("18B, ZeRO++", _Z, _18B, _QUARTER, 384, 1024, 1, _rate(18, 1024, 35), _NODE_16),
    Other("138B, 384 V100", _Z, _138B, _DGX2, 384, 2048, 1, _rate(138, 2048, 36), _NODE_16),
    Other("138B, ZeRO++", _Z, _138B, _QUARTER, 384, 2048, 1, _rate(138, 2048, 50), _NODE_16),
    Other(
        "Llama 8B, 8 H100", "torchtitan2024", MODELS["llama-8b"], _H100_96, 8, 8192, 2,
        16_384 / 5762, _TITAN,
    ),
    Other(
        "Llama 8B, 128 H100", "torchtitan2024", MODELS["llama-8b"], _H100_96, 128, 8192,
        2, 16_384 / 5605, _TITAN,
    ),
    Other(
        "Llama 8B, 8 H100, compiled, fp8", "torchtitan2024", MODELS["llama-8b"],
        _H100_96, 8, 8192, 2, 16_384 / 8532, _TITAN | {"precision": "fp8"},
    ),
    Other(
        "Llama 70B, 32 H100", "deepcompile2025", MODELS["llama-70b"], H100, 32, 1024, 1,
        _rate(70.6, 1024, 243), {"attention": "flash", "precision": "bf16"},
    ),
]  # fmt: skip
"""ZeRO-3 elsewhere. Those of 2021 are predicted with each GPU's own port; ZeRO++ sends a
quarter of the bytes; shapes of 18B and 138B are not published, and assumed."""
