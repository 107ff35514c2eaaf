"""LayerNorm, RMSNorm and cross-entropy: by kernels, or torch's where none runs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .launching import Norm, RowLosses, runs_on

MOST_BYTES = 65536
"""The largest row, in bytes, that stays in a program's registers."""


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """LayerNorm over the last dimension (Ba et al. 2016); x: [..., width]."""
    if _norm_runs(x, weight, bias):
        return Norm.apply(x, weight, bias, eps, True)
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019); x: [..., width]."""
    if _norm_runs(x, weight, None):
        return Norm.apply(x, weight, None, eps, False)
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def _norm_runs(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a norm's kernels can run; if shapes are wrong, torch's function raises."""
    shapes = {t.shape for t in (weight, bias) if t is not None}
    small = 0 < x.numel() and x.shape[-1] * x.itemsize <= MOST_BYTES
    return small and shapes == {x.shape[-1:]} and runs_on(x, weight, bias)


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean over the targets that are not ignored; a scalar, fp32.

    logits: [..., vocabulary]. target: [...], int64. A target outside the vocabulary
    gives NaN: to refuse it, the host would have to wait for the device.
    """
    rows, targets = logits.reshape(-1, logits.shape[-1]), target.flatten()
    fits = target.shape == logits.shape[:-1] and target.device == logits.device
    if not (fits and target.dtype == torch.int64 and runs_on(logits)):
        return functional.cross_entropy(
            rows.float(), targets, ignore_index=ignore_index
        )
    losses = RowLosses.apply(rows, targets, ignore_index)
    return losses.sum() / (targets != ignore_index).sum()
