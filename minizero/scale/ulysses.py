"""Sequence parallelism: tokens are cut over ranks, in attention heads are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minizero import comm
from minizero.comm.all_to_all import all_to_all
from minizero.comm.grid import world


class Swap(torch.autograd.Function):
    """An all-to-all of rows, [P, ...]: its own inverse, its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, out = group, torch.empty_like(x)
        with comm.phase(unit="ulysses"), world(group):
            all_to_all(out, x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Swap.forward(ctx, grad.contiguous(), ctx.group), None


class UlyssesAttention(nn.Module):
    """Causal attention of 1/P of the tokens, [batch, s/P, hidden].

    Jacobs et al. 2023, sec. 3. `qkv`, `out`: those of the attention that it
    replaces, whole on every rank.
    """

    def __init__(self, whole: Any, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = whole.qkv, whole.out, whole.heads
        self.group, self.parts = group, group.size()
        if self.heads % self.parts:
            raise ValueError(
                f"{self.heads} heads cannot be cut over {self.parts} ranks; "
                "choose a group that divides them"
            )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        p, heads = self.parts, self.heads // self.parts
        # all heads of my tokens, to my heads of all tokens
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
