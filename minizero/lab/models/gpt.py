"""A small GPT, from 0.1 M to 1 B parameters by name.

The architecture of GPT-2 (Radford et al., 2019): pre-norm blocks, learned
positions, a GELU MLP four times as wide as the model, and a head that shares its
weight with the token embedding. The vocabulary is the 256 byte values, so that no
tokenizer is needed and any file is text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a :class:`GPT`.

    layers: number of blocks.
    hidden: width of the residual stream; a multiple of ``heads``.
    heads: attention heads a block.
    sequence: longest sequence, in tokens; one learned position each.
    vocabulary: number of tokens; 256 for bytes.
    checkpoint: recompute each block in the backward pass instead of keeping its
        activations.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int = 256
    vocabulary: int = 256
    checkpoint: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden is {self.hidden} and does not divide into {self.heads} "
                "heads; choose a multiple."
            )

    @classmethod
    def named(cls, name: str, **changes: Any) -> GPTConfig:
        """The configuration called `name` in :data:`SIZES`, with `changes`.

        Raises ValueError for an unknown name.
        """
        size = SIZES.get(name.lower())
        if size is None:
            known = ", ".join(SIZES)
            raise ValueError(f"There is no model size {name!r}; choose one of {known}.")
        return replace(size, **changes)


SIZES = {
    "0.1m": GPTConfig(layers=3, hidden=48, heads=3, sequence=128),
    "0.5m": GPTConfig(layers=4, hidden=96, heads=3),
    "1m": GPTConfig(layers=5, hidden=128, heads=4),
    "3m": GPTConfig(layers=5, hidden=224, heads=7),
    "10m": GPTConfig(layers=8, hidden=320, heads=5),
    "30m": GPTConfig(layers=12, hidden=448, heads=7, sequence=512),
    "100m": GPTConfig(layers=14, hidden=768, heads=12, sequence=1024),
    "350m": GPTConfig(layers=28, hidden=1024, heads=16, sequence=1024),
    "1b": GPTConfig(layers=20, hidden=2048, heads=16, sequence=1024),
}
"""Sizes by name; each has within 6 % of the parameters that it is called by."""


def count_parameters(config: GPTConfig) -> int:
    """Number of parameters of ``GPT(config)``, by formula, the tied weight once.

    A block of width h has 12h² weights (attention 4h², MLP 8h²), 9h biases and two
    layer norms of 2h each.
    """
    h = config.hidden
    embeddings = (config.vocabulary + config.sequence) * h
    return embeddings + config.layers * (12 * h * h + 13 * h) + 2 * h


class Linear(nn.Linear):
    """``nn.Linear`` that starts at N(0, std²), its bias at zero."""

    def __init__(
        self, inputs: int, outputs: int, std: float = 0.02, bias: bool = True
    ) -> None:
        self.std = std  # reset_parameters reads it, which nn.Linear.__init__ calls
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """``nn.Embedding`` that starts at N(0, 0.02²)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Attention(nn.Module):
    """Causal self-attention over (batch, sequence, hidden)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.hidden, 3 * config.hidden)
        self.out = Linear(config.hidden, config.hidden, std=residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        heads = (batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = self.qkv(x).view(heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))
        return out


class MLP(nn.Module):
    """Two linear layers with a GELU between, over (batch, sequence, hidden)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden, 4 * config.hidden)
        self.down = Linear(4 * config.hidden, config.hidden, std=residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """A pre-norm transformer block, (batch, sequence, hidden) to the same.

    Its weights have their starting values when ``__init__`` returns, so a block can
    be sharded before the next one is built.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocabulary, config.hidden)
        self.positions = Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        head = Linear(config.hidden, config.vocabulary, bias=False)
        head.weight = self.tokens.weight  # before the head is part of the model
        self.head = head

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The logits, or the mean cross-entropy when there are targets.

        tokens: (batch, sequence) int64, no longer than ``config.sequence``.
        targets: (batch, sequence) int64, the token that follows each.
        Returns (batch, sequence, vocabulary) logits, or a float32 scalar in nats.
        """
        length = tokens.shape[1]
        if length > self.config.sequence:
            raise ValueError(
                f"The sequence has {length} tokens, and the model has positions for "
                f"{self.config.sequence}; shorten it or build a longer model."
            )
        places = torch.arange(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            if self.config.checkpoint:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        prompt: bytes,
        n: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> bytes:
        """`n` bytes that follow `prompt`, which has at least one, drawn in turn.

        temperature: divides the logits; above 0.
        generator: a CPU generator. Ranks that generate together must agree on it,
            as each byte is a forward pass, and a forward pass may communicate.
        """
        device = self.tokens.weight.device
        text = list(prompt)
        for _ in range(n):
            window = torch.tensor([text[-self.config.sequence :]], device=device)
            logits = self(window)[0, -1].float().cpu()
            chances = (logits / temperature).softmax(0)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        return bytes(text[len(prompt) :])


def residual_std(config: GPTConfig) -> float:
    """Starting deviation of a layer that writes to the residual stream.

    2·layers of them add up, so each starts 1/√(2·layers) smaller (Radford et al.,
    2019, section 2.3).
    """
    return 0.02 / sqrt(2 * config.layers)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: matrices decay, the rest does not.

    Embeddings are matrices; biases and norms are vectors. A tied parameter is in the
    groups once, a frozen one not at all.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
