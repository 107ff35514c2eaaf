"""16-bit parameters and gradients, fp32 master weights, and a loss scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from minizero import comm, tracker
from minizero.flat import Flat
from minizero.launch import device
from minizero.seams import Precision

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class LossScale:
    """A static loss scale: what the loss is multiplied with before backward.

    Gradients carry it until the update. A step whose gradients are not finite
    is skipped, whatever the scale.
    """

    def __init__(self, scale: float = 1.0) -> None:
        if not 0 < scale < float("inf"):
            raise ValueError(
                f"the loss scale must be above 0 and finite, not {scale!r}"
            )
        self.scale = float(scale)

    def update(self, overflow: bool) -> None:
        """Called once a step, on every rank with the same `overflow`."""

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs, as plain numbers."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The inverse. Raises ValueError if the names differ."""
        if state.keys() != self.state_dict().keys():
            raise ValueError(
                f"this is the state of another loss scale: it has "
                f"{', '.join(state)}, and {type(self).__name__} needs "
                f"{', '.join(self.state_dict())}"
            )
        for name, value in state.items():
            setattr(self, name, value)


class DynamicLossScale(LossScale):
    """As large as gradients allow, by DeepSpeed's rules and its names.

    An overflow uses up one of `hysteresis` lives; on the last one each
    overflow halves the scale. `loss_scale_window` steps in a row without one
    (after a first that is not counted) double it and give all lives back;
    with `consecutive_hysteresis` any step without one gives them back. It
    starts at 2 ** `initial_scale_power`.

    An overflow when the scale is `min_loss_scale` already, and due to be
    halved, raises OverflowError.
    """

    def __init__(
        self,
        initial_scale_power: float = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
    ) -> None:
        super().__init__(2.0**initial_scale_power)
        if loss_scale_window < 1 or hysteresis < 1:
            raise ValueError(
                "loss_scale_window and hysteresis must be at least 1, not "
                f"{loss_scale_window!r} and {hysteresis!r}"
            )
        if not 0 < min_loss_scale <= self.scale:
            raise ValueError(
                f"min_loss_scale must be above 0 and at most the first scale, "
                f"{self.scale:g}, not {min_loss_scale!r}"
            )
        self.loss_scale_window = loss_scale_window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_loss_scale = float(min_loss_scale)
        self.lives = hysteresis
        self.good_steps = 0  # since the last overflow

    def update(self, overflow: bool) -> None:
        if overflow:
            self.good_steps = 0
            self._shrink()
            return
        # the first step after an overflow does not count
        counted, self.good_steps = self.good_steps, self.good_steps + 1
        whole_window = counted > 0 and counted % self.loss_scale_window == 0
        if whole_window or self.consecutive_hysteresis:
            self.lives = self.hysteresis
        if whole_window:
            self.scale *= 2

    def _shrink(self) -> None:
        if self.lives > 1:
            self.lives -= 1
        elif self.scale > self.min_loss_scale:
            self.scale = max(self.scale / 2, self.min_loss_scale)
        else:
            raise OverflowError(
                f"gradients are not finite at a loss scale of {self.scale:g}, "
                "the minimum, so the scale is not what makes them so; look "
                "for the first inf or NaN in the model or the data, or train "
                "in bf16"
            )

    def state_dict(self) -> dict[str, float]:
        return {
            "scale": self.scale,
            "lives": self.lives,
            "good_steps": self.good_steps,
        }


