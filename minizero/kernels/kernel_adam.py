"""What Adam's kernels have in common: options, states, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .launching import check


class KernelAdam(torch.optim.Optimizer):
    """Adam, or AdamW, whose update of a parameter is one call of a kernel.

    Names and defaults of the options are DeepSpeed's, states those of
    `torch.optim.Adam`, so that either goes on from the other's checkpoint.
    `adam_w_mode`: decoupled weight decay (Loshchilov and Hutter 2019).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {betas}")
        options = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        for name, value in options.items():
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, not {value}")
        super().__init__(
            params, {**options, "betas": betas, "adam_w_mode": adam_w_mode}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.check(p, p.grad)
                    self.update(p, p.grad.contiguous(), self.state_of(p), group)
        return loss

    def check(self, p: Tensor, grad: Tensor) -> None:
        """Raise ValueError, before anything has changed, for what is not done."""
        name = type(self).__name__
        if grad.is_sparse or not p.is_contiguous():
            what = "sparse gradients" if grad.is_sparse else "parts of another tensor"
            raise ValueError(
                f"{name} updates contiguous parameters by dense gradients, and one of "
                f"shape {tuple(p.shape)} has {what}; use torch.optim.AdamW"
            )
        check(name, "torch.optim.AdamW", parameter=p, gradient=grad)

    def state_of(self, p: Tensor) -> dict[str, Any]:
        """`step`, a scalar in host memory; `exp_avg` and `exp_avg_sq`, like `p`."""
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        return state

    def update(
        self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """One step of a parameter, with everything that it needs."""
        raise NotImplementedError
