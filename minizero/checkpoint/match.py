"""What a checkpoint has for a net, and what of it does not fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..zero.data_parallel import DataParallel
from ..zero.flat_buffer import Flat, Slot
from .encoding import DTYPES, dtype_name
from .manifest import SavedFlat
from .reader import SavedRun
from .resharding import Place
from .run_state import flats_of, tied_names

Number = int | float | Tensor


class Match:
    """Which saved buffer has each parameter of a net; and what does not fit.

    `found`: where each slot was saved. `problems`: sentences.
    """

    def __init__(self, net: DataParallel, run: SavedRun, strict: bool) -> None:
        self.net, self.run, self.strict = net, run, strict
        self.problems: list[str] = []
        self.found: dict[Slot, Place] = {}
        saved: dict[str, Place] = {
            slot.name: (flat, slot) for flat in run.index.flats for slot in flat.slots
        }
        saved |= {name: saved[first] for name, first in run.index.tied.items()}
        names: dict[str, list[str]] = {}
        for name, first in tied_names(net).items():
            names.setdefault(first, [first]).append(name)
        known: set[str] = set()
        for *_, flat in flats_of(net):
            for slot in flat.slots:
                aliases = names.get(slot.name, [slot.name])
                known.update(aliases)
                self._find(slot, {n: saved[n] for n in aliases if n in saved})
        self._names("parameter", known, saved)

    def _find(self, slot: Slot, named: dict[str, Place]) -> None:
        if not named:
            return
        name, (flat, saved) = next(iter(named.items()))
        if any(other is not saved for _, other in named.values()):
            self.problems.append(
                f"{' and '.join(map(repr, named))} are one parameter here, and not in "
                "the checkpoint"
            )
        dtype = slot.parameter.dtype
        self._same(f"parameter {name!r}", slot.shape, saved.shape, dtype, flat.dtype)
        self.found[slot] = flat, saved

    def _same(
        self,
        what: str,
        a: Iterable[int],
        b: Iterable[int],
        here: torch.dtype,
        kind: str,
    ) -> None:
        """Compare shapes, and kinds of numbers: a value may only be rounded."""
        if tuple(a) != tuple(b):
            self.problems.append(
                f"{what} has shape {tuple(a)} here and {tuple(b)} in the checkpoint"
            )
        there = DTYPES[kind]
        same = here.is_floating_point == there.is_floating_point
        if not same or here.is_complex != there.is_complex:
            self.problems.append(
                f"{what} is {dtype_name(here)} here and {kind} in the checkpoint"
            )

    def _names(self, kind: str, here: Iterable[str], there: Iterable[str]) -> None:
        for names, where in (
            ({*here} - {*there}, "is not in the checkpoint"),
            ({*there} - {*here}, "of the checkpoint is not in the model"),
        ):
            if self.strict:
                listed = sorted(names)
                self.problems += [f"{kind} {n!r} {where}" for n in listed[:5]]
                if listed[5:]:
                    self.problems.append(f"the same of {len(listed) - 5} more")

    def modules(self, here: dict[str, Any], others: Iterable[str]) -> None:
        """Compare buffers, and what else modules keep."""
        buffers = self.run.index.buffers
        for name, saved in buffers.items():
            mine = here.get(name)
            if isinstance(mine, Tensor):
                what = f"buffer {name!r}"
                self._same(what, mine.shape, saved.shape, mine.dtype, saved.dtype)
        self._names("buffer", here, {*buffers, *others})

    def groups(self, saved: Any) -> list[dict[str, Any]]:
        """Compare the optimizers; the options that each group has saved."""
        mine, was = self.net.optimizer, self.run.index.optimizer
        groups = saved if isinstance(saved, list) else []
        if type(mine).__name__ != was:
            self.problems.append(
                f"the optimizer is {type(mine).__name__} here and was {was}"
            )
        if len(mine.param_groups) != len(groups):
            self.problems.append(
                f"the optimizer has {len(mine.param_groups)} groups here and had "
                f"{len(groups)}"
            )
        for number, (group, options) in enumerate(
            zip(mine.param_groups, groups, strict=False)
        ):
            if not isinstance(options, dict) or "params" in options:
                self.problems.append(f"group {number} of the optimizer has no options")
                return []
            self.problems += [
                f"option {key!r} of group {number} is {value!r}, which is no number"
                for key, value in options.items()
                if isinstance(group.get(key), Number) and not isinstance(value, Number)
            ]
        return groups

    def states(self, flat: Flat) -> SavedFlat | None:
        """A saved buffer whose states this one's are to be like."""
        found = [s for s in flat.slots if s in self.found and s.numel]
        for slot in found:
            self._group(slot.name, flat.group, self.found[slot][0])
        saved = [self.found[slot][0] for slot in found]
        kinds = {(*f.states, str(f.scalars)) for f in saved if f.trainable}
        if len(kinds) > 1:
            names = ", ".join(repr(slot.name) for slot in flat.slots[:3])
            self.problems.append(
                f"the parameters {names}... share a buffer here, and have made "
                "different steps; keep the `units` of the saved run"
            )
        return saved[0] if saved else None

    def _group(self, name: str, group: int | None, saved: SavedFlat) -> None:
        if not saved.trainable:
            self.problems.append(
                f"parameter {name!r} is trained here and was frozen, so it has no "
                "optimizer state; load with optimizer=False (of an engine: "
                "load_optimizer_states=False)"
            )
        elif saved.group != group:
            self.problems.append(
                f"parameter {name!r} is in group {group} of the optimizer here and "
                f"was in group {saved.group}"
            )
