"""A script's own `loss.backward()`, in place of `engine.backward(loss)`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..zero.module_hooks import Hook
from .checks import check_alive, check_loss
from .step_loop import StepLoop


_asked: list[None] = []  # one for each `engine.backward` under way, of any engine
_unasked: list[OwnBackward] = []


@contextmanager
def asked() -> Iterator[None]:
    """The loss of this backward is divided already, whatever models it goes through."""
    _asked.append(None)
    try:
        yield
    finally:
        _asked.pop()


class Same(torch.autograd.Function):
    """Identity. What changes its result in place, as `loss *= 2`, leaves hooks on `x`.

    A view's would be lost: the graph of a view that is changed is built anew.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class OwnBackward:
    """Does for it what `backward` does: divides the gradient, and reduces when it is due.

    A gradient passes through the model's outputs, where it is divided by the number of
    micro-batches. RuntimeError for a loss that needs a scale and has none, and for one
    that is to be divided and does not come from the model's outputs.
    """

    def __init__(self, loop: StepLoop) -> None:
        self.loop, self.net = loop, loop.net
        self.scaled = self.divided = False
        loop.net.around_unasked = self.around  # type: ignore[method-assign]
        this = weakref.ref(self)  # the model outlives its engine

        def watch(module: nn.Module, args: Any, out: Any) -> Any:
            own = this()
            if own is None or not torch.is_grad_enabled():
                return None
            new = tree_map_only(Tensor, own.watched, out)
            return new if own.loop.steps.micro_batches > 1 else None

        loop.net.handles.append(loop.net.model.register_forward_hook(Hook(watch)))

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times its scale: `engine.scale(loss).backward()`."""
        self.loop.begin()
        check_loss(loss)
        self.scaled = True
        return self.net.precision.scaled(loss)

    def watched(self, out: Tensor) -> Tensor:
        """An output that tells when a gradient comes to it from outside."""
        if not out.requires_grad:
            return out
        if self.loop.steps.micro_batches > 1:
            # not `out` itself: one output may be computed from another
            out = Same.apply(out)
        out.register_hook(self._arriving)
        return out

    def _arriving(self, grad: Tensor) -> Tensor:
        if self.net.asked:
            return grad  # `backward` has divided the loss
        self.divided = True
        self.net.begin_unasked()
        share = self.loop.steps.micro_batches
        return grad if share == 1 or _asked else grad / share

    @contextmanager
    def around(self) -> Iterator[None]:
        """As the net's; and as of this micro-batch of the step."""
        check_alive(self.loop.over, self.net)
        scale = getattr(self.net.precision, "loss_scale", 1.0)
        if scale != 1.0 and not self.scaled:
            raise RuntimeError(
                f"the loss needs the loss scale, {scale:g}, which loss.backward() does not "
                "know; call engine.backward(loss), or engine.scale(loss).backward()"
            )
        if self.loop.steps.micro_batches > 1 and not self.divided:
            raise RuntimeError(
                f"the loss is one of {self.loop.steps.micro_batches} micro-batches, and comes "
                "from no output of the model that could be divided; call "
                "engine.backward(loss)"
            )
        if self.loop.steps.micro_batches > 1 and _unasked:
            raise RuntimeError(
                "the loss goes through two engines, and each would divide it by its "
                "micro-batches; call engine.backward(loss) of one of them"
            )
        self.scaled = self.divided = False
        _unasked.append(self)
        try:
            with self.loop.around_backward():
                yield
        finally:
            _unasked.remove(self)
