"""From the rows of a checkpoint to the rows of a net, whatever its plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minizero.checkpoint.run_state import (
    flats_of,
    is_elementwise,
    module_state,
    set_random_states,
)

from ..memory import labels
from ..zero.data_parallel import DataParallel
from ..zero.flat_buffer import Flat, Slot
from ..ranks.launch import rank, world_size
from .match import Match, Place
from ..zero.elementwise import state_made
from .encoding import DTYPES
from .reader import SavedRun
from .tensor_file import CheckpointError
from ..zero.owned import Owned


def places(
    flat: Flat, index: int, found: dict[Slot, Place]
) -> Iterator[tuple[Place, int, int, int]]:
    """Of each slot in a row: where it was saved, from which element of it
    on, and its first and last (exclusive) element in the row."""
    low, high = index * flat.size, (index + 1) * flat.size
    for slot in flat.slots:
        a, b = max(low, slot.offset), min(high, slot.offset + slot.numel)
        if a < b and slot in found:
            yield found[slot], a - slot.offset, a - low, b - low


@dataclass
class Loaded:
    """What `load` found: `own` is None on another number of ranks."""

    path: Path
    tag: str
    extra: dict[str, Any]
    own: dict[str, Any] | None


class Fit:
    """A checkpoint on its way into a net: first compared, then applied."""

    def __init__(
        self, net: DataParallel, run: SavedRun, strict: bool, optimizer: bool
    ) -> None:
        self.net, self.run, self.optimizer = net, run, optimizer
        index = run.index
        self.same_ranks = index.world_size == world_size()
        self.source = rank() if self.same_ranks else 0
        self.own = run.own(self.source)
        self.extra = run.tree(index.extra)
        match = Match(net, run, strict)
        self.found = match.found
        self.modules = module_state(net)
        match.modules(self.modules, index.buffers, self.own["modules"], strict)
        if optimizer:
            match.optimizer(net, run)
            self.groups = run.tree(index.groups)
            self.precision = run.tree(index.precision)
        if match.problems:
            raise CheckpointError(
                f"{run.path}: this checkpoint does not fit: "
                + "; ".join(match.problems)
            )

    def _load_precision(self) -> None:
        """Take over what this precision has too.

        A loss scale of another kind, or of a run that had none, is of no use
        here: this one's starts as it was made.
        """
        mine = self.net.precision.state_dict()
        state = {k: self.precision.get(k, mine[k]) for k in mine}
        here, there = mine.get("loss_scale"), self.precision.get("loss_scale")
        if not here or not there or here.keys() != there.keys():
            if there and rank() == 0:
                warnings.warn(
                    f"{self.run.path}: the loss scale that was saved is not "
                    "taken over; this run's precision has "
                    f"{'one of another kind' if here else 'none'}",
                    stacklevel=2,
                )
            if "loss_scale" in mine:
                state["loss_scale"] = here
        self.net.precision.load_state_dict(state)

    def apply(self) -> None:
        """Read what becomes this rank's; no rank waits for another."""
        net = self.net
        if self.optimizer:
            self._load_groups()
        for _, _, flat in flats_of(net):
            for owned in self._rows(flat) if flat.numel else ():
                self._load_values(flat, owned)
                if flat.trainable and self.optimizer:
                    self._load_states(flat, owned)
        self._load_modules()
        if self.optimizer:
            self._load_precision()

    def _rows(self, flat: Flat) -> list[Owned]:
        """The rows to be read: of what nobody would send, all."""
        if flat.trainable or self.net.plan.parameters.sharded:
            return self.net.owned_states(flat)
        rows = enumerate(flat.shards(flat.full))
        return [Owned(flat, i, row, row, row) for i, row in rows]

    def _read(
        self,
        flat: Flat,
        index: int,
        state: str | None,
        before: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """A row, in host memory: of the values, or of a state.

        What the checkpoint does not have is as `before`.
        """
        with labels.host_memory():
            room = torch.zeros(flat.size, dtype=dtype)
        labels.label(room, "buffers", on="cpu")
        partly = any(slot not in self.found for slot in flat.slots)
        if partly and before is not None:
            room.copy_(self.net.home.fetch(before))
        for (saved, slot), skip, a, b in places(flat, index, self.found):
            self.run.read(saved, state, slot.offset + skip, room[a:b])
        return room

    def _load_values(self, flat: Flat, owned: Owned) -> None:
        home, dtype = self.net.home, owned.master.dtype
        values = self._read(flat, owned.index, None, owned.master, dtype)
        home.write_back(owned.shard, values)
        if owned.master is not owned.shard:
            home.write_back(owned.master, values)

    def _load_states(self, flat: Flat, owned: Owned) -> None:
        """Set the states as this optimizer would have made them."""
        found = [s for s in flat.slots if s in self.found and s.numel]
        saved = [self.found[slot][0] for slot in found]
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
        old = owned.state.get(key)
        if not is_elementwise(old, owned.shard) or old.dtype is not dtype:
            old = None
        room = self._read(flat, owned.index, key, old, dtype)
        if old is None:
            owned.state[key] = self._rest(room, flat.full.device)
        else:
            self.net.home.write_back(old, room)

    def _rest(self, room: Tensor, device: torch.device) -> Tensor:
        home = self.net.home
        if home.plan.optimizer.on != "device":
            return home.store(room, "optimizer")
        near = torch.empty(room.shape, dtype=room.dtype, device=device)
        return labels.label(near.copy_(room), "optimizer", on="device")

    def _load_groups(self) -> None:
        for group, saved in zip(
            self.net.optimizer.param_groups, self.groups, strict=True
        ):
            for key, value in saved.items():
                old = group.get(key)
                if isinstance(old, Tensor):
                    old.fill_(float(value))  # a graph may hold it
                else:
                    group[key] = value

    def _load_modules(self) -> None:
        modules = dict(self.net.model.named_modules())
        for name, value in self.modules.items():
            if isinstance(value, Tensor):
                if name in self.run.index.buffers:
                    saved = self.run.tensor(f"buffers/{name}", self.source)
                    value.copy_(saved)
            elif name in self.own["modules"]:
                path = name.rpartition(".")[0]
                modules[path].set_extra_state(self.own["modules"][name])

    def publish(self) -> None:
        """Let the other ranks have what they keep of the rows."""
        net = self.net
        for unit in net.units:
            net.release(unit)  # what is whole has the old values
            net.publish(unit)
        net.finish()
        net.zero_grad()
        if self.optimizer and self.same_ranks:
            set_random_states(self.own["random"])

    def loaded(self) -> Loaded:
        """The part of the checkpoint that is the caller's."""
        own = self.own["own"] if self.same_ranks else None
        path = self.run.path
        return Loaded(path, path.name, self.extra, own)


def _as(value: Any, example: Any) -> Any:
    """A scalar state in the dtype, and where, the optimizer has it."""
    if isinstance(example, Tensor):
        return torch.full_like(example, value)
    if isinstance(value, Tensor) and isinstance(example, int | float):
        return type(example)(value.item())
    return value
