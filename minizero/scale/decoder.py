"""A decoder of any published shape, to rehearse with: its sizes are right, no more."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .shapes import Shape


class Block(nn.Module):
    """Attention and a feed-forward layer, as `Shape` describes them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, bias = shape, not shape.gated
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        qkv, out, up, down = (
            nn.Linear(i, o, bias=bias, device="meta") for i, o in shape.products
        )
        self.norm1, self.norm2 = norm(shape.hidden), norm(shape.hidden)
        self.qkv, self.out, self.up, self.down = map(_made, (qkv, out, up, down))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] both ways."""
        x = x + self.attend(self.norm1(x))
        y = self.up(self.norm2(x))
        if not self.shape.gated:
            return x + self.down(F.gelu(y))
        gate, y = y.chunk(2, -1)
        return x + self.down(F.silu(gate) * y)

    def attend(self, x: Tensor) -> Tensor:
        shape, (batch, sequence, hidden) = self.shape, x.shape
        split = self.qkv(x).split([hidden, shape.kv, shape.kv], -1)
        size = hidden // shape.heads
        q, k, v = (
            part.view(batch, sequence, -1, size).transpose(1, 2) for part in split
        )
        if shape.groups < shape.heads:
            k, v = (
                part.repeat_interleave(shape.heads // shape.groups, 1)
                for part in (k, v)
            )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))


def _made(linear: nn.Linear) -> nn.Linear:
    """On the CPU, without the time that drawing its values takes."""
    for name, p in list(linear.named_parameters(recurse=False)):
        setattr(linear, name, nn.Parameter(torch.empty(p.shape)))
    return linear


class Decoder(nn.Module):
    """Tokens and targets [batch, sequence] to their mean cross-entropy.

    recompute: whether blocks keep only their input for backward.
    """

    def __init__(self, shape: Shape, recompute: bool = False) -> None:
        super().__init__()
        self.recompute, hidden = recompute, shape.hidden
        self.embedding = nn.Embedding.from_pretrained(
            torch.empty(shape.vocab, hidden), freeze=False
        )
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.gated else nn.LayerNorm)(hidden)
        self.head = nn.Linear(hidden, shape.vocab, bias=False, device="meta")
        tied = not shape.gated if shape.tied is None else shape.tied
        self.head.weight = self.embedding.weight if tied else _made(self.head).weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """A scalar."""
        x = self.embedding(tokens)
        for block in self.blocks:
            again = self.recompute
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())
