"""Trainings on real ranks that exercises are graded on, and what is seen of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from minizero import Tracker, comm, launch
from minizero.memory.labels import labelled_bytes
from minizero.overlap.simulator import Buffer, Layer
from minizero.ranks import RankError, rank

from .exercise import BITS

PATIENCE = 60  # seconds without progress after which ranks count as hanging


class Odd(nn.Module):
    """A net whose widths divide by few numbers; a layer of it is never used."""

    def __init__(self, width: int, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)
        )
        self.unused = nn.Linear(width, 3)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def rows(width: int, step: int, micro: int) -> Tensor:
    """The input of this rank for one micro-batch."""
    seed = 1000 * step + 10 * micro + 100_000 * rank()
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


def digest(tensors: Any) -> str:
    """Equal for equal bits: of a dict of tensors, or of some tensors in order."""
    named = sorted(tensors.items()) if isinstance(tensors, dict) else enumerate(tensors)
    found = hashlib.sha256()
    for name, tensor in named:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        data = torch.empty(tensor.numel(), dtype=tensor.dtype)
        data.copy_(tensor.detach().flatten())
        found.update(data.view(torch.uint8).numpy().tobytes())
    return BITS + found.hexdigest()[:16]


def train(
    make: Callable[..., Any],
    width: int,
    micro: int = 1,
    steps: int = 2,
    clip: float = 0,
    look: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train the odd net on this rank; `look` measures the bytes as well.

    Returns:
        Calls and elements sent of the last step, bytes of each category between steps
        and at most, digests of losses, norms and weights.
    """
    model = Odd(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    net = make(model, optimizer, **options)
    losses, norms, tracker = [], [], Tracker()
    for step in range(steps):
        tracker = Tracker()
        watched = tracker if look else nullcontext()  # it takes a third of the time
        with comm.algorithm("direct"), comm.ledger() as calls, watched:
            for i in range(micro):
                loss = net(rows(width, step, i))
                net.backward(loss / micro)
                losses.append(loss.detach())
            if clip:
                norms.append(net.clip_grad_norm(clip))
            net.step()
    stored = labelled_bytes()
    full = net.state_dict()
    found = {
        "calls": table(calls),
        "elements sent": calls.sent(),
        "losses": digest(losses),
        "gradient norms": digest(norms),
        "weights": digest(full) if rank() == 0 else "",
    }
    if look:
        kept = ("parameters", "gradients", "optimizer")
        found |= {f"bytes of {name}": stored.get(name, 0) for name in kept}
        found["most bytes of parameters"] = tracker.peaks["parameters"]
    return found


def table(calls: comm.Ledger) -> dict[str, list[int]]:
    """Calls and elements sent of each op."""
    ops = sorted({call.op for call in calls})
    return {op: [len(calls.select(op)), calls.sent(op)] for op in ops}


def seen_on(ranks: int, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """What rank 0 saw of a training, and whether the last rank saw the same."""
    first, *_, last = every = launch(function, ranks, *args, timeout=PATIENCE, **how)
    alone = {"weights", "losses"}
    shared = [{k: v for k, v in r.items() if k not in alone} for r in (first, last)]
    return first | {"all ranks agree": len(every) == ranks and shared[0] == shared[1]}


def kills(
    ranks: int, test: Callable[..., Any], original: Any, mutant: Any
) -> dict[str, bool]:
    """Whether a student's test passes on the original and fails on a mutant of it.

    `ranks`: on which the test runs; 0 is this process alone.
    """
    passes = not fails(ranks, test, original)
    found = {"passes on the original": passes}
    return found | {"fails on the mutant": fails(ranks, test, mutant)}


@cache
def fails(ranks: int, test: Callable[..., Any], what: Any) -> bool:
    """Whether a test fails on some rank; once for the cases of one answer."""
    try:
        if ranks:
            launch(test, ranks, what, timeout=PATIENCE)
        else:
            test(what)
    except (AssertionError, RankError) as error:
        if isinstance(error, RankError) and "AssertionError" not in str(error):
            raise
        return True
    return False


def layers(sizes: list[int], tokens: int, flops: float) -> list[Layer]:
    """Units of so many parameters in bf16, for the simulator; the root first."""
    return [
        Layer(
            f"{i}",
            [Buffer(size, itemsize=2)],
            forward=2 * size * tokens / flops,
            backward=4 * size * tokens / flops,
        )
        for i, size in enumerate(sizes)
    ]
