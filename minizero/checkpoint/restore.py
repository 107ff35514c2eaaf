"""A checkpoint into a net: compared and planned, then read, then published."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.algorithms import ordered_sum
from ..memory import labels
from ..memory.bytes import host_empty
from ..ranks.launch import rank, world_size
from ..zero.data_parallel import DataParallel
from ..zero.elementwise import state_made
from ..zero.flat_buffer import Flat
from ..zero.owned import Owned
from .directory import ASIDE
from .encoding import DTYPES, dtype_name
from .manifest import SavedFlat
from .match import Match, Number
from .reader import SavedRun
from .resharding import places
from .run_state import flats_of, generators, is_elementwise
from .tensor_file import CheckpointError


@dataclass
class Loaded:
    """What `load` found.

    `own` is None on another number of ranks. `gradients`: whether the net now has those
    of a step that was under way.
    """

    path: Path
    tag: str
    extra: dict[str, Any]
    own: dict[str, Any] | None
    gradients: bool = False


@dataclass
class States:
    """What an optimizer will have for a buffer: dtypes, and values of scalars."""

    dtypes: dict[str, torch.dtype]
    scalars: dict[str, Any]


class Restore:
    """A checkpoint on its way into a net.

    Making one decodes and compares everything, and opens all files that will be read:
    it raises CheckpointError and changes nothing. `apply` and `publish` only copy.
    """

    def __init__(
        self, net: DataParallel, run: SavedRun, strict: bool, optimizer: bool
    ) -> None:
        self.net, self.run, self.optimizer = net, run, optimizer
        self.same_ranks = run.index.world_size == world_size()
        self.source = rank() if self.same_ranks else 0
        self.match = Match(net, run, strict)
        self.modules = net.module_state()
        self.states: dict[Flat, States] = {}
        self._block = torch.empty(0, dtype=torch.uint8)
        try:
            self._plan()
        except CheckpointError:
            raise
        except Exception as error:  # a value that no save has written
            raise CheckpointError(
                f"{run.path}: a saved value does not make sense ({error}); save again"
            ) from error

    def _plan(self) -> None:
        """Decode all values, compare them, and open all files that will be read."""
        net, run, match = self.net, self.run, self.match
        self.own, self.extra = run.own(self.source), run.tree(run.index.extra)
        match.modules(self.modules, self.own["modules"])
        if self.optimizer:
            self.groups = match.groups(run.tree(run.index.groups))
            saved = {f: match.states(f) for *_, f in flats_of(net) if f.trainable}
            self.precision = self._precision(run.tree(run.index.precision))
            for name, state in self.own["random"].items():
                if self.same_ranks and name in generators():
                    generators()[name].check(state)
        if match.problems:
            raise CheckpointError(
                f"{run.path}: this checkpoint does not fit: "
                + "; ".join(match.problems)
            )
        if self.optimizer:
            self.states = {f: self._states(f, was) for f, was in saved.items() if was}
        for *_, flat in flats_of(net):
            for owned in self._shards(flat):
                for (was, slot), skip, a, b in places(flat, owned.index, match.found):
                    run.open(was, slot.offset + skip, b - a)
        for number in range(run.index.world_size) if self.loaded().gradients else ():
            run.file(number)

    def loaded(self) -> Loaded:
        """The part of the checkpoint that is the caller's."""
        own = self.own["own"] if self.same_ranks else None
        aside = ASIDE.fullmatch(self.run.path.name)
        tag = aside["tag"] if aside else self.run.path.name
        gradients = self.optimizer and any(f.gradients for f in self.run.index.flats)
        return Loaded(self.run.path, tag, self.extra, own, gradients)

    def _states(self, flat: Flat, saved: SavedFlat) -> States:
        """The states as this optimizer would have made them, with the saved values."""
        assert flat.group is not None
        where = f"{self.run.path}: the optimizer's states of {flat.slots[0].name!r}"
        optimizer, given = self.net.optimizer, self.net.owned_states(flat)[0].given
        group = optimizer.param_groups[flat.group] | self.groups[flat.group]
        made = state_made(optimizer, group, given)
        kept = {*saved.states, *saved.scalars}
        if kept and not made.keys() <= kept:
            raise CheckpointError(
                f"{where} lack {', '.join(made.keys() - kept)}; save again"
            )
        dtypes = {}
        for key, name in saved.states.items():
            like = made.get(key)
            dtypes[key] = like.dtype if isinstance(like, Tensor) else DTYPES[name]
            if dtypes[key].is_floating_point != DTYPES[name].is_floating_point:
                raise CheckpointError(
                    f"{where}: {key!r} is {dtype_name(dtypes[key])} here and was {name}"
                )
        scalars = {}
        for key, tree in saved.scalars.items():
            value, like = self.run.tree(tree), made.get(key)
            if isinstance(like, Number) and not isinstance(value, Number):
                raise CheckpointError(
                    f"{where}: {key!r} is {value!r}, which is no number"
                )
            scalars[key] = _as(value, like)
        return States(dtypes, scalars)

    def _precision(self, saved: Any) -> dict[str, Any]:
        """What this precision takes over.

        A loss scale of another kind, or of a run that had none, is of no use here:
        this one's starts as it was made.
        """
        mine = self.net.precision.state_dict()
        state = {k: saved.get(k, mine[k]) for k in mine}
        here, there = mine.get("loss_scale"), saved.get("loss_scale")
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
        if not _alike(state, mine):
            self.match.problems.append(
                f"the precision's state is {state}, not as {mine}"
            )
        return state

    def apply(self) -> None:
        """Read what becomes this rank's; no rank waits for another."""
        if self.optimizer:
            self._load_groups()
        for *_, flat in flats_of(self.net):
            for owned in self._shards(flat):
                self._load_values(flat, owned)
                if flat in self.states:
                    self._load_states(flat, owned, self.states[flat])
        self._load_modules()
        if self.optimizer:
            self.net.precision.load_state_dict(self.precision)

    def publish(self) -> None:
        """Let the other ranks have what they keep of the shards."""
        net = self.net
        for unit in net.units:
            net.release(unit)  # what is whole has the old values
            net.updated([unit])
        net.finish()
        net.zero_grad()

    def resume_step(self) -> None:
        """Go on where the run was: its gradients, and random states."""
        if self.optimizer and self.same_ranks:
            for name, generator in generators().items():
                if name in self.own["random"]:
                    generator.set(self.own["random"][name])
        if self.loaded().gradients:
            for *_, flat in flats_of(self.net):
                if flat.trainable and flat.numel:
                    self.net.add_partial_grads(flat, self._gradients(flat))

    def _shards(self, flat: Flat) -> list[Owned]:
        """The shards to be read: of what nobody would send, all."""
        if not flat.numel:
            return []
        if flat.trainable or self.net.plan.parameters.sharded:
            return self.net.owned_states(flat)
        shards = enumerate(flat.shards(flat.full))
        return [Owned(flat, i, shard, shard, shard) for i, shard in shards]

    def _load(
        self,
        flat: Flat,
        owned: Owned,
        what: str,
        into: Tensor,
        before: Tensor | None,
    ) -> Tensor:
        """Bring a shard of the values, or of a state, to where it rests: `into`.

        Straight there, if that is host memory; else through `_block`. Returns the values
        in host memory, valid until the next call.
        """
        home = self.net.home
        if home.in_host_memory(into):
            return self._read(flat, owned, what, into.detach(), before)
        values = self._read(flat, owned, what, self._room(flat, into.dtype), before)
        home.write_back(into, values)
        return values

    def _room(self, flat: Flat, dtype: torch.dtype) -> Tensor:
        """Host memory for a shard: all take their turn in one block."""
        nbytes = flat.size * dtype.itemsize
        if self._block.numel() < nbytes:
            del self._block  # first, so that old and new never coexist
            self._block = host_empty((nbytes,), torch.uint8, "buffers")
        return self._block[:nbytes].view(dtype)

    def _read(
        self, flat: Flat, owned: Owned, what: str, out: Tensor, before: Tensor | None
    ) -> Tensor:
        """Read a shard of the values, of a state, of gradients into `out`.

        What the checkpoint does not have is as `before`, which may be `out`, or zero.
        """
        parts = [
            part
            for part in places(flat, owned.index, self.match.found)
            if what in part[0][0].tensors()
        ]
        if before is not None and any(s not in self.match.found for s in flat.slots):
            out.copy_(self.net.home.fetch(before))
        elif sum(b - a for *_, a, b in parts) < flat.size:
            out.zero_()
        for (saved, slot), skip, a, b in parts:
            self.run.read(saved, what, slot.offset + skip, out[a:b])
        return out

    def _load_values(self, flat: Flat, owned: Owned) -> None:
        master = owned.master
        values = self._load(flat, owned, "parameters", master, master)
        if master is not owned.shard:
            self.net.home.write_back(owned.shard, values)

    def _load_states(self, flat: Flat, owned: Owned, states: States) -> None:
        for key in owned.state.keys() - states.dtypes.keys():
            del owned.state[key]
        for key, dtype in states.dtypes.items():
            self._load_state(flat, owned, key, dtype)
        for key, value in states.scalars.items():
            if isinstance(value, Tensor):
                on = "cpu" if labels.on_host(owned.given) else None
                value = labels.label(value.clone(), "optimizer", on)
            owned.state[key] = value

    def _load_state(
        self, flat: Flat, owned: Owned, key: str, dtype: torch.dtype
    ) -> None:
        """Set one state, where there is one already in its place."""
        home, old, what = self.net.home, owned.state.get(key), f"optimizer/{key}"
        if is_elementwise(old, owned.shard) and old.dtype is dtype:
            self._load(flat, owned, what, old, old)
        elif home.plan.optimizer.on != "device":
            values = self._read(flat, owned, what, self._room(flat, dtype), None)
            owned.state[key] = home.store(values, "optimizer", flat)
        else:
            near = torch.empty(flat.size, dtype=dtype, device=flat.full.device)
            owned.state[key] = labels.label(near, "optimizer", on="device")
            self._load(flat, owned, what, near, None)

    def _gradients(self, flat: Flat) -> dict[str, list[Tensor]]:
        """What a step under way had of a buffer's gradients, for this plan and rank.

        Sums that were not reduced go on as they are where that is possible, or else as
        the mean that their reduction would have made.
        """
        found, dtype = self.match.found, flat.grad_dtype
        goes_on = self.same_ranks and not self.net.plan.gradients.sharded
        saved = {id(f): f for f, _ in (found[s] for s in flat.slots if s in found)}
        kinds = {kind for f in saved.values() for kind in f.gradients}
        parts: dict[str, list[Tensor]] = {}
        if "local" in kinds and goes_on:
            [local] = parts["local"] = [torch.zeros(flat.padded, dtype=dtype)]
            for slot in flat.slots:
                if slot in found and "local" in found[slot][0].gradients:
                    was, there = found[slot]
                    part = local[slot.offset : slot.offset + slot.numel]
                    name = was.named("gradients/local")
                    self.run.file(rank()).read(name, there.offset, part)
        if "mean" in kinds or ("local" in kinds and not goes_on):
            parts["mean"] = [
                self._mean(flat, owned, dtype, reduces=not goes_on)
                for owned in self.net.owned_states(flat)
            ]
        return parts

    def _mean(
        self, flat: Flat, owned: Owned, dtype: torch.dtype, reduces: bool
    ) -> Tensor:
        """The mean gradient of a shard; with what each rank had, if it `reduces`."""
        mean = torch.empty(flat.size, dtype=dtype)
        self._read(flat, owned, "gradients/mean", mean, None)
        ranks, total = self.run.index.world_size, torch.zeros(flat.size, dtype=dtype)
        for (saved, slot), skip, a, b in places(flat, owned.index, self.match.found):
            if reduces and "local" in saved.gradients:
                part, name = (
                    torch.empty(b - a, dtype=dtype),
                    saved.named("gradients/local"),
                )
                every = []
                for r in range(ranks):
                    self.run.file(r).read(name, slot.offset + skip, part)
                    every.append(part.clone())
                total[a:b] = ordered_sum(every, average=True)
        return mean.add_(total) if reduces else mean

    def _load_groups(self) -> None:
        for group, options in zip(
            self.net.optimizer.param_groups, self.groups, strict=True
        ):
            for key, value in options.items():
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


def _as(value: Any, example: Any) -> Any:
    """A scalar state in the dtype, and where, the optimizer has it."""
    if isinstance(example, Tensor):
        return torch.full_like(example, value)
    if isinstance(value, Tensor) and isinstance(example, int | float):
        return type(example)(value.item())
    return value


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are dicts with the same keys, or numbers, or of one type."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    numbers = isinstance(a, Number) and isinstance(b, Number)
    return numbers or type(a) is type(b)
