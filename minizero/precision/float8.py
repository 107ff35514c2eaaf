"""Linear layers whose matrix products take 8-bit operands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# values and weights need digits, gradients need range
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """8-bit values and one fp32 scale, such that x is about values * scale.

    The scale puts the largest magnitude of `x` at the format's largest.
    """
    largest = torch.finfo(dtype).max
    tiny = torch.finfo(torch.float32).tiny
    most = x.abs().amax() if x.numel() else x.new_zeros(())  # an expert may get no rows
    scale = most.float().clamp(min=tiny * largest) / largest
    # clamped: rounding may end just above, where e4m3 has no infinity
    values = (x.float() / scale).clamp(-largest, largest).to(dtype)
    return values, scale


def product(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """a @ b, [m, n], of quantized a, [m, k], and b, [k, n].

    Summed in fp32 and rounded to `dtype` once. Where the hardware has no
    8-bit product the same 8-bit values are multiplied in fp32.
    """
    (x, x_scale), (y, y_scale) = a, b
    gpu = x.device if x.is_cuda and x.numel() else None
    if gpu and torch.cuda.get_device_capability(gpu) >= (8, 9):  # from Ada on
        # it takes rows on the left and columns on the right
        columns = y.t().contiguous().t()
        return torch._scaled_mm(
            x.contiguous(), columns, x_scale, y_scale, out_dtype=dtype
        )
    return (x.float() @ y.float() * (x_scale * y_scale)).to(dtype)


class _Float8Product(torch.autograd.Function):
    """x @ weight.T with three 8-bit products: this and its two gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, w8 = quantize(x, E4M3), quantize(weight, E4M3)
        # the input is saved in 8 bit; the weight as it is, to be quantized again
        ctx.save_for_backward(*x8, weight)
        return product(x8, (w8[0].t(), w8[1]), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, x_scale, weight = ctx.saved_tensors
        g, g_scale = quantize(grad, E5M2)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = product((g, g_scale), quantize(weight, E4M3), grad.dtype)
        if ctx.needs_input_grad[1]:  # a frozen weight needs none
            to_weight = product((g.t(), g_scale), (x, x_scale), weight.dtype)
        return to_x, to_weight


class Float8Linear(nn.Linear):
    """`nn.Linear` with 8-bit products; every call computes one scale per tensor.

    E4M3 forward, E5M2 for gradients (Micikevicius et al. 2022, sec. 3). The
    weight and its gradient keep their dtype, so the precision, the plans and
    the optimizer see no difference. Both sizes are multiples of 16, and so
    must be the number of rows of the input on a GPU.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        y: Tensor = _Float8Product.apply(rows, self.weight)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def use_float8(
    model: nn.Module, where: Callable[[str, nn.Linear], bool] | None = None
) -> list[str]:
    """Replace linear layers by 8-bit ones, in place; returns their names.

    `where`: chooses by name and layer. By default all but those that share
    their weight, as a tied head does: the last layer needs its digits.
    Parameters stay the same objects. Call it before `parallelize`.
    """
    every = model.named_parameters(remove_duplicate=False)
    uses: Counter[Tensor] = Counter(p for _, p in every)
    chosen = []
    for name, layer in list(model.named_modules()):
        if not name or not isinstance(layer, nn.Linear):
            continue
        if not (where(name, layer) if where else uses[layer.weight] == 1):
            continue
        n, k = layer.weight.shape
        if n % 16 or k % 16:
            raise ValueError(
                f"layer {name!r} maps {k} features to {n}, and 8-bit "
                "products need multiples of 16; leave it out with `where`"
            )
        new = Float8Linear(k, n, layer.bias is not None, device="meta")
        new.weight, new.bias = layer.weight, layer.bias
        model.set_submodule(name, new.train(layer.training))
        chosen.append(name)
    return chosen
