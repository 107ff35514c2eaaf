"""A training script as users of DeepSpeed write it.

    torchrun --nproc_per_node 2 tests/parity/script.py deepspeed adam-2 sgd-3
    torchrun --nproc_per_node 2 tests/parity/script.py minizero adam-2 sgd-3

The first argument is the only difference: which module is `deepspeed` below. Rank 0
prints what was seen of each case, as a line of JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, LENGTH = 23, 16, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A tied head, and a table that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(LENGTH, HIDDEN).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.3)

    def forward(self, x: Tensor, y: Tensor, gain: float = 1.0) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(LENGTH, device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h)).float()
        return gain * F.cross_entropy(logits.flatten(0, 1), y.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


class Text(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples of tokens, and what follows them: mostly what a rule says."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(5)
        columns = [torch.randint(VOCABULARY, (size,), generator=generator)]
        for _ in range(LENGTH):
            noise = torch.rand(size, generator=generator) < 0.1
            columns.append((5 * columns[-1] + 2 + noise) % VOCABULARY)
        self.tokens = torch.stack(columns, 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


def number(value: Any) -> float | None:
    """A number for JSON, of a number or a tensor that has one."""
    if isinstance(value, Tensor):
        value = value.detach().norm()
    return None if value is None else float(value)


def train(deepspeed: Any, case: dict[str, Any]) -> dict[str, list[Any]]:
    """Train as the case says, and write down what happens at every step.

    `case`: `config`; `steps`; `groups`: several parameter groups; `client`: an
    optimizer and a scheduler of the script's own; `loader`: the engine's data loader;
    `poison`: steps at which the loss is multiplied until gradients overflow; `views`:
    steps at which each gradient and parameter is looked at; `rates`: learning rates
    that are set by hand, by step; `held`: micro-batches of a step, beyond those of the
    config, whose gradients stay on their rank until the last.
    """
    torch.manual_seed(1)
    model = Model()
    parameters = groups(model) if case.get("groups") else None
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = scheduler = None
    if case.get("client"):
        optimizer = torch.optim.AdamW(parameters or trained, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    micro = case["config"]["train_micro_batch_size_per_gpu"]
    data = Text(90 if case.get("loader") else 1000)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model,
        model_parameters=parameters or trained,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        training_data=data if case.get("loader") else None,
        config=json.loads(json.dumps(case["config"])),
    )
    utils = deepspeed.utils
    repeating = loader and iter(utils.RepeatingLoader(loader))
    rank = torch.distributed.get_rank()
    ranks = torch.distributed.get_world_size()
    seen: dict[str, list[Any]] = {}

    def write(**values: Any) -> None:
        for name, value in values.items():
            seen.setdefault(name, []).append(value)

    taken = 0
    for step in range(case["steps"]):
        rate = case.get("rates", {}).get(str(step))
        for group in optimizer.param_groups if rate is not None else ():
            group["lr"] = rate
        gain = 1e30 if step in case.get("poison", []) else 1.0
        held = case.get("held", 0)
        for turn in range(held + engine.gradient_accumulation_steps()):
            if repeating:
                x, y = next(repeating)
            else:
                start = (taken * ranks + rank) * micro
                samples = [data[start + i] for i in range(micro)]
                x, y = torch.utils.data.default_collate(samples)
                taken += 1
            with engine.no_sync() if turn < held else nullcontext():
                loss = engine(x.to(engine.device), y.to(engine.device), gain=gain)
                returned = engine.backward(loss)
            write(losses=number(loss), returned=number(returned / loss.detach()))
            if turn < held:
                continue
            boundary = engine.is_gradient_accumulation_boundary()
            if boundary and step in case.get("views", []):
                write(
                    grads=[number(utils.safe_get_full_grad(p)) for p in trained],
                    params=[number(utils.safe_get_full_fp32_param(p)) for p in trained],
                )
            engine.step()
        write(
            norms=number(engine.get_global_grad_norm()),
            lrs=[float(rate) for rate in engine.get_lr()],
            moms=engine.get_mom(),
            skipped=engine.skipped_steps,
            applied=engine.was_step_applied(),
            counts=[engine.global_steps, engine.global_samples, engine.micro_steps],
            scales=number(getattr(optimizer, "loss_scale", 1.0)),
        )
    return seen


def main() -> None:
    from cases import CASES

    parser = argparse.ArgumentParser()
    parser.add_argument(
        "module", choices=["deepspeed", "minizero", "minizero.deepspeed"]
    )
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    deepspeed = importlib.import_module(options.module)
    deepspeed.init_distributed(dist_backend="gloo")
    for name in options.cases or CASES:
        case = CASES[name]
        if options.module == "minizero":
            case = {**case, **case.get("ours", {})}
        seen = train(deepspeed, case)
        if torch.distributed.get_rank() == 0:
            print(json.dumps({"case": name, "seen": seen}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
