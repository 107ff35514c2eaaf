"""DeepSpeed's Adams, with its arguments."""

from __future__ import annotations

from typing import Any

import torch

from .. import kernels

DeepSpeedCPUAdagrad = torch.optim.Adagrad


class FusedAdam(kernels.FusedAdam):
    """`minizero.kernels.FusedAdam`; L2 decay where `adam_w_mode` is false.

    ValueError for an option that is not done.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad or not bias_correction:
            raise ValueError(
                f"amsgrad={amsgrad} and bias_correction={bias_correction} are not done; "
                "leave both out"
            )
        two = betas[0], betas[1]
        super().__init__(params, lr, two, eps, weight_decay, adam_w_mode)


class DeepSpeedCPUAdam(FusedAdam):
    """The same: with offload, torch's fused kernel on the host."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        kind, decay = adamw_mode, weight_decay
        super().__init__(
            model_params, lr, bias_correction, betas, eps, kind, decay, amsgrad
        )
