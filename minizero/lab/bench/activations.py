"""A step with activations kept, computed again, and sent to the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from minizero.activations.recompute import Recompute, recompute_units
from minizero.activations.stores import Offloaded
from minizero.lab.bench.runner import Comparison, interleaved
from minizero.lab.models.activations import step_flops
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.ranks.launch import device

CONFIG = GPTConfig(layers=6, hidden=128, heads=4, sequence=128)
BATCH = 4
CASES: dict[str, Callable[[], Recompute]] = {
    "none": lambda: Recompute("none"),
    "selective": lambda: Recompute("selective"),
    "full": lambda: Recompute("full"),
    "full, offloaded": lambda: Recompute("full", Offloaded()),
    "none, offloaded": lambda: Recompute("none", Offloaded()),
}


def compare(repeats: int) -> list[Comparison]:
    """Seconds of a forward and backward of each choice, against keeping everything.

    The bound of full checkpointing is loose: its operations grow by 1.22.
    """
    x = torch.randint(CONFIG.vocabulary, (BATCH, CONFIG.sequence), device=device())
    steps = {name: _step(how(), x) for name, how in CASES.items()}
    seconds = interleaved(steps, repeats)
    grown = step_flops(CONFIG, BATCH, "full") / step_flops(CONFIG, BATCH)
    return [
        Comparison(
            f"step, activations {name}",
            "s",
            name,
            "none",
            seconds[name],
            seconds["none"],
            at_most=1.5 * grown if name == "full" else None,
        )
        for name in CASES
        if name != "none"
    ]


def _step(how: Recompute, x: torch.Tensor) -> Callable[[], float]:
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device())
    recompute_units(model, how)

    def step() -> float:
        start = time.perf_counter()
        model(x, x).backward()
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return step
