"""Sequence parallelism: each rank has some tokens; in attention, heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minizero import comm


class Swap(torch.autograd.Function):
    """An all-to-all of rows, [P, ...]; its backward is the same again.

    Row j of `x` goes to rank j; row j of what it returns comes from rank j.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: comm.Group) -> Tensor:
        ctx.group, out, me = group, torch.empty_like(x), group.rank
        out[me] = x[me]
        sends, receives = dict(enumerate(x)), dict(enumerate(out))
        del sends[me], receives[me]
        with comm.phase(unit="ulysses"):
            sent = x.numel() - x[me].numel()
            comm.enter("all_to_all", x, sent, group)
            comm.exchange(sends, receives, group=group)()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Swap.forward(ctx, grad.contiguous(), ctx.group), None


class UlyssesAttention(nn.Module):
    """Causal attention of 1/P of the tokens, [batch, s/P, hidden].

    It takes the place of `attention`, whose linear layers `qkv` and `out`
    every rank keeps in full (Jacobs et al. 2023, sec. 3).
    """

    def __init__(self, attention: Any, group: comm.Group) -> None:
        super().__init__()
        self.qkv, self.out = attention.qkv, attention.out
        self.heads = attention.heads
        self.group, self.parts = group, group.size
        if self.heads % self.parts:
            raise ValueError(
                f"{self.heads} heads cannot be cut over {self.parts} ranks; "
                "choose a group that divides them"
            )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        p, heads = self.parts, self.heads // self.parts
        # from all heads of my tokens to my heads of all tokens
        qkv = self.qkv(x).view(batch, length, 3, p, heads, -1)
        qkv = qkv.permute(3, 0, 1, 2, 4, 5).contiguous()
        qkv = Swap.apply(qkv, self.group)
        q, k, v = qkv.permute(3, 1, 4, 0, 2, 5).flatten(3, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # and back
        y = y.unflatten(2, (p, length)).permute(2, 0, 1, 3, 4).contiguous()
        y = Swap.apply(y, self.group).permute(1, 3, 0, 2, 4)
        out: Tensor = self.out(y.reshape(batch, length, hidden))
        return out
