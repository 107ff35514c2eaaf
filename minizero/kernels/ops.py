"""LayerNorm, RMSNorm and cross-entropy: by kernels, or torch's where none runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .launching import launch, runs_on

MOST_BYTES = 65536  # of a row that stays in a program's registers
MOST_PROGRAMS = 256  # of a norm's backward; each gives a row of partial sums
WORDS = 4096  # of the vocabulary, in a block of the loss


class Norm(torch.autograd.Function):
    """LayerNorm if `center`, else RMSNorm: x [..., width], weight and bias [width]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        center: bool,
    ) -> Tensor:
        width = x.shape[-1]
        rows = x.numel() // width
        x = x.contiguous()
        y = torch.empty_like(x)
        mean, rstd = x.new_empty(2, rows, dtype=torch.float32)
        block = 1 << (width - 1).bit_length()
        ctx.options = {"CENTER": center, "BLOCK": block}
        tensors = (x, weight, bias, y, mean, rstd)
        launch("norm_forward", (rows,), *tensors, width, eps, **ctx.options)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        width, rows = x.shape[-1], len(rstd)
        dx, programs = torch.empty_like(x), min(rows, MOST_PROGRAMS)
        dweight = x.new_empty(programs, width, dtype=torch.float32)
        dbias = None if bias is None else torch.empty_like(dweight)
        given = (x, weight, dy.contiguous(), mean, rstd, dx, dweight, dbias)
        launch("norm_backward", (programs,), *given, rows, width, **ctx.options)
        dbias = None if dbias is None else dbias.sum(0)
        return dx, dweight.sum(0), dbias, None, None  # summed over programs, in fp32


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


class RowLosses(torch.autograd.Function):
    """The loss of each row, [rows], of logits [rows, vocabulary]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignored: int) -> Tensor:
        logits, target = logits.contiguous(), target.contiguous()
        rows, vocabulary = logits.shape
        losses, totals = logits.new_empty(2, rows, dtype=torch.float32)
        ctx.options = vocabulary, ignored
        tensors = (logits, target, losses, totals)
        launch("loss_forward", (rows,), *tensors, *ctx.options, BLOCK=WORDS)
        ctx.save_for_backward(logits, target, totals)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, totals = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        grid = len(logits), -(-logits.shape[1] // WORDS)
        tensors = (logits, target, totals, dlosses.contiguous(), dlogits)
        launch("loss_backward", grid, *tensors, *ctx.options, BLOCK=WORDS)
        return dlogits, None, None


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean over the targets that are not ignored; a scalar, fp32.

    logits: [..., vocabulary]. target: [...], int64. A target outside the vocabulary
    gives NaN: to refuse it, the host would have to wait for the device.
    """
    if target.shape != logits.shape[:-1]:
        shapes = f"{[*target.shape]} do not fit logits of shape {[*logits.shape]}"
        raise ValueError(f"targets of shape {shapes}; each row of logits needs one")
    rows, targets = logits.reshape(-1, logits.shape[-1]), target.flatten()
    ours = target.dtype == torch.int64 and target.device == logits.device
    if not ours or not runs_on(logits):
        return functional.cross_entropy(
            rows.float(), targets, ignore_index=ignore_index
        )
    losses = RowLosses.apply(rows, targets, ignore_index)
    return losses.sum() / (targets != ignore_index).sum()
