"""The real engine's step as one rank of many, on tensors without memory."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_map_only

from .. import comm
from ..comm.ledger import Ledger
from ..engine import Engine, initialize
from ..memory.tracker import Seen
from ..memory.tracker import Tracker
from .fixes import BuildModel, Run, changes, everything
from .rehearsal import DEVICE, rehearsal

_ENGINE = [p for p in Path(__file__).parents[1].iterdir() if p.name != "lab"]
_LIBRARIES = tuple(map(str, (Path(os.__file__).parent, *_ENGINE)))
_SITE = os.sep + "site-packages" + os.sep
# a model all the same
_MODELS = str(Path(__file__).with_name("decoder.py"))


def _line() -> str:
    """The innermost line of the model that is under way; "" in backward, or a step."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code is not _walk.__code__:
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
    made them; in backward, the operation of autograd.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, str, int]] = []
        self._made: dict[int, str] = {}
        self._top = self._peak_at = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE:
            return args[0].device
        return super().__torch_dispatch__(func, types, args, kwargs)

    def see(self, storage: UntypedStorage, category: str | None = None) -> None:
        if storage.device.type == "meta":  # another tensor is no part of it
            super().see(storage, category)

    def changed(self, storage: UntypedStorage, before: Seen, after: Seen) -> None:
        key = storage._cdata
        if key not in self._made:
            node = torch._C._current_autograd_node()
            name = "" if node is None else f"backward of {node.name()}"
            self._made[key] = _line() or name or "the engine"
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
    between steps. calls: the ledger. fixes: keys of the config, each of which
    would make it fit, and the peak with it; all at once if no one does.
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


def _walk(run: Run, world_size: int, device: str, steps: int, rank: int) -> DryRun:
    """Build, initialize, and train so many steps."""
    with rehearsal(world_size, rank, device) as mode:

        def fake(tensor: Tensor) -> Tensor:
            return mode.from_tensor(tensor, static_shapes=True)

        with Witness() as making:
            model = run.build_model()
            engine, *_ = initialize(model=model, config=run.config)
        args = tree_map_only(Tensor, fake, run.batch)
        with Witness() as seen, comm.ledger() as calls:
            for _ in range(steps * engine.gradient_accumulation_steps()):
                _step(engine, args)
        lines = [(*key, n) for key, n in seen.lines.most_common(5)]
        flats = [flat for unit in engine.net.units for flat in unit.flats]
        count = sum(flat.numel for flat in flats)
        return DryRun(
            world_size, rank, None, count, seen.peak, seen.peaks, _when(seen),
            lines, seen.host_peak, making.peak, dict(seen.live), calls,
        )  # fmt: skip


def _step(engine: Engine, args: Any) -> None:
    out = engine(**args) if isinstance(args, dict) else engine(*args)
    if not isinstance(out, Tensor):
        out = out[0] if isinstance(out, tuple) else out.loss
    engine.backward(out)
    engine.step()


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
    config: of `minizero.initialize`, as a dict; files of "nvme" are not made.
    batch: one rank's micro-batch: a tuple of tensors, or a dict of them.
    device: whose collectives: "cuda" for NCCL's own, "cpu" for gloo's, between
        machines. (On one, rows above 1 MiB need no buffer to land in.)
    budget: bytes of the device. If the peak is above, changes are tried, one at a
        time, and the smallest of each kind that fits is in `fixes`.

    RuntimeError in a process that is a rank already; ValueError for another device.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu, not {device!r}")

    def walk(run: Run) -> DryRun:
        return _walk(run, world_size, device, steps, rank)

    run = Run(build_model, config, batch)
    found = walk(run)
    found.budget = budget
    if budget is None or found.fits:
        return found
    for tries in changes(run):
        found.fixes |= _first(tries, walk, budget)
    if not found.fixes:
        found.fixes |= _first([everything(run)], walk, budget)
    return found


def _first(
    tries: list[Run], walk: Callable[[Run], DryRun], budget: float
) -> dict[str, int]:
    """The first of these runs that fits, and its peak."""
    for run in tries:
        try:
            with warnings.catch_warnings():  # of configs that nobody has written
                warnings.simplefilter("ignore")
                peak = walk(run).peak
        except ValueError:  # this config, or this model, cannot be
            continue
        if peak <= budget:
            return {run.words: peak}
    return {}
