"""Trainings on real ranks that exercises are graded on, and what is seen of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import minizero
from minizero import Tracker, comm, launch, zero
from minizero.activations import recompute_units
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.lab.toygpu import ToyGPU
from minizero.memory.labels import labelled_bytes
from minizero.overlap.simulator import Buffer, Layer
from minizero.ranks import RankError, device, rank, world_size

from .exercise import BITS

PATIENCE = 60  # seconds without progress after which ranks count as hanging
SEQUENCE = 48
"""Tokens of a row of `batch`."""


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
    ranks: int, test: Callable[..., Any], make: Callable[[str], Any], mutant: str
) -> dict[str, bool]:
    """Whether a student's test passes on the original and fails on a mutant of it.

    A test must look at what its subject does. So `make(mutant)` and `make("")`, the
    original, look alike and come in any order; more than once in this process, where a
    test could count. `ranks`: on which the test runs; 0 is this process alone.
    """
    order = [mutant, ""] * (1 if ranks else 3)
    random.SystemRandom().shuffle(order)
    failed = [(name, fails(ranks, test, make(name))) for name in order]
    return {
        "passes on the original": ("", True) not in failed,
        "fails on the mutant": (mutant, False) not in failed,
    }


def fails(ranks: int, test: Callable[..., Any], what: Any) -> bool:
    """Whether a test fails on some rank."""
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


def gpt_of(layers: int, hidden: int) -> GPTConfig:
    """A GPT that is small enough for toy machines."""
    return GPTConfig(
        layers=layers, hidden=hidden, heads=hidden // 16, sequence=SEQUENCE
    )


def built(gpt: GPTConfig, config: dict[str, Any], checkpointing: str) -> Any:
    """An engine on this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(gpt.hidden)
    with zero.Init(config=config), device():
        model = GPT(gpt)
    engine, *_ = minizero.initialize(model=model, config=config)
    recompute_units(model, checkpointing)
    return engine


def batch(step: int, count: int, part: int = 0, parts: int = 1) -> Tensor:
    """This part of a step's rows; all of them are the same for any number of parts."""
    numbers = torch.Generator().manual_seed(step)
    every = torch.randint(256, (count, SEQUENCE), generator=numbers)
    return every.chunk(parts)[part]


def trained(
    gpt: GPTConfig,
    config: dict[str, Any],
    checkpointing: str,
    count: int,
    steps: int,
    save: str = "",
) -> dict[str, Any]:
    """Losses of this job's steps, and the peak of a device.

    `count`: rows of a step, on all ranks. `save`: a folder for a checkpoint at the end.
    """
    losses: list[float] = []
    with ToyGPU(1e12) as gpu:
        engine = built(gpt, config, checkpointing)
        for step in range(steps):
            mean = torch.zeros(1, device=device())
            mine = batch(step, count, rank(), world_size())
            for x in mine.split(engine.train_micro_batch_size_per_gpu()):
                loss = engine(x, x)
                engine.backward(loss)
                engine.step()
                mean += loss.detach() * len(x) / count
            comm.all_reduce(mean)
            losses.append(mean.item())
    if save:
        engine.save_checkpoint(save)
    return {"losses": losses, "peak": gpu.peak}
