"""Pipeline parallelism: each rank has some of the layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from minizero import comm
from minizero.ranks import device
from minizero.zero import DataParallel


class Pipeline:
    """One stage of a model, `net` (Narayanan et al. 2021, sec. 2.2).

    The first is called with a micro-batch's inputs, the others with what the stage
    before sends, the last one with the targets too: it returns a loss.

    shape: of the float32 activations between stages, for one micro-batch.
    most: micro-batches that were under way here at once.
    """

    def __init__(
        self, net: DataParallel, group: comm.Group, shape: Sequence[int]
    ) -> None:
        self.net, self.group, self.shape = net, group, tuple(shape)
        self.place, self.stages = group.rank, group.size
        self.last, self.most = self.place == self.stages - 1, 0
        self.kept: deque[tuple[Tensor | None, Tensor]] = deque()

    def backward(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Gradients of the mean loss, which the last stage returns (else 0).

        Forwards until the stages behind are busy, then 1F1B.
        """
        count, loss = len(batches), 0.0
        ahead = min(self.stages - 1 - self.place, count)
        x = self._swap(-1, None, True)
        for i, batch in enumerate(batches):
            y, more = self._forward(x, batch, count), i + 1 < count
            if i < ahead:
                self._swap(+1, y, False)
                x = self._swap(-1, None, more)
            else:
                loss += y.item() if self.last else 0.0
                grad = self._swap(+1, y, True)
                x = self._swap(-1, self._back(grad), more)
        for _ in range(ahead):
            grad = self._swap(+1, None, True)
            self._swap(-1, self._back(grad), False)
        return loss

    def _forward(
        self, x: Tensor | None, batch: tuple[Tensor, Tensor], count: int
    ) -> Tensor:
        inputs = batch[0] if x is None else x.requires_grad_()
        if self.last:
            y: Tensor = self.net(inputs, batch[1]) / count
        else:
            y = self.net(inputs)
        self.kept.append((x, y))
        self.most = max(self.most, len(self.kept))
        return y

    def _back(self, grad: Tensor | None) -> Tensor | None:
        """Of the oldest micro-batch; the step reduces what is not sharded."""
        x, y = self.kept.popleft()
        sharded = self.net.plan.gradients.sharded
        with nullcontext() if sharded else self.net.no_sync():
            self.net.backward(y if grad is None else (y * grad).sum())
        return None if x is None else x.grad

    def _swap(self, side: int, out: Tensor | None, expects: bool) -> Tensor | None:
        """Send to a neighbour and receive from it at the same time.

        `side`: +1 is the next stage, -1 the one before. The ends have only
        one neighbour: nothing is done. Returns what arrives, if `expects`.
        """
        peer = self.place + side
        if not 0 <= peer < self.stages:
            return None
        arrives = torch.empty(self.shape, device=device()) if expects else None
        sends = {} if out is None else {peer: out.detach().contiguous()}
        receives = {} if arrives is None else {peer: arrives}
        with comm.phase(unit="pipeline"):
            for t in sends.values():
                comm.enter("send", t, t.numel(), self.group)
            comm.exchange(sends, receives, group=self.group)()
        return arrives
