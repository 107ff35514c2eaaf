"""Whether a checkpoint fits a net, and where its parameters are in there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .run_state import flats_of, tied_names
from ..zero.data_parallel import DataParallel
from ..zero.flat_buffer import Flat, Slot
from .manifest import SavedFlat, SavedSlot
from .encoding import DTYPES, dtype_name
from .reader import SavedRun

Place = tuple[SavedFlat, SavedSlot]


class Match:
    """Which saved buffer has each parameter; and what does not fit.

    `found`: where the elements of each slot are. `problems`: sentences.
    """

    def __init__(self, net: DataParallel, run: SavedRun, strict: bool) -> None:
        self.problems: list[str] = []
        self.found: dict[Slot, Place] = {}
        places: dict[str, Place] = {
            slot.name: (flat, slot) for flat in run.index.flats for slot in flat.slots
        }
        for name, first in run.index.tied.items():
            places[name] = places[first]
        names: dict[str, list[str]] = {}
        for name, first in tied_names(net).items():
            names.setdefault(first, []).append(name)
        known = set()
        for _, _, flat in flats_of(net):
            for slot in flat.slots:
                aliases = [slot.name, *names.get(slot.name, [])]
                known.update(aliases)
                self._find(slot, [n for n in aliases if n in places], places)
        if strict:
            missing = {n for n in known if n not in places}
            self._names("parameter", missing, places.keys() - known)

    def _find(self, slot: Slot, names: list[str], places: dict[str, Place]) -> None:
        if not names:
            return
        if any(places[n][1] is not places[names[0]][1] for n in names):
            self.problems.append(
                f"{' and '.join(map(repr, names))} are one parameter here, "
                "and not in the checkpoint"
            )
        what, (flat, saved) = f"parameter {names[0]!r}", places[names[0]]
        self.shape(what, slot.shape, saved.shape)
        self.kind(what, slot.parameter.dtype, DTYPES[flat.dtype])
        self.found[slot] = flat, saved

    def shape(self, what: str, here: Iterable[int], there: Iterable[int]) -> None:
        """Compare two shapes."""
        if tuple(here) != tuple(there):
            self.problems.append(
                f"{what} has shape {tuple(here)} here and {tuple(there)} in "
                "the checkpoint"
            )

    def kind(self, what: str, here: torch.dtype, there: torch.dtype) -> None:
        """Values may be rounded, but not become another kind of number."""
        same = here.is_complex == there.is_complex
        if not same or here.is_floating_point != there.is_floating_point:
            self.problems.append(
                f"{what} is {dtype_name(here)} here and {dtype_name(there)} "
                "in the checkpoint"
            )

    def _names(self, kind: str, missing: set[str], further: set[str]) -> None:
        for names, where in (
            (missing, "is not in the checkpoint"),
            (further, "of the checkpoint is not in the model"),
        ):
            listed = sorted(names)
            self.problems += [f"{kind} {n!r} {where}" for n in listed[:5]]
            if listed[5:]:
                self.problems.append(f"the same of {len(listed) - 5} more")

    def modules(
        self,
        here: dict[str, Any],
        buffers: dict[str, list[Any]],
        others: Iterable[str],
        strict: bool,
    ) -> None:
        """Compare buffers, and what else modules keep."""
        for name, (dtype, shape) in buffers.items():
            if isinstance(here.get(name), Tensor):
                what = f"buffer {name!r}"
                self.shape(what, here[name].shape, shape)
                self.kind(what, here[name].dtype, DTYPES[dtype])
        if strict:
            there = {*buffers, *others}
            self._names("buffer", here.keys() - there, there - here.keys())

    def optimizer(self, net: DataParallel, run: SavedRun) -> None:
        """Compare the optimizers, and that nothing is in another group."""
        mine, index = net.optimizer, run.index
        if type(mine).__name__ != index.optimizer:
            self.problems.append(
                f"the optimizer is {type(mine).__name__} here and was {index.optimizer}"
            )
        if len(mine.param_groups) != len(index.groups):
            self.problems.append(
                f"the optimizer has {len(mine.param_groups)} groups here and "
                f"had {len(index.groups)}"
            )
        for _, _, flat in flats_of(net):
            for slot in flat.slots if flat.trainable else ():
                if slot in self.found:
                    saved, _ = self.found[slot]
                    self._group(slot.name, flat.group, saved)
            self._same_steps(flat)

    def _group(self, name: str, group: int | None, saved: SavedFlat) -> None:
        if not saved.trainable:
            self.problems.append(
                f"parameter {name!r} is trained here and was frozen, so it "
                "has no optimizer state; load with optimizer=False "
                "(of an engine: load_optimizer_states=False)"
            )
        elif saved.group != group:
            self.problems.append(
                f"parameter {name!r} is in group {group} of the optimizer "
                f"here and was in group {saved.group}"
            )

    def _same_steps(self, flat: Flat) -> None:
        found = [s for s in flat.slots if s in self.found and s.numel]
        saved = [self.found[s][0] for s in found]
        kinds = {(*f.states, str(f.scalars)) for f in saved if f.trainable}
        if flat.trainable and len(kinds) > 1:
            names = ", ".join(repr(slot.name) for slot in flat.slots[:3])
            self.problems.append(
                f"the parameters {names}... share a buffer here, and have "
                "made different steps; keep the `units` of the saved run"
            )
