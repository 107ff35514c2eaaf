"""Bytes of model state that ranks really held, and published peaks, for the explorer.

`python -m minizero.lab.explorables.measured` trains a GPT for a step on 1, 2 and 4
ranks under each plan, in bf16 with Adam, and writes `measured.csv`. It takes 12 GB of
memory.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch

from minizero import Plan, launch, parallelize
from minizero.lab.models.gpt import GPT, GPTConfig, count_parameters
from minizero.memory.labels import labelled_bytes
from minizero.precision import MixedPrecision

FILE = Path(__file__).with_name("measured.csv")
PUBLISHED = Path(__file__).with_name("published_memory.csv")
"""Llama 3.1 8B under FSDP2, which is ZeRO-3, all in fp32 (torchtitan, benchmarks)."""
CONFIG = GPTConfig(layers=12, hidden=768, heads=12, sequence=8, vocabulary=50_257)
"""GPT-2's smallest, on short sequences: they do not change the state."""
ENDS = ("few", "many")
STATES = ("parameters", "gradients", "optimizer")


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
    return {name: labelled_bytes()[name] for name in STATES}


def rows() -> list[dict[str, int]]:
    """What `measured.csv` holds: a run of a stage in each line."""
    with FILE.open(encoding="utf-8") as file:
        return [{k: int(v) for k, v in line.items()} for line in csv.DictReader(file)]


def runs() -> list[dict[str, Any]]:
    """The runs by the number of ranks: parameters, and bytes by stage."""
    by_ranks: dict[int, dict[str, Any]] = {}
    for row in rows():
        run = by_ranks.setdefault(
            row["world_size"],
            {"world_size": row["world_size"], "n_params": row["n_params"], "held": []},
        )
        run["held"].append(sum(row[name] for name in STATES))
    return list(by_ranks.values())


def published() -> list[dict[str, Any]]:
    """Runs that were published on few GPUs and on many: a GPU's peaks in bytes.

    All else is alike, so what they differ by is model state.
    """
    with PUBLISHED.open(encoding="utf-8") as file:
        return [
            {
                "run": line["run"],
                **{name: int(line[name]) for name in ("n_params", "few", "many")},
                "peaks": [round(float(line[f"gib_{at}"]) * 2**30) for at in ENDS],
            }
            for line in csv.DictReader(file)
        ]


def main() -> None:
    """Measure all, and write the file."""
    psi = count_parameters(CONFIG)
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["n_params", "world_size", "stage", *STATES])
        writer.writeheader()
        for ranks in (1, 2, 4):
            for stage in range(4):
                found = launch(held, ranks, stage)[0]
                base = {"n_params": psi, "world_size": ranks, "stage": stage}
                writer.writerow(base | found)


if __name__ == "__main__":
    main()
