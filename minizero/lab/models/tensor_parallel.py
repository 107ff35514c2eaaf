"""A GPT whose blocks are cut over the ranks: the smallest tensor parallelism.

Column-parallel, then row-parallel linear layers (Shoeybi et al., 2019, section 3): in
attention each rank has some of the heads, in the MLP some of the hidden units. All
ranks compute on the same batch, and what enters and leaves a block is the same on
each of them; what is inside is not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minizero import comm
from minizero.lab.models.gpt import GPT, MLP, Attention


class _Enter(torch.autograd.Function):
    """Identity; its backward adds the gradients of all ranks (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: comm.Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    """Adds the ranks' parts; its backward is the identity (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: comm.Group) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _sum(x: Tensor, group: comm.Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    with comm.phase(unit="tensor parallel"):
        comm.all_reduce(total, group=group)
    return total


class ParallelAttention(nn.Module):
    """`attention` with 1/N of its heads: (batch, sequence, hidden) to the same."""

    def __init__(self, attention: Attention, group: comm.Group) -> None:
        super().__init__()
        self.group = group
        self.heads = _share(attention.heads, "heads", group)
        hidden = attention.out.in_features
        qkv = attention.qkv
        self.weight = _rows(qkv.weight.view(3, hidden, hidden), 1, group)
        self.bias = _rows(qkv.bias.view(3, hidden), 1, group)
        self.out = _rows(attention.out.weight, 1, group)
        self.out_bias = nn.Parameter(attention.out.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        weight, bias = self.weight.flatten(0, 1), self.bias.flatten()
        qkv = F.linear(_Enter.apply(x, self.group), weight, bias)
        q, k, v = qkv.view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, sequence, -1)
        return _Leave.apply(F.linear(y, self.out), self.group) + self.out_bias


class ParallelMLP(nn.Module):
    """`mlp` with 1/N of its inner width: (batch, sequence, hidden) to the same."""

    def __init__(self, mlp: MLP, group: comm.Group) -> None:
        super().__init__()
        self.group = group
        _share(mlp.up.out_features, "inner features", group)
        self.up = _rows(mlp.up.weight, 0, group)
        self.up_bias = _rows(mlp.up.bias, 0, group)
        self.down = _rows(mlp.down.weight, 1, group)
        self.down_bias = nn.Parameter(mlp.down.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        up = F.gelu(F.linear(_Enter.apply(x, self.group), self.up, self.up_bias))
        return _Leave.apply(F.linear(up, self.down), self.group) + self.down_bias


def tensor_parallel(model: GPT, group: comm.Group | None = None) -> GPT:
    """Cut the blocks of `model` over the ranks of a group, in place, and return it.

    Every rank must have the same model and give it the same batches. What is not cut
    has the same gradient on every rank, so each rank trains its own parameters with
    an optimizer of its own, and nothing else is sent.

    Raises ValueError if the ranks do not divide the heads.
    """
    group = group or comm.everyone()
    for block in model.blocks:
        assert isinstance(block.attention, Attention) and isinstance(block.mlp, MLP)
        block.attention = ParallelAttention(block.attention, group)
        block.mlp = ParallelMLP(block.mlp, group)
    return model


def _share(count: int, what: str, group: comm.Group) -> int:
    if count % group.size:
        raise ValueError(
            f"{count} {what} do not divide into {group.size} ranks; choose a multiple."
        )
    return count // group.size


def _rows(full: Tensor, dim: int, group: comm.Group) -> nn.Parameter:
    """This rank's part of a weight, cut along `dim`."""
    return nn.Parameter(full.detach().chunk(group.size, dim)[group.rank].clone())
