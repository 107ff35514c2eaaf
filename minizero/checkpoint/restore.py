"""A checkpoint into a net: first compared, then read, then published."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..memory import labels
from ..ranks.launch import rank, world_size
from ..zero.data_parallel import DataParallel
from ..zero.elementwise import state_made
from ..zero.flat_buffer import Flat, Slot
from ..zero.owned import Owned
from .directory import ASIDE
from .encoding import DTYPES, dtype_name
from .manifest import SavedFlat
from .reader import SavedRun
from .resharding import Place, places
from .run_state import (
    flats_of,
    is_elementwise,
    module_state,
    set_random_states,
    tied_names,
)
from .tensor_file import CheckpointError


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
        for _, _, flat in flats_of(net):
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
        for name, (dtype, shape) in buffers.items():
            mine = here.get(name)
            if isinstance(mine, Tensor):
                self._same(f"buffer {name!r}", mine.shape, shape, mine.dtype, dtype)
        self._names("buffer", here, {*buffers, *others})

    def optimizer(self) -> None:
        """Compare the optimizers, and that nothing is in another group."""
        mine, index = self.net.optimizer, self.run.index
        if type(mine).__name__ != index.optimizer:
            self.problems.append(
                f"the optimizer is {type(mine).__name__} here and was {index.optimizer}"
            )
        if len(mine.param_groups) != len(index.groups):
            self.problems.append(
                f"the optimizer has {len(mine.param_groups)} groups here and had "
                f"{len(index.groups)}"
            )
        for _, _, flat in flats_of(self.net):
            if not flat.trainable:
                continue
            for slot in flat.slots:
                if slot in self.found:
                    self._group(slot.name, flat.group, self.found[slot][0])
            kinds = {
                (*f.states, str(f.scalars)) for f in self.saved(flat) if f.trainable
            }
            if len(kinds) > 1:
                names = ", ".join(repr(slot.name) for slot in flat.slots[:3])
                self.problems.append(
                    f"the parameters {names}... share a buffer here, and have made "
                    "different steps; keep the `units` of the saved run"
                )

    def saved(self, flat: Flat) -> list[SavedFlat]:
        """The saved buffers that have elements of a buffer."""
        found = [s for s in flat.slots if s in self.found and s.numel]
        return [self.found[slot][0] for slot in found]

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


@dataclass
class Loaded:
    """What `load` found: `own` is None on another number of ranks."""

    path: Path
    tag: str
    extra: dict[str, Any]
    own: dict[str, Any] | None


class Restore:
    """A checkpoint on its way into a net; the net is changed by `apply` only."""

    def __init__(
        self, net: DataParallel, run: SavedRun, strict: bool, optimizer: bool
    ) -> None:
        self.net, self.run, self.optimizer = net, run, optimizer
        index = run.index
        self.same_ranks = index.world_size == world_size()
        self.source = rank() if self.same_ranks else 0
        self.own = run.own(self.source)
        self.extra = run.tree(index.extra)
        self.match = match = Match(net, run, strict)
        self.modules = module_state(net)
        match.modules(self.modules, self.own["modules"])
        if optimizer:
            match.optimizer()
            self.groups = run.tree(index.groups)
            self.precision = run.tree(index.precision)
        if match.problems:
            raise CheckpointError(
                f"{run.path}: this checkpoint does not fit: "
                + "; ".join(match.problems)
            )

    def loaded(self) -> Loaded:
        """The part of the checkpoint that is the caller's."""
        own = self.own["own"] if self.same_ranks else None
        aside = ASIDE.fullmatch(self.run.path.name)
        tag = aside["tag"] if aside else self.run.path.name
        return Loaded(self.run.path, tag, self.extra, own)

    def apply(self) -> None:
        """Read what becomes this rank's; no rank waits for another."""
        net = self.net
        if self.optimizer:
            self._load_groups()
        for _, _, flat in flats_of(net):
            for owned in self._shards(flat) if flat.numel else ():
                self._load_values(flat, owned)
                if flat.trainable and self.optimizer:
                    self._load_states(flat, owned)
        self._load_modules()
        if self.optimizer:
            self._load_precision()

    def publish(self) -> None:
        """Let the other ranks have what they keep of the shards."""
        net = self.net
        for unit in net.units:
            net.release(unit)  # what is whole has the old values
            net.updated([unit])
        net.finish()
        net.zero_grad()
        if self.optimizer and self.same_ranks:
            set_random_states(self.own["random"])

    def _shards(self, flat: Flat) -> list[Owned]:
        """The shards to be read: of what nobody would send, all."""
        if flat.trainable or self.net.plan.parameters.sharded:
            return self.net.owned_states(flat)
        shards = enumerate(flat.shards(flat.full))
        return [Owned(flat, i, shard, shard, shard) for i, shard in shards]

    def _read(
        self,
        flat: Flat,
        owned: Owned,
        state: str | None,
        before: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """A shard, in host memory: of the values, or of a state.

        What the checkpoint does not have is as `before`.
        """
        found = self.match.found
        with labels.host_memory():
            room = torch.zeros(flat.size, dtype=dtype)
        labels.label(room, "buffers", on="cpu")
        if before is not None and any(slot not in found for slot in flat.slots):
            room.copy_(self.net.home.fetch(before))
        for (saved, slot), skip, a, b in places(flat, owned.index, found):
            self.run.read(saved, state, slot.offset + skip, room[a:b])
        return room

    def _load_values(self, flat: Flat, owned: Owned) -> None:
        values = self._read(flat, owned, None, owned.master, owned.master.dtype)
        self.net.home.write_back(owned.shard, values)
        if owned.master is not owned.shard:
            self.net.home.write_back(owned.master, values)

    def _load_states(self, flat: Flat, owned: Owned) -> None:
        """Set the states as this optimizer would have made them."""
        saved = self.match.saved(flat)
        if not saved:
            return
        assert flat.group is not None
        group = self.net.optimizer.param_groups[flat.group]
        made = state_made(self.net.optimizer, group, owned.given)
        for key in owned.state.keys() - saved[0].states.keys():
            del owned.state[key]
        for key, dtype in saved[0].states.items():
            like = made.get(key)
            kind = like.dtype if isinstance(like, Tensor) else DTYPES[dtype]
            self._load_state(flat, owned, key, kind)
        for key, tree in saved[0].scalars.items():
            value = _as(self.run.tree(tree), made.get(key))
            if isinstance(value, Tensor):
                on = "cpu" if labels.on_host(owned.given) else None
                labels.label(value, "optimizer", on)
            owned.state[key] = value

    def _load_state(
        self, flat: Flat, owned: Owned, key: str, dtype: torch.dtype
    ) -> None:
        """Set one state, where there is one already in its place."""
        home, old = self.net.home, owned.state.get(key)
        if not is_elementwise(old, owned.shard) or old.dtype is not dtype:
            old = None
        room = self._read(flat, owned, key, old, dtype)
        if old is not None:
            home.write_back(old, room)
        elif home.plan.optimizer.on != "device":
            owned.state[key] = home.store(room, "optimizer")
        else:
            near = torch.empty(room.shape, dtype=dtype, device=flat.full.device)
            owned.state[key] = labels.label(near.copy_(room), "optimizer", on="device")

    def _load_groups(self) -> None:
        groups = zip(self.net.optimizer.param_groups, self.groups, strict=True)
        for group, saved in groups:
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(float(value))  # a graph may hold it
                else:
                    group[key] = value

    def _load_modules(self) -> None:
        modules = dict(self.net.model.named_modules())
        for name, value in self.modules.items():
            if isinstance(value, Tensor):
                if name in self.run.index.buffers:
                    value.copy_(self.run.tensor(f"buffers/{name}", self.source))
            elif name in self.own["modules"]:
                path = name.rpartition(".")[0]
                modules[path].set_extra_state(self.own["modules"][name])

    def _load_precision(self) -> None:
        """Take over what this precision has too.

        A loss scale of another kind, or of a run that had none, is of no use here:
        this one's starts as it was made.
        """
        mine = self.net.precision.state_dict()
        state = {k: self.precision.get(k, mine[k]) for k in mine}
        here, there = mine.get("loss_scale"), self.precision.get("loss_scale")
        if not here or not there or here.keys() != there.keys():
            if there and rank() == 0:
                warnings.warn(
                    f"{self.run.path}: the loss scale that was saved is not taken "
                    "over; this run's precision has "
                    f"{'one of another kind' if here else 'none'}",
                    stacklevel=2,
                )
            if "loss_scale" in mine:
                state["loss_scale"] = here
        self.net.precision.load_state_dict(state)


def _as(value: Any, example: Any) -> Any:
    """A scalar state in the dtype, and where, the optimizer has it."""
    if isinstance(example, Tensor):
        return torch.full_like(example, value)
    if isinstance(value, Tensor) and isinstance(example, int | float):
        return type(example)(value.item())
    return value
