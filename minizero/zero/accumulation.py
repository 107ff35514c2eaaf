"""Gradients from forward to step: expected, added up, set aside, joined, forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable

from .. import comm
from ..memory import labels
from .elementwise import is_nothing
from .flat_buffer import Flat, Unit
from .interfaces import Precision
from .script_changes import GradientElsewhere, ScriptChanges


class Accumulation(ScriptChanges):
    """What a step's gradients are, whatever number of backwards they come from.

    `syncing`: whether a backward reduces. `has_gradients`: since a backward began,
    until `zero_grad`. `unasked`: whether a backward is under way that is the script's
    own, such as `loss.backward()`.
    """

    precision: Precision
    _reporting: dict[nn.Parameter, int]  # the number of each one's `_on_grad` hook

    def __init__(self) -> None:
        super().__init__()
        self.syncing, self.has_gradients = True, False
        self._unsynced = self._in_backward = self.unasked = False
        self._around = ExitStack()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        args, kwargs = self.precision.inputs(args, kwargs)
        with comm.phase("forward"), self._forward_writes():
            return self.model(*args, **kwargs)

    def _begin_backward(self) -> None:
        self.finish()  # what a backward that failed has left
        self._thaw()
        self._take_back_gradients(again=True)
        self._in_backward = self.has_gradients = True
        self.schedule.backward_begins()
        for p, hook in self._reporting.items():
            hooks = p._post_accumulate_grad_hooks
            if len(hooks) > 1:  # the script's come first: ours takes `.grad` away
                hooks[hook] = hooks.pop(hook)
        # the last unit's gradients come first; the root's end last
        self._left = list(self.units)
        self._missing = {
            unit: {
                s.parameter
                for f in unit.trainable
                for s in f.slots
                if s.parameter.requires_grad
            }
            for unit in self.units
        }
        self._reduced: set[Unit] = set()
        # to be reduced once more. Autograd brings each parameter one gradient; a backward
        # inside backward (reentrant checkpointing) brings one of its own
        self._late: set[Unit] = set()
        for unit in self.units:
            self._open(unit)

    @contextmanager
    def around_unasked(self) -> Iterator[None]:
        """Around a backward of the script's own; RuntimeError if it may not be."""
        if getattr(self.precision, "loss_scale", 1.0) != 1.0:
            raise RuntimeError(
                "a gradient came without the loss scale, as of loss.backward(); call "
                "backward(loss) of the wrapper"
            )
        yield

    @property
    def asked(self) -> bool:
        """Whether a backward is under way that somebody announced."""
        return self._in_backward and not self.unasked

    def begin_unasked(self) -> None:
        """A backward has begun that nobody announced; autograd says when it ends."""
        if self._in_backward:
            return
        with ExitStack() as around:
            around.enter_context(comm.phase("backward"))
            around.enter_context(self.around_unasked())
            self._begin_backward()
            self._around, self.unasked = around.pop_all(), True
        Variable._execution_engine.queue_callback(self._end_unasked)

    def _end_unasked(self) -> None:
        self._end_backward()
        self._leave_unasked()

    def _leave_unasked(self) -> None:
        if self.unasked:
            self.unasked = self._in_backward = False
            self._around.close()

    def _unasked_grad(self, p: Tensor) -> None:
        """Autograd has left a gradient in `p.grad` outside of `backward`.

        Once one was reduced it has been added to that and cannot be told from it, or to
        the stand-in for it, and is lost.
        """
        try:
            lost = isinstance(p.grad, GradientElsewhere)
            if lost or any(flat.reduced for flat in self._trainable()):
                raise RuntimeError(
                    "a gradient came outside of backward(loss) of the wrapper, and not "
                    "from its output; call backward(loss)"
                )
            self.begin_unasked()
        except RuntimeError as error:
            p.grad = None  # else the next step would have it
            self.zero_grad()
            raise RuntimeError(f"{error}; the gradients of this step are gone") from None

    def _end_backward(self) -> None:
        raise NotImplementedError

    def _trainable(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.trainable]

    def _open(self, unit: Unit) -> None:
        """Make the unit's buffers ready for more gradients."""
        for flat in unit.trainable:
            if flat.reduced:
                self._set_aside(flat)
                flat.reduced = False

    def _set_aside(self, flat: Flat) -> None:
        """Keep a reduced gradient elsewhere: autograd adds to the buffer."""
        grads = self.owned_grads(flat)
        if flat.total is None:
            flat.total = [labels.label(grad.clone(), "gradients") for grad in grads]
        else:
            for total, grad in zip(flat.total, grads, strict=True):
                total.add_(grad)
        flat.vacate()

    def _reduce(self, unit: Unit) -> None:
        self._reduced.add(unit)
        for flat in unit.trainable:
            flat.detach_grads()
        labels.mark("reduce", unit.name)
        self.carry_out(self.schedule.grads_ready(unit), unit)

    def _finish_gradients(self) -> None:
        """Reduce what `no_sync` left behind, and join what was set aside."""
        if self.unasked:
            self.zero_grad()
            raise RuntimeError(
                "a backward of the script's own has failed, and with it the gradients of "
                "this step; go on with the next forward"
            )
        self._take_back_gradients(again=False)
        if self._unsynced:
            for unit in reversed(self.units):
                self._reduce(unit)
            self.finish()
            self._unsynced = False
            self._show_gradients()
        self.home.finish_adds()
        self.join()

    def join(self) -> None:
        """Add what was set aside to the gradients."""
        for flat in self._trainable():
            if flat.total:
                for total, grad in zip(flat.total, self.owned_grads(flat), strict=True):
                    grad.add_(total)
            flat.total = None

    def partial_grads(self, flat: Flat) -> dict[str, list[Tensor]]:
        """What a step under way has of a buffer's gradients; only to be read.

        "mean": the owned shards of what was reduced, each [size]. "local": this rank's
        sum that was not, [padded].
        """
        parts: dict[str, list[Tensor]] = {}
        if not (self.has_gradients and flat.trainable):
            return parts
        if self._unsynced:
            parts["local"] = [flat.new_grad()]
        mean = self.owned_grads(flat)
        if not (flat.reduced or self.plan.gradients.sharded):
            mean = flat.total or []
        elif flat.total:
            mean = [a + b for a, b in zip(flat.total, mean, strict=True)]
        return parts | ({"mean": mean} if mean else {})

    def add_partial_grads(self, flat: Flat, parts: dict[str, list[Tensor]]) -> None:
        """The inverse, where there are no gradients yet; parts in host memory."""
        self.has_gradients = True
        if mean := parts.get("mean"):
            grads = self.owned_grads(flat)
            if self.plan.gradients.sharded:
                for grad, values in zip(grads, mean, strict=True):
                    self.home.write_back(grad, values)
            else:
                flat.total = [
                    labels.label(values.to(grad.device, grad.dtype), "gradients")
                    for grad, values in zip(grads, mean, strict=True)
                ]
        for values in parts.get("local", ()):
            self._unsynced = True
            grad = flat.new_grad().copy_(values)
            flat.came.update(
                slot.parameter for slot in flat.slots if not is_nothing(slot.view(grad))
            )

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside only adds up; the next one outside reduces.

        RuntimeError where gradients are sharded: a sum has no place to stay.
        """
        if self.plan.gradients.sharded:
            raise RuntimeError(
                f"{type(self).__name__} shards gradients, so every micro-batch is reduced "
                "and no_sync has nothing to postpone; call backward without it, or use a "
                "plan with replicated gradients (stage 0 or 1)"
            )
        return self._not_syncing()

    @contextmanager
    def _not_syncing(self) -> Iterator[None]:
        self.syncing, before = False, self.syncing
        try:
            yield
        finally:
            self.syncing = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; `step` does, an abandoned step needs it.

        If not `set_to_none`, those that are there are zeros from now on: weight decay
        and momentum go on, as in torch.
        """
        if not set_to_none:
            return self.model.zero_grad(set_to_none=False)  # seen at the next call
        self._leave_unasked()
        self.finish()
        self.home.finish_adds()
        for flat in self._trainable():
            if self.has_gradients:
                self.clear_grads(flat)
            flat.detach_grads()
            flat.came.clear()
            flat.reduced = False
        self._unsynced = self.has_gradients = False
        self.precision.forget()
