"""LayerNorm, RMSNorm and cross-entropy: the kernels, or torch's where none runs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .autograd import Norm, RowLosses
from .launching import check, runs_on

MOST_BYTES = 65536
"""The largest row, in bytes, that stays in a program's registers."""


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """LayerNorm over the last dimension (Ba et al. 2016); x: [..., width].

    Raises ValueError for dtypes, shapes or devices that do not fit.
    """
    _check("layer_norm", x, weight, bias)
    if not runs_on(x) or not x.numel():
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return Norm.apply(x, weight, bias, eps, True)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019); x: [..., width]."""
    _check("rms_norm", x, weight, None)
    if not runs_on(x) or not x.numel():
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    return Norm.apply(x, weight, None, eps, False)


def _check(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    instead, row = f"torch.nn.functional.{name}", x.shape[-1] * x.itemsize
    check(name, instead, x=x, weight=weight, bias=bias)
    for key, tensor in {"weight": weight, "bias": bias}.items():
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} normalises the last dimension of x, {tuple(x.shape)}, so "
                f"{key} has its size, not {tuple(tensor.shape)}"
            )
    if row > MOST_BYTES:
        raise ValueError(
            f"{name} keeps a row in registers, at most {MOST_BYTES} bytes, and a row "
            f"of x has {row}; use {instead}"
        )


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean over the targets that are not ignored; a scalar, fp32.

    logits: [..., vocabulary]. target: [...], int64. A target outside the vocabulary
    gives NaN: to refuse it, the host would have to wait for the device.
    """
    name = "cross_entropy"
    check(name, f"torch.nn.functional.{name}", logits=logits)
    wanted = torch.int64, logits.shape[:-1], logits.device
    if (target.dtype, target.shape, target.device) != wanted:
        raise ValueError(
            f"{name} takes an int64 target for each row of logits "
            f"{tuple(logits.shape)} on {logits.device}, not {tuple(target.shape)} of "
            f"{target.dtype} on {target.device}"
        )
    logits = logits.reshape(-1, logits.shape[-1])
    target = target.flatten()
    if not runs_on(logits):
        return functional.cross_entropy(
            logits.float(), target, ignore_index=ignore_index
        )
    losses = RowLosses.apply(logits, target, ignore_index)
    return losses.sum() / (target != ignore_index).sum()
