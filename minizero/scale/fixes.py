"""Changes of a run that save memory: what may be tried when it does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..activations import recompute_units

BuildModel = Callable[[], nn.Module]
CPU = {"device": "cpu"}


@dataclass(frozen=True)
class Run:
    """What a dry run is given, and `words` for how it was changed."""

    build_model: BuildModel
    config: dict[str, Any]
    batch: Any
    words: str = ""

    @property
    def zero(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config.get("zero_optimization", {})
        return found

    @property
    def rows(self) -> int:
        """Of the micro-batch."""
        return max((len(t) for t in tree_leaves(self.batch) if t.ndim), default=1)

    def section(self, name: str, **keys: Any) -> Run:
        """With these keys in a section of the config."""
        config = copy.deepcopy(self.config)
        config[name] = (config.get(name) or {}) | keys
        return replace(self, config=config)

    def named(self, words: str) -> Run:
        return replace(self, words=", and ".join(filter(None, (self.words, words))))

    def stage(self, stage: int) -> Run:
        changed = self.section("zero_optimization", stage=stage)
        return changed.named(f"zero_optimization.stage: {stage}")

    def bf16(self) -> Run:
        return self.section("bf16", enabled=True).named("bf16.enabled: true")

    def of_rows(self, rows: int) -> Run:
        """As many rows a step, in smaller micro-batches."""
        batch = tree_map_only(Tensor, lambda t: t[:rows] if t.ndim else t, self.batch)
        config = {**self.config, "train_micro_batch_size_per_gpu": rows}
        steps = config.pop("gradient_accumulation_steps", 1) * (self.rows // rows)
        words = f"train_micro_batch_size_per_gpu: {rows}"
        if "train_batch_size" not in config:  # from which the steps would follow
            config["gradient_accumulation_steps"] = steps
            words += f" and gradient_accumulation_steps: {steps}"
        return replace(self, config=config, batch=batch).named(words)

    def without_overlap(self) -> Run:
        changed = self.section("zero_optimization", overlap_comm=False)
        return changed.named("zero_optimization.overlap_comm: false")

    def offload(self, *what: str) -> Run:
        keys = {f"offload_{part}": CPU for part in what}
        words = (f"zero_optimization.{key}.device: cpu" for key in keys)
        return self.section("zero_optimization", **keys).named(", and ".join(words))

    def recompute(self) -> Run:
        def build() -> nn.Module:
            model = self.build_model()
            recompute_units(model)
            return model

        changed = replace(self, build_model=build)
        return changed.named("in the model: minizero.activations.recompute_units")


def fewer_rows(run: Run) -> list[Run]:
    """A half of its rows, and a half of that, as long as they are even."""
    halves = takewhile(lambda n: run.rows % 2**n == 0, count(1))
    return [run.of_rows(run.rows // 2**n) for n in halves]


def changes(run: Run) -> Iterator[list[Run]]:
    """One change at a time, each with the values to try, the gentlest first."""
    stage = int(run.zero.get("stage", 0))
    yield [run.stage(more) for more in range(stage + 1, 4)]
    if not any(
        (run.config.get(kind) or {}).get("enabled") for kind in ("bf16", "fp16")
    ):
        yield [run.bf16()]
    yield fewer_rows(run)
    if stage == 3:
        yield [run.without_overlap()]
    if stage:
        yield [run.offload("optimizer")]
    at_3 = run if stage == 3 else run.stage(3)
    yield [at_3.offload("optimizer", "param")]
    yield [run.recompute()]


def everything(run: Run) -> Run:
    """Stage 3, both offloads, one row at a time, and its blocks computed again."""
    run = [run, *fewer_rows(run)][-1]
    run = run if run.zero.get("stage") == 3 else run.stage(3)
    return run.offload("optimizer", "param").recompute()
