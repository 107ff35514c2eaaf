"""What the lab's GPT saves for backward and what it computes again, by formula."""

from __future__ import annotations

import torch

from .gpt import GPTConfig

Lines = dict[tuple[str, str], int]
"""Bytes by (module, operator)."""

FUSED, MATH = "fused", "math"


def block_activations(
    config: GPTConfig,
    batch: int,
    dtype: torch.dtype = torch.float32,
    mode: str = "none",
    attention: str = FUSED,
    device: str = "cpu",
) -> Lines:
    """What one block of ``GPT(config)`` saves for a batch of whole sequences.

    The keys name the module inside the block and the operator. A storage counts where
    it is saved first: the block's input here, its output in the next block.

    mode: "none", "selective" (what `keep_matmuls` keeps) or "full".
    attention: "fused", which keeps a row of log-sum-exps instead of the scores, or
        "math", which keeps them in float32 (``SDPBackend.MATH``).
    device: on "cuda" the statistics of a LayerNorm are float32 in any dtype.
    """
    e, heads, tokens = dtype.itemsize, config.heads, batch * config.sequence
    sbh = tokens * config.hidden
    scores = 4 * heads * tokens * config.sequence
    statistics = 2 * tokens * (4 if device == "cuda" else e)
    rows = 4 * heads * tokens  # log-sum-exps
    sdpa = ("attention", "scaled_dot_product_attention")
    if mode == "full":
        return {("", "checkpoint"): e * sbh}
    if mode == "selective":
        kept: Lines = {
            ("", "checkpoint"): e * sbh,
            ("attention.qkv", "linear"): 3 * e * sbh,
        }
        if attention == FUSED:
            kept[sdpa] = e * sbh + rows
        return kept | {
            ("attention.out", "linear"): e * sbh,
            ("mlp.up", "linear"): 4 * e * sbh,
            ("mlp.down", "linear"): e * sbh,
        }
    if mode != "none":
        raise ValueError(f"mode is {mode!r}; choose none, selective or full.")
    lines: Lines = {
        ("norm1", "layer_norm"): e * sbh + statistics,
        ("attention.qkv", "linear"): e * sbh,
    }
    if attention == FUSED:
        # q, k and v are views of one storage; its output is also what
        # attention.out saves
        lines[sdpa] = 3 * e * sbh + rows + e * sbh
    else:
        # q, k and v scaled, and the softmax, in float32; then a copy of the output
        lines[sdpa] = 3 * 4 * sbh + scores
        lines["attention.out", "linear"] = e * sbh
    return lines | {
        ("norm2", "layer_norm"): e * sbh + statistics,
        ("mlp.up", "linear"): e * sbh,
        ("mlp", "gelu"): 4 * e * sbh,
        ("mlp.down", "linear"): 4 * e * sbh,
    }


def gpt_activations(
    config: GPTConfig,
    batch: int,
    dtype: torch.dtype = torch.float32,
    mode: str = "none",
    attention: str = FUSED,
    device: str = "cpu",
) -> Lines:
    """What ``GPT(config)`` saves in all, from the tokens to the loss.

    Keys and arguments are those of :func:`block_activations`; its units are
    checkpointed by `mode`, what is outside of them is not.
    """
    e, tokens = dtype.itemsize, batch * config.sequence
    sbh = tokens * config.hidden
    block = block_activations(config, batch, dtype, mode, attention, device)
    lines: Lines = {("positions", "embedding"): 8 * config.sequence}  # the places
    for i in range(config.layers):
        for (module, op), nbytes in block.items():
            lines[f"blocks.{i}.{module}".rstrip("."), op] = nbytes
    statistics = 2 * tokens * (4 if device == "cuda" else e)
    return lines | {
        ("norm", "layer_norm"): e * sbh + statistics,
        ("head", "linear"): e * sbh,
        # the log-softmax, in float32, and the number of targets
        ("", "cross_entropy"): 4 * tokens * config.vocabulary + 4,
    }


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
    if mode not in again:
        raise ValueError(f"mode is {mode!r}; choose none, selective or full.")
    forward = config.layers * (projections + scores + up + down) + head
    return 3 * forward + config.layers * again[mode]
