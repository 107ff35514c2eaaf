"""The loss scale: static, or as large as gradients allow."""

from __future__ import annotations


class LossScale:
    """A static loss scale: the loss is multiplied by it before backward.

    Gradients carry the scale until the update, which divides them by it. A
    step whose gradients are not finite is skipped.
    """

    saved: tuple[str, ...] = ("scale",)

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
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The inverse. Raises ValueError if the names differ."""
        if state.keys() != set(self.saved):
            raise ValueError(
                f"this is another loss scale's state: it has {', '.join(state)}"
            )
        vars(self).update(state)


class DynamicLossScale(LossScale):
    """A loss scale that adapts, by DeepSpeed's rules and under its names.

    The first `hysteresis` - 1 overflows only skip their step. Each one after
    that halves the scale too; at `min_loss_scale` it raises OverflowError.
    After `loss_scale_window` + 1 steps without overflow the scale doubles and
    the tolerance is restored (with `consecutive_hysteresis`: after each step
    without overflow).
    """

    saved = ("scale", "lives", "good_steps")

    def __init__(
        self,
        initial_scale_power: float = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
    ) -> None:
        super().__init__(2.0**initial_scale_power)
        counts = min(loss_scale_window, hysteresis)
        if counts < 1 or not 0 < min_loss_scale <= self.scale:
            raise ValueError(
                "loss_scale_window and hysteresis must be at least 1, and "
                "min_loss_scale above 0 and at most the first scale, not "
                f"{loss_scale_window}, {hysteresis} and {min_loss_scale}"
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
                    "gradients are not finite at the minimal loss scale, "
                    f"{self.scale:g}; look for the first inf or NaN in the "
                    "model or the data, or train in bf16"
                )
            return
        # the first step after an overflow does not count
        counted, self.good_steps = self.good_steps, self.good_steps + 1
        is_full = counted > 0 and counted % self.loss_scale_window == 0
        if is_full or self.consecutive_hysteresis:
            self.lives = self.hysteresis
        if is_full:
            self.scale *= 2
