"""The real engine's step as one rank of many, on tensors without memory."""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._pytree import tree_map_only

from .. import comm
from ..comm.ledger import Ledger
from ..engine import Engine, initialize
from ..memory.live_bytes import Seen
from ..memory.tracker import Tracker
from .rehearsal import rehearsal

_ENGINE = [p for p in Path(__file__).parents[1].iterdir() if p.name != "lab"]
_LIBRARIES = tuple(map(str, (Path(os.__file__).parent, *_ENGINE)))
_SITE = os.sep + "site-packages" + os.sep
# a model all the same
_MODELS = str(Path(__file__).with_name("decoder.py"))


def _line() -> str:
    """The innermost line under way that is not torch's or the engine's."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        theirs = name.startswith(("<", *_LIBRARIES)) or _SITE in name
        if name == _MODELS or not theirs:
            cell = "ipykernel" in name
            return "a cell" if cell else f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Witness(Tracker):
    """A tracker of storages without memory that remembers who made them.

    `lines`: bytes live at the peak, by category and the line of the model that
    made them; in backward, by the operation of autograd.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, str, int]] = []
        self._made: dict[int, str] = {}
        self._top = self._peak_at = 0

    def see(self, storage: UntypedStorage, category: str | None = None) -> None:
        if storage.device.type == "meta":  # another tensor is no part of it
            super().see(storage, category)

    def changed(self, storage: UntypedStorage, before: Seen, after: Seen) -> None:
        key = storage._cdata
        if key not in self._made:
            node = torch._C._current_autograd_node()
            name = "" if node is None else f"backward of {node.name()}"
            self._made[key] = _line() or name
        for seen, sign in ((before, -1), (after, 1)):
            if not seen.host:
                event = seen.category, self._made[key], sign * seen.nbytes
                self._events.append(event)
        if self.total > self._top:
            self._top, self._peak_at = self.total, len(self._events)
        super().changed(storage, before, after)

    def forget(self, key: int) -> None:
        seen = self.seen.get(key)
        if seen is not None and not seen.host:
            event = seen.category, self._made.pop(key, ""), -seen.nbytes
            self._events.append(event)
        super().forget(key)

    @property
    def lines(self) -> Counter[tuple[str, str]]:
        found: Counter[tuple[str, str]] = Counter()
        for category, line, nbytes in self._events[: self._peak_at]:
            found[category, line] += nbytes
        return +found


