"""The settings of a run in mixed precision: its dtypes and its loss scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..memory.labels import label
from ..zero.seams import Precision


class LossScale:
    """A static loss scale: the loss is multiplied by it before backward.

    Gradients carry the scale until the update, which divides them by it. A step whose
    gradients are not finite is skipped.
    """

    saved: tuple[str, ...] = ("scale",)

    def __init__(self, scale: float = 1.0) -> None:
        if not 0 < scale < float("inf"):
            raise ValueError(f"the loss scale must be above 0 and finite, not {scale!r}")
        self.scale = float(scale)

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs, as plain numbers."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned; ValueError if the names differ."""
        if state.keys() != set(self.saved):
            raise ValueError(f"this is another loss scale's state: {', '.join(state)}")
        vars(self).update(state)


class DynamicLossScale(LossScale):
    """A loss scale that adapts, by DeepSpeed's rules and under its names.

    The first `hysteresis` - 1 overflows only skip their step. Each one after that halves
    the scale too; at `min_loss_scale` it raises OverflowError. After `loss_scale_window`
    + 1 good steps, and every window after those, the scale doubles, and `hysteresis`
    counts anew (with `consecutive_hysteresis`: after each good step).
    """

    saved = ("scale", "lives", "good_steps")  # lives: of `hysteresis`, what is left

    def __init__(
        self,
        initial_scale_power: float = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
    ) -> None:
        super().__init__(2.0**initial_scale_power)
        if min(loss_scale_window, hysteresis) < 1 or not 0 < min_loss_scale <= self.scale:
            raise ValueError(
                "loss_scale_window and hysteresis must be at least 1, and min_loss_scale "
                f"above 0 and at most the first scale, not {loss_scale_window}, "
                f"{hysteresis} and {min_loss_scale}"
            )
        self.loss_scale_window = loss_scale_window
        self.hysteresis = self.lives = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_loss_scale = float(min_loss_scale)
        self.good_steps = 0  # since the last overflow

    def update(self, overflow: bool) -> None:
        """Lower the scale after an overflow, raise it after a window."""
        if overflow:
            self.good_steps = 0
            if self.lives > 1:
                self.lives -= 1
            elif self.scale > self.min_loss_scale:
                self.scale = max(self.scale / 2, self.min_loss_scale)
            else:
                raise OverflowError(
                    f"gradients are not finite at the minimal loss scale, {self.scale:g}; "
                    "look for the first inf or NaN in the model or the data, or train in "
                    "bf16"
                )
            return
        # the first step, and the first after an overflow, does not count
        counted, self.good_steps = self.good_steps, self.good_steps + 1
        is_full = counted > 0 and counted % self.loss_scale_window == 0
        if is_full or self.consecutive_hysteresis:
            self.lives = self.hysteresis
        if is_full:
            self.scale *= 2


class MixedSettings(Precision):
    """Dtypes and loss scale, and what a checkpoint keeps of them.

    The model may come in any floating-point dtype. One object serves one run.

    `parameters`: dtype of parameters, floating-point inputs, and what ZeRO-3 gathers.
    `reduce`: dtype in which gradients are added up and reduced; by default the same.
    `buffers`: dtype of the model's floating-point buffers. By default those of a module
        with parameters of its own get the parameters' dtype, which torch's kernels
        demand (batch norm); others stay as they are (a rotary embedding's frequencies).
    `loss_scale`: by default a `DynamicLossScale` if gradients pass through fp16, else
        none; without one, no step looks for overflow.
    """

    def __init__(
        self,
        parameters: torch.dtype = torch.bfloat16,
        reduce: torch.dtype | None = None,
        buffers: torch.dtype | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.parameters, self.buffers = parameters, buffers
        self.reduce = parameters if reduce is None else reduce
        for dtype in (self.parameters, self.reduce, buffers or parameters):
            if dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    "a precision is made of torch.float32, torch.bfloat16 and "
                    f"torch.float16, not of {dtype!r}"
                )
        if loss_scale is None and torch.float16 in (parameters, self.reduce):
            loss_scale = DynamicLossScale()
        self.scaler = loss_scale

    def attach_buffer(self, buffer: Tensor, module: nn.Module) -> None:
        """Cast a buffer of `module` in place: others may hold it too."""
        own, dtype = module.parameters(recurse=False), self.buffers
        if dtype is None and any(p.is_floating_point() for p in own):
            dtype = self.parameters
        if dtype is not None and buffer.is_floating_point():
            buffer.data = label(buffer.to(dtype), "buffers")

    def shard_to_master(self, master: Tensor, shard: Tensor) -> None:
        """Take over only what was written: other masters keep all their digits."""
        new = shard.to(master.device)
        unchanged = master.to(shard.dtype) == new
        master.copy_(torch.where(unchanged, master, new))

    def state_dict(self) -> dict[str, Any]:
        """Loss scale and counts; masters belong to the optimizer's state."""
        scale = self.scaler and self.scaler.state_dict()
        return super().state_dict() | {"loss_scale": scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; ValueError if just one has a scale."""
        saved = state["loss_scale"]
        if (saved is None) != (self.scaler is None):
            raise ValueError(
                f"the saved run had {'no' if saved is None else 'a'} loss scale, unlike "
                "this one; make it with the same loss_scale"
            )
        super().load_state_dict(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(saved)
