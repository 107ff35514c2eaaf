"""ZeRO-3 in the runs of others: rows of papers, blogs and repositories, none fitted.

`DEEPSPEED`: in fp16, with full checkpointing and attention that writes its scores, as it
was up to 2023. `FSDP`: PyTorch's, in bf16 with flash attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..overlap import Overlap
from ..zero.interfaces import Schedule
from .machines import A100, H100, NETWORK, V100, Machine
from .predict import Prediction, predict
from .shapes import MODELS, Shape


def deepspeed(largest: int) -> Schedule:
    """DeepSpeed's defaults: units above 5e7 elements are not gathered ahead."""
    return Overlap(50_000_000, 1 << 60, 0)


@dataclass(frozen=True)
class Other:
    """A published run: `seconds` of a step, or `flops` a second and GPU, or `tokens`.

    FLOP a second are published with those of recomputation and of whole scores, as
    Narayanan et al. 2021 count them (eq. 3). memory: bytes at the peak, where they were
    published.
    """

    name: str
    source: str
    shape: Shape
    machine: Machine
    gpus: int
    sequence: int
    micro_batch: int
    seconds: float = 0.0
    flops: float = 0.0
    tokens: float = 0.0
    memory: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def published(self) -> float:
        """Tokens a second and GPU."""
        if self.seconds:
            return self.micro_batch * self.sequence / self.seconds
        if self.tokens:
            return self.tokens
        shape, h = self.shape, self.shape.hidden
        block = 8 * shape.block + 16 * self.sequence * h
        return self.flops / (shape.layers * block + 6 * h * shape.vocab)

    def predict(self) -> Prediction:
        """The prediction of this row."""
        return predict(
            **vars(self.shape),
            machine=self.machine,
            world_size=self.gpus,
            gpus_per_node=self.machine.gpus,
            sequence=self.sequence,
            micro_batch=self.micro_batch,
            stage=3,
            **self.options,
        )

    def error(self) -> float:
        """Predicted over published tokens a second, less 1."""
        return self.predict().tokens_per_second_per_gpu / self.published - 1


_EAGER = {"checkpointing": "full", "precision": "fp16", "attention": "eager"}
_DEEPSPEED = _EAGER | {"schedule": deepspeed}
_PLUS = _DEEPSPEED | {"secondary": 16, "weight_bits": 8, "gradient_bits": 4}
_ADAM = _DEEPSPEED | {"offload_optimizer": "cpu"}
_BOTH = _ADAM | {"offload_param": "cpu"}
_HALF = {"checkpointing": "full", "precision": "bf16", "schedule": deepspeed}


def _gpt(layers: int, hidden: int, heads: int) -> Shape:
    return Shape(layers, hidden, heads, 51_200)


_10B, _18B, _52B = _gpt(50, 4096, 32), _gpt(40, 6144, 48), _gpt(64, 8192, 32)
_138B, _530B = _gpt(76, 12_288, 96), _gpt(105, 20_480, 128)
# as if each GPU fetched all that it gathers through its own port
_PORT = replace(A100, network=A100.network / A100.gpus)
# four to a node; an all-reduce of 64 of them was measured at 54.2 Gbit/s a node, where
# the ports are of 400 in all (BigScience, experiments/bandwidth)
_JEAN_ZAY = replace(V100, gpus=4, link=75e9, network=54.2e9 / 8 / 4 / NETWORK, shared=2)
_DGX2 = replace(V100, network=50e9 / 16)  # with four ports of 100 Gbit/s


def _narayanan(shape: Shape, name: str, gpus: int, batch: int, rate: float) -> Other:
    return Other(
        f"{name}, {gpus} A100", "narayanan2021", shape, _PORT, gpus, 2048, batch,
        flops=rate * 1e12, options=_DEEPSPEED,
    )  # fmt: skip


def _zhay(batch: int, seconds: float, what: str, options: dict[str, Any]) -> Other:
    return Other(
        f"52B, 64 V100, batch {batch}{what}", "bigscience2021gpt2", _52B, _JEAN_ZAY, 64,
        1024, batch, seconds, options=options,
    )  # fmt: skip


def _plus(name: str, shape: Shape, tokens: int, before: int, after: int) -> list[Other]:
    def other(rate: int, what: str, options: dict[str, Any]) -> Other:
        return Other(
            f"{name}, 384 V100{what}", "wang2023zeropp", shape, _DGX2, 384, tokens, 1,
            flops=rate * 1e12, options=options,
        )  # fmt: skip

    return [other(before, "", _DEEPSPEED), other(after, ", ZeRO++", _PLUS)]


