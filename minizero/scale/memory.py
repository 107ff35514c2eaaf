"""Bytes that one rank needs at most: state, what backward saves, what is whole."""

from __future__ import annotations

from dataclasses import dataclass

from ..memory.plan import PRECISIONS, Breakdown, Plan, estimate
from .shapes import Shape


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by the categories of the tracker; `host` and `disk` off it.

    parameters: the shard, and the units that are whole at once. gradients: the shard,
    and one unit's before and while it is reduced. activations: what backward saves, one
    block's when it is computed again, and the logits.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    host: float = 0.0
    disk: float = 0.0

    @property
    def total(self) -> float:
        """On the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def saved(shape: Shape, tokens: int, sequence: int, flash: bool, size: int) -> float:
    """Bytes that a block saves for backward, none computed again.

    Korthikanti et al. 2022, sec. 4.1, without dropout: its input, the norms' results,
    queries, keys and values, the attention's result, and the hidden layer. `size`:
    bytes of an element.
    """
    hidden = 4 if shape.gated else 2
    elements = 6 * shape.hidden + 2 * shape.kv + hidden * shape.ffn
    scores = 0.0 if flash else 2.5 * shape.heads * sequence
    return tokens * size * (elements + scores)


def needed(
    shape: Shape,
    tokens: int,
    sequence: int,
    world_size: int,
    plan: Plan,
    precision: str,
    checkpointing: str,
    reduced: int,
    flash: bool = True,
) -> Memory:
    """What a rank needs at its peak, before fragmentation and what CUDA takes."""
    kind = "bf16" if precision == "fp8" else precision
    state: Breakdown = estimate(shape.parameters, world_size, plan, kind)
    parameter, gradient, _ = PRECISIONS[kind]
    unit = max(shape.block, shape.root)
    whole = unit + shape.block if plan.parameters.sharded else 0
    grads = unit * (gradient + reduced) if plan.gradients.sharded else 0
    size = 4 if precision == "fp32" else 2
    block = saved(shape, tokens, sequence, flash, size)
    if checkpointing == "none":
        kept = shape.layers * block
    elif checkpointing in ("matmuls", "selective"):
        outputs = sum(o for _, o in shape.products) + 2 * shape.hidden
        if checkpointing == "selective":
            outputs -= sum(o for _, o in shape.linears[1::2])
        kept = shape.layers * size * tokens * outputs + block
    else:
        kept = shape.layers * size * tokens * shape.hidden + block
    logits = tokens * shape.vocab * (size + 8.0)  # and in fp32, with its gradient
    return Memory(
        state.parameters + parameter * whole,
        state.gradients + grads,
        state.optimizer,
        kept + logits,
        state.host.total,
        state.disk.total,
    )