class MixedPrecision(Precision):
    """Compute in 16 bit, update in fp32 (Micikevicius et al. 2018, sec. 3).

    `parameters`: dtype of the parameters, of floating-point inputs of the
        model and, with ZeRO, of what is gathered.
    `reduce`: dtype in which gradients are kept, added up over micro-batches
        and reduced over ranks; by default that of the parameters.
    `buffers`: dtype of the model's floating-point buffers; by default they
        stay as they come.
    `loss_scale`: by default a `DynamicLossScale` if gradients pass through
        fp16, and else none, and no test for overflow either.

    The model may come in any floating-point dtype: the masters of the rows
    that this rank updates are made from its values before they are rounded.
    One object serves one training run.
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
            if dtype not in _FLOATS:
                raise ValueError(
                    "a precision is made of torch.float32, torch.bfloat16 "
                    f"and torch.float16, not of {dtype!r}"
                )
        if loss_scale is None and torch.float16 in (parameters, self.reduce):
            loss_scale = DynamicLossScale()
        self.scaler = loss_scale
        self.skipped_steps = 0
        self._new_masters: dict[Flat, list[Tensor]] = {}
        self._clipped: Tensor | None = None
        self._multiplier: Tensor | float = 1.0

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied with."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def attach(self, flat: Flat, owned: list[Tensor]) -> None:
        """Copy the owned rows in fp32; then round the buffer."""
        if not flat.full.is_floating_point():
            return
        if flat.trainable and self.parameters != torch.float32:
            self._new_masters[flat] = [
                tracker.label(row.to(torch.float32, copy=True), "optimizer")
                for row in owned
            ]
        flat.cast(self.parameters, self.reduce)

    def attach_buffer(self, buffer: Tensor) -> None:
        if self.buffers is not None and buffer.is_floating_point():
            # the same object: modules and the caller hold it
            buffer.data = tracker.label(buffer.to(self.buffers), "buffers")

    def masters(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        return self._new_masters.pop(flat, owned)

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast floating-point tensors to the parameters' dtype."""

        def cast(x: Any) -> Any:
            is_float = isinstance(x, Tensor) and x.is_floating_point()
            return x.to(self.parameters) if is_float else x

        return tree_map(cast, args), tree_map(cast, kwargs)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss in fp32, where its scale fits, times the scale."""
        if self._clipped is not None:
            raise RuntimeError(
                "backward came between clip_grad_norm and step; clip once, "
                "after the last micro-batch, or call zero_grad to start again"
            )
        return loss if self.scaler is None else loss.float() * self.loss_scale

    def unscaled(self, norm: Tensor) -> Tensor:
        norm = norm / self.loss_scale
        return norm if self._clipped is None else norm * self._clipped

    def clip(self, owned: list[Tensor], factor: Tensor) -> None:
        """Only remember the factor: 16 bit would round what it shrinks."""
        before = self._clipped
        self._clipped = factor if before is None else before * factor

    def ready(self, owned: list[Tensor]) -> bool:
        """Whether all gradients of all ranks are finite."""
        clipped = 1.0 if self._clipped is None else self._clipped
        self._multiplier = clipped / self.loss_scale
        if self.scaler is None:
            return True
        overflow = self._overflow(owned)
        self.skipped_steps += overflow
        self.scaler.update(overflow)
        return not overflow

    def _overflow(self, owned: list[Tensor]) -> bool:
        """Whether any rank has an inf or a NaN: all must do the same."""
        found = torch.zeros(1, device=device())
        for grad in owned:
            if grad.numel():
                largest = torch.linalg.vector_norm(grad, torch.inf)
                found += (~largest.isfinite()).to(found)
        with comm.phase(unit="overflow"):
            comm.all_reduce(found)
        return found.item() > 0

    def gradients(self, flat: Flat, owned: list[Tensor]) -> list[Tensor]:
        """In fp32, and there unscaled and clipped, in one multiplication."""
        grads = [grad.to(torch.float32) for grad in owned]
        for grad in grads:
            tracker.label(grad, "gradients")
            if isinstance(self._multiplier, Tensor):
                grad.mul_(self._multiplier.to(grad.device))
            elif self._multiplier != 1.0:
                grad.mul_(self._multiplier)
        return grads

    def written(self, masters: list[Tensor], rows: list[Tensor]) -> None:
        """Round the masters into the rows."""
        for master, row in zip(masters, rows, strict=True):
            if master is not row:
                row.copy_(master)

    def read(self, masters: list[Tensor], rows: list[Tensor]) -> None:
        """Where a row is not its master's rounding, the row is newer."""
        for master, row in zip(masters, rows, strict=True):
            new = row.to(master.device)
            master.copy_(torch.where(master.to(row.dtype) == new, master, new))

    def forget(self) -> None:
        self._clipped = None

    def state_dict(self) -> dict[str, Any]:
        """Loss scale and counts, without tensors: JSON can hold it.

        Masters are the optimizer's: they are in its `param_groups`.
        """
        return {
            "skipped_steps": self.skipped_steps,
            "loss_scale": self.scaler and self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse. Raises ValueError if only one has a loss scale."""
        saved = state["loss_scale"]
        if (saved is None) != (self.scaler is None):
            raise ValueError(
                f"the saved run had {'no' if saved is None else 'a'} loss "
                "scale and this one is otherwise; make the MixedPrecision "
                "with the same loss_scale"
            )
        self.skipped_steps = state["skipped_steps"]
        if self.scaler is not None:
            self.scaler.load_state_dict(saved)