DEEPSPEED = [
    *(
        _narayanan(MODELS["gpt-175b"], "175B", *run)
        for run in ((384, 4, 144), (768, 2, 88), (1536, 1, 44))
    ),
    *(
        _narayanan(_530B, "530B", *run)
        for run in ((640, 4, 138), (1120, 2, 98), (2240, 1, 48))
    ),
    Other(
        "175B, 256 A100, Azure", "microsoft2022azure", MODELS["gpt-175b"], A100, 256,
        512, 32, flops=204e12, options=_DEEPSPEED,
    ),
    Other(
        "10B, one V100, Adam on the CPU", "ren2021offload", _10B, V100, 1, 1024, 8,
        flops=40e12, options=_ADAM | {"accumulation": 64},
    ),
    _zhay(6, 111, "", _DEEPSPEED),
    _zhay(8, 117, "", _DEEPSPEED),
    _zhay(10, 150, "", _DEEPSPEED),
    _zhay(12, 175, ", Adam on the CPU", _ADAM),
    _zhay(12, 177, ", all on the CPU", _BOTH),
    *_plus("18B", _18B, 1024, 25, 35),
    *_plus("138B", _138B, 2048, 36, 50),
    Other(
        "Llama 70B, 32 H100", "deepcompile2025", MODELS["llama-70b"], H100, 32, 1024, 1,
        flops=243e12, options=_HALF,
    ),
]  # fmt: skip
"""Those of 2021 are predicted with each GPU's own port; shapes of 18B and 138B are not
published, and assumed."""

_8B, _70B = MODELS["llama-8b"], MODELS["llama-70b"]
_LLAMA2 = {
    "7B": MODELS["llama-7b"],
    "13B": MODELS["llama-13b"],
    "34B": Shape(48, 8192, 64, 32_000, 8, 22_016, True),
    "70B": replace(_70B, vocab=32_000),
}
# Grand Teton with HBM2e, at 500 W
_H100_96 = replace(H100, hbm=2400e9, memory=96e9)


def _titan(
    shape: Shape, name: str, machine: Machine, gpus: int, sequence: int, batch: int,
    kept: str, tokens: float, gib: float = 0.0, **options: Any,
) -> Other:  # fmt: skip
    options |= {"checkpointing": kept, "reduce": "fp32"}
    return Other(
        name, "torchtitan2024", shape, machine, gpus, sequence, batch,
        tokens=tokens, memory=gib * 2**30, options=options,
    )  # fmt: skip


def _fms(size: str, batch: int, tokens: float, **options: Any) -> Other:
    return Other(
        f"Llama 2 {size}, 128 A100", "fmsfsdp2024", _LLAMA2[size], A100, 128, 4096,
        batch, tokens=tokens, options=options,
    )  # fmt: skip


FSDP = [
    _fms("7B", 2, 3760, group=8),
    _fms("13B", 1, 1700, group=8),
    _fms("34B", 8, 772, checkpointing="full"),
    _fms("70B", 6, 380, checkpointing="full"),
    _titan(_LLAMA2["13B"], "Llama 2 13B, 64 A100", A100, 64, 4096, 2, "none", 2162),
    _titan(_LLAMA2["13B"], "Llama 2 13B, 64 A100", A100, 64, 4096, 2, "selective", 1904),
    _titan(_LLAMA2["70B"], "Llama 2 70B, 64 A100", A100, 64, 4096, 1, "selective", 355),
    _titan(_LLAMA2["70B"], "Llama 2 70B, 64 A100", A100, 64, 4096, 2, "full", 353),
    _titan(_8B, "Llama 3 8B, 64 A100", A100, 64, 8192, 1, "selective", 2973),
    _titan(_70B, "Llama 3 70B, 64 A100", A100, 64, 8192, 1, "full", 331),
    *(
        _titan(_8B, f"Llama 3 8B, {gpus} H100{what}", _H100_96, gpus, 8192, 2,
               "selective", tokens, gib, precision=precision)
        for gpus, what, tokens, gib, precision in (
            (8, "", 5762, 82.4, "bf16"),
            (8, ", compiled", 6667, 77.0, "bf16"),
            (8, ", compiled, fp8", 8532, 76.8, "fp8"),
            (128, "", 5605, 67.0, "bf16"),
            (128, ", compiled", 6514, 62.0, "bf16"),
            (128, ", compiled, fp8", 8380, 61.8, "fp8"),
        )
    ),
]  # fmt: skip
"""With `group`: HSDP. No constant and no pass was changed for these rows; that torchtitan
repeats every other linear layer was read in its code."""
