"""What the lab's GPT saves for backward and what it computes again, by formula."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minizero.lab.models.gpt import GPTConfig

Lines = dict[tuple[str, str], int]
"""Bytes by (module, operator)."""

FUSED, MATH = "fused", "math"


@dataclass(frozen=True)
class Activations:
    """What ``GPT(config)`` saves for backward, for a batch of whole sequences.

    mode: "none", "selective" (what `keep_matmuls` keeps) or "full".
    attention: "fused", which keeps a row of log-sum-exps instead of the scores, or
        "math", which keeps them in float32 (``SDPBackend.MATH``).
    """

    config: GPTConfig
    batch: int
    dtype: torch.dtype = torch.float32
    mode: str = "none"
    attention: str = FUSED

    def __post_init__(self) -> None:
        if self.mode not in ("none", "selective", "full"):
            raise ValueError(f"mode is {self.mode!r}; choose none, selective or full.")

    def block(self) -> Lines:
        """What one block saves; the keys name the module inside it and the operator.

        A storage counts where it is saved first: the block's input here, its output
        in the next block.
        """
        one = self._activation
        if self.mode == "full":
            return {("", "recompute"): one}
        if self.mode == "selective":
            return {
                ("", "recompute"): one,
                ("attention.qkv", "linear"): 3 * one,
                **(self._attention(kept=True) if self.attention == FUSED else {}),
                ("attention.out", "linear"): one,
                ("mlp.up", "linear"): 4 * one,
                ("mlp.down", "linear"): one,
            }
        return {
            ("norm1", "layer_norm"): one + self._statistics,
            ("attention.qkv", "linear"): one,
            **self._attention(),
            ("norm2", "layer_norm"): one + self._statistics,
            ("mlp.up", "linear"): one,
            ("mlp", "gelu"): 4 * one,
            ("mlp.down", "linear"): 4 * one,
        }

    def model(self) -> Lines:
        """What the model saves in all, from the tokens to the loss.

        Its units are recomputed by `mode`, what is outside of them is not.
        """
        lines: Lines = {("positions", "embedding"): 8 * self.config.sequence}
        for i in range(self.config.layers):
            for (module, op), nbytes in self.block().items():
                lines[f"blocks.{i}.{module}".rstrip("."), op] = nbytes
        return lines | {
            ("norm", "layer_norm"): self._activation + self._statistics,
            ("head", "linear"): self._activation,
            # the log-softmax, in float32, and the number of targets
            ("", "cross_entropy"): 4 * self._tokens * self.config.vocabulary + 4,
        }

    def _attention(self, kept: bool = False) -> Lines:
        """Of the attention itself, between its two projections."""
        sdpa = ("attention", "scaled_dot_product_attention")
        rows = 4 * self.config.heads * self._tokens
        if self.attention == FUSED:
            # q, k and v are views of one storage, which qkv's line has where its
            # output is kept; the output here is also what attention.out saves
            views = 0 if kept else 3 * self._activation
            return {sdpa: views + rows + self._activation}
        # q, k and v scaled, and the softmax, in float32; then a copy of the output
        scaled = 3 * 4 * self._tokens * self.config.hidden
        scores = rows * self.config.sequence
        return {sdpa: scaled + scores, ("attention.out", "linear"): self._activation}

    @property
    def _tokens(self) -> int:
        return self.batch * self.config.sequence

    @property
    def _activation(self) -> int:
        """Bytes of one tensor [batch, sequence, hidden]."""
        return self.dtype.itemsize * self._tokens * self.config.hidden

    @property
    def _statistics(self) -> int:
        """Bytes of the mean and the deviation that a LayerNorm keeps on a CPU."""
        return 2 * self._tokens * self.dtype.itemsize


def step_flops(
    config: GPTConfig, batch: int, mode: str = "none", attention: str = MATH
) -> int:
    """Floating-point operations of the matrix products of one forward and backward.

    2mnk for a product of m×k and k×n, as ``FlopCounterMode`` counts; a backward has
    two products for each of the forward. Recomputation stops at the last tensor that
    is saved, the input of the block's last layer, so that layer's product is not
    repeated. Of fused attention nothing is counted, as torch does on a CPU.
    """
    h, tokens = config.hidden, batch * config.sequence
    up = down = 2 * 4 * tokens * h * h
    projections = 2 * 4 * tokens * h * h
    scores = 4 * tokens * config.sequence * h if attention == MATH else 0
    head = 2 * tokens * h * config.vocabulary
    again = {"none": 0, "selective": scores, "full": projections + scores + up}
    forward = config.layers * (projections + scores + up + down) + head
    return 3 * forward + config.layers * again[mode]