@dataclass
class DryRun:
    """What one rank would do. Bytes; on the device unless said otherwise.

    peak, peaks: at most live in a step, in all and by category. when: the last
    mark before the peak. lines: what was live then, and who made it. host: at
    most in host memory. building: at most while the engine was made. rests:
    between steps. calls: the ledger. fixes: keys of the config that would make
    it fit, and the peak with each.
    """

    world_size: int
    rank: int
    budget: float | None
    parameters: int
    peak: int
    peaks: dict[str, int]
    when: str
    lines: list[tuple[str, str, int]]
    host: int
    building: int
    rests: dict[str, int]
    calls: Ledger = field(repr=False)
    fixes: dict[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.budget is None or self.peak <= self.budget


BuildModel = Callable[[], nn.Module]


def _walk(
    build_model: BuildModel,
    config: dict[str, Any],
    world_size: int,
    batch: Any,
    device: str,
    steps: int,
    rank: int,
) -> DryRun:
    """Build, initialize, and train so many steps."""
    with rehearsal(world_size, rank, device) as mode:

        def fake(tensor: Tensor) -> Tensor:
            return mode.from_tensor(tensor, static_shapes=True)

        with Witness() as making:
            model = build_model()
            engine, *_ = initialize(model=model, config=config)
        args = tree_map_only(Tensor, fake, batch)
        with Witness() as seen, comm.ledger() as calls:
            for _ in range(steps * engine.gradient_accumulation_steps()):
                _step(engine, args)
        lines = [(*key, n) for key, n in seen.lines.most_common(5)]
        count = sum(unit_elements(engine))
        return DryRun(
            world_size, rank, None, count, seen.peak, seen.peaks, _when(seen),
            lines, seen.host_peak, making.peak, dict(seen.live), calls,
        )  # fmt: skip


def _step(engine: Engine, args: Any) -> None:
    out = engine(**args) if isinstance(args, dict) else engine(*args)
    loss = (
        out
        if isinstance(out, Tensor)
        else out[0]
        if isinstance(out, tuple)
        else out.loss
    )
    engine.backward(loss)
    engine.step()


def unit_elements(engine: Engine) -> Iterator[int]:
    """Elements of each unit, without padding."""
    for unit in engine.net.units:
        yield sum(flat.numel for flat in unit.flats)


def _when(seen: Witness) -> str:
    """The last mark before the peak."""
    mark = ""
    for sample in seen.samples:
        if sample.event:
            mark = f"{sample.event} {sample.unit}".strip()
        if sum(sample.live.values()) == seen.peak:
            break
    return mark


def dryrun(
    build_model: BuildModel,
    config: dict[str, Any],
    *,
    world_size: int,
    batch: Any,
    device: str = "cuda",
    budget: float | None = None,
    steps: int = 2,
    rank: int = 0,
) -> DryRun:
    """Train with the real engine, as one rank of many, with no hardware.

    build_model: makes the model, on the CPU; its tensors will have shapes and
        no memory. It must return a loss when it is given the batch.
    config: of `minizero.initialize`, as a dict; files of "nvme" are not played.
    batch: one rank's micro-batch: a tuple of tensors, or a dict of them.
    device: whose collectives: "cuda" for NCCL's own, "cpu" for gloo's.
    budget: bytes of the device. If the peak is above, changes of the config
        are tried, one at a time, and those that fit are in `fixes`.

    RuntimeError in a process that is a rank already; ValueError for a config
    with "nvme" or another device.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu, not {device!r}")
    zero = config.get("zero_optimization", {})
    for key in ("offload_optimizer", "offload_param"):
        if (zero.get(key) or {}).get("device") == "nvme":
            raise ValueError(
                f"zero_optimization.{key}.device is nvme, and a dry run plays no "
                "files; use cpu, which needs as much of the device"
            )

    def walk(config: dict[str, Any], batch: Any) -> DryRun:
        try:
            return _walk(build_model, config, world_size, batch, device, steps, rank)
        finally:
            gc.collect()  # an engine is a cycle, and its storages are labelled

    gc.collect()
    found = walk(config, batch)
    found.budget = budget
    if not found.fits:
        for key, other, smaller in changes(config, batch):
            try:
                peak = walk(other, smaller).peak
            except ValueError:  # this config cannot be
                continue
            if peak <= (budget or 0):
                found.fixes[key] = peak
    return found


def changes(
    config: dict[str, Any], batch: Any
) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Keys of a config that save memory, the config with each, and its batch."""
    zero = config.get("zero_optimization", {})

    def changed(section: str, **keys: Any) -> dict[str, Any]:
        other = copy.deepcopy(config)
        if section:
            other.setdefault(section, {}).update(keys)
        else:
            other.update(keys)
        return other

    stage = int(zero.get("stage", 0))
    for more in range(stage + 1, 4):
        key = f"zero_optimization.stage: {more}"
        yield key, changed("zero_optimization", stage=more), batch
    if not (config.get("bf16") or config.get("fp16") or {}).get("enabled"):
        yield "bf16.enabled: true", changed("bf16", enabled=True), batch
    size = config.get("train_micro_batch_size_per_gpu")
    if size and size % 2 == 0:
        halved = tree_map_only(Tensor, lambda t: t[: len(t) // 2], batch)
        keys = {
            "train_micro_batch_size_per_gpu": size // 2,
            "gradient_accumulation_steps": 2
            * config.get("gradient_accumulation_steps", 1),
        }
        key = f"train_micro_batch_size_per_gpu: {size // 2}, twice as many"
        yield key, changed("", **keys), halved
    cpu = {"device": "cpu"}
    if stage:
        key = "zero_optimization.offload_optimizer.device: cpu"
        off = changed("zero_optimization", offload_optimizer=cpu)
        yield key, off, batch
    both = {"offload_optimizer": cpu, "offload_param": cpu}
    key = "zero_optimization.stage: 3, and both offloads: cpu"
    yield key, changed("zero_optimization", stage=3, **both), batch
