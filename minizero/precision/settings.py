"""What a mixed precision is told, and what a resumed run needs of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..memory import labels
from ..zero.flat_buffer import Flat
from ..zero.interfaces import Precision
from .loss_scale import DynamicLossScale, LossScale

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Settings(Precision):
    """The dtypes of a run and its loss scale, checked.

    `parameters`: dtype of the parameters, of floating-point inputs of the
        model and, with ZeRO, of what is gathered.
    `reduce`: dtype in which gradients are kept, added up over micro-batches
        and reduced over ranks; by default that of the parameters.
    `buffers`: dtype of the model's floating-point buffers. By default those of
        a module with parameters of its own, such as a batch norm's running
        means, get the dtype of `parameters`, which torch's kernels demand;
        others, such as the frequencies of a rotary embedding, stay as they come.
    `loss_scale`: by default a `DynamicLossScale` if gradients pass through
        fp16, and else none, and no test for overflow either.

    Raises ValueError for a dtype that is not fp32, bf16 or fp16.
    """

    def __init__(
        self,
        parameters: torch.dtype = torch.bfloat16,
        reduce: torch.dtype | None = None,
        buffers: torch.dtype | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.parameters = parameters
        self.reduce = parameters if reduce is None else reduce
        self.buffers = buffers
        for dtype in (self.parameters, self.reduce, buffers or parameters):
            if dtype not in FLOATS:
                raise ValueError(
                    "a precision is made of torch.float32, torch.bfloat16 "
                    f"and torch.float16, not of {dtype!r}"
                )
        if loss_scale is None and torch.float16 in (self.parameters, self.reduce):
            loss_scale = DynamicLossScale()
        self.scaler = loss_scale
        self.skipped_steps = 0
        self._made: dict[Flat, list[Tensor]] = {}  # masters, see `Masters.attach`

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied with."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def attach_buffer(self, buffer: Tensor, module: nn.Module) -> None:
        beside = any(p.is_floating_point() for p in module.parameters(recurse=False))
        dtype = self.parameters if beside and self.buffers is None else self.buffers
        if dtype is not None and buffer.is_floating_point():
            # the same object: modules and the caller hold it
            buffer.data = labels.label(buffer.to(dtype), "buffers")

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast floating-point tensors to the parameters' dtype."""

        def cast(x: Any) -> Any:
            is_float = isinstance(x, Tensor) and x.is_floating_point()
            return x.to(self.parameters) if is_float else x

        return tree_map(cast, args), tree_map(cast, kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Loss scale and counts.

        Masters are the optimizer's: they are in its `param_groups`.
        """
        scale = self.scaler and self.scaler.state_dict()
        return super().state_dict() | {"loss_scale": scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse. Raises ValueError if only one has a loss scale."""
        saved = state["loss_scale"]
        if (saved is None) != (self.scaler is None):
            raise ValueError(
                f"the saved run had {'no' if saved is None else 'a'} loss "
                "scale and this one is otherwise; make the MixedPrecision "
                "with the same loss_scale"
            )
        super().load_state_dict(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(saved)
