"""Bytes of model state that ranks hold, recorded for the memory explorer.

`python tests/bench/held.py` trains a GPT for a step on 1, 2 and 4 ranks under each
stage, in bf16 with Adam, and writes the explorer's `measured.csv`. It takes 12 GB.
"""

from __future__ import annotations

import csv
from pathlib import Path

import torch

import minizero.lab.explorables.memory as explorer
from minizero import Plan, launch, parallelize
from minizero.lab.models.gpt import GPT, GPTConfig, count_parameters
from minizero.memory.labels import labelled_bytes
from minizero.precision import MixedPrecision

# GPT-2's smallest, on short sequences: they do not change the state
CONFIG = GPTConfig(layers=12, hidden=768, heads=12, sequence=8, vocabulary=50_257)


def held(stage: int) -> dict[str, int]:
    """Bytes of each category on this rank after a step."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    precision = MixedPrecision(torch.bfloat16)
    net = parallelize(model, optimizer, Plan.stage(stage), precision=precision)
    tokens = torch.randint(CONFIG.vocabulary, (1, CONFIG.sequence))
    net.backward(net(tokens, tokens))
    net.step()
    return {name: labelled_bytes()[name] for name in explorer.STATES}


if __name__ == "__main__":
    path = Path(explorer.__file__).with_name("measured.csv")
    with path.open("w", encoding="utf-8", newline="") as file:
        names = ["n_params", "world_size", "stage", *explorer.STATES]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for ranks in (1, 2, 4):
            for stage in range(4):
                base = {"world_size": ranks, "stage": stage}
                base["n_params"] = count_parameters(CONFIG)
                writer.writerow(base | launch(held, ranks, stage)[0])
