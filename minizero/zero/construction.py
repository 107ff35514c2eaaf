"""How a net is made of a model and an optimizer, and given back as a state dict."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .. import comm
from ..memory import labels
from ..ranks.launch import rank
from .elementwise import groups_of, take_state
from .flat_buffer import Flat, Unit
from .units import Policy, assign, find_units, split
from .update import Step

# the wrapper of each parameter; neither is kept alive
_nets: WeakIdKeyDictionary = WeakIdKeyDictionary()


def nets_of(params: Iterable[nn.Parameter]) -> list[Any]:
    """The wrappers that train these parameters, each once."""
    found = (_nets[p]() for p in params if p in _nets)
    return list(dict.fromkeys(net for net in found if net is not None))


def _call_if_alive(method: weakref.WeakMethod[Any], p: Tensor) -> None:
    alive = method()
    if alive is not None:
        alive(p)


class Construction(Step):
    """Makes units and flat buffers, hangs up the hooks, adopts the optimizer."""

    def _build(self, policy: Policy | None) -> None:
        """Units and their buffers, with rank 0's values, placed as the plan says."""
        group_of = groups_of(self.model, self.optimizer)
        modules = find_units(self.model, policy)
        self.units, self._masters = [], {}
        with comm.phase("init"):
            for name, named in assign(self.model, modules).items():
                unit = Unit(name or "root", modules[name])
                for group, part in split(named, group_of):
                    unit.flats.append(self._build_flat(part, group))
                self.units.append(unit)
            for buffer in self.model.buffers():
                comm.broadcast(labels.label(buffer, "buffers"))
                self.precision.attach_buffer(buffer)

    def _build_flat(
        self, named: list[tuple[str, nn.Parameter]], group: int | None
    ) -> Flat:
        flat = self.flat_type(named, group)
        comm.broadcast(flat.full)
        self.precision.attach(flat, self.owned_shards(flat, flat.full))
        self.place(flat)
        if flat.trainable:
            shards = self.owned(flat)
            masters = self.precision.masters(flat, shards)
            self._masters[flat] = self.home.masters(flat, shards, masters)
        return flat

    def _hang_up_hooks(self) -> None:
        """Autograd reports each parameter's gradient to `_on_grad`."""
        self._owner = {
            slot.parameter: (unit, flat, slot)
            for unit in self.units
            for flat in unit.flats
            for slot in flat.slots
        }
        # weak: these hooks are out of the garbage collector's sight, and a
        # strong reference from a parameter to its owner would keep both
        hook = partial(_call_if_alive, weakref.WeakMethod(self._on_grad))
        for p in self._owner:
            _nets[p] = weakref.ref(self)
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(hook)

    def _adopt_optimizer(self) -> None:
        """Point the optimizer's groups at owned shards instead of parameters."""
        for group in self.optimizer.param_groups:
            group["params"] = []
        for flat, masters in self._masters.items():
            self._adopt_state(flat, masters)
            assert flat.group is not None
            self.optimizer.param_groups[flat.group]["params"] += masters

    def _adopt_state(self, flat: Flat, masters: list[Tensor]) -> None:
        """Cut the state that the optimizer has already into shards."""
        for key, value in take_state(self.optimizer, flat).items():
            whole = isinstance(value, Tensor) and value.ndim == 1
            parts = (
                self.owned_shards(flat, value) if whole else [value] * len(masters)
            )
            for master, part in zip(masters, parts, strict=True):
                if isinstance(part, Tensor):
                    if whole and part.is_floating_point():
                        # a 16-bit model's state gets an fp32 master's dtype
                        part = part.to(torch.promote_types(part.dtype, master.dtype))
                    part = self.home.store(part, "optimizer")
                self.optimizer.state[master][key] = part

    def refresh(self) -> None:
        """Take over what was written to parameters by hand.

        Call it on every rank after loading or changing weights, if the
        precision keeps master copies: the next update would undo the change.
        """
        for flat in self._trainable():
            masters, shards = self._masters[flat], self.owned(flat)
            self.home.refresh(flat, masters, shards, self.precision.read)

    @contextmanager
    def gathered(self, units: list[Unit]) -> Iterator[None]:
        """The parameters of these units are whole inside the block."""
        for unit in units:
            self.carry_out(self.schedule.needed(unit), unit)
        try:
            yield
        finally:
            for unit in units:
                self.carry_out(self.schedule.done(unit), unit)

    def state_dict(self) -> dict[str, Tensor]:
        """Whole weights and buffers in host memory, on rank 0; {} on others.

        Gathered unit by unit: no rank holds more than one unit beside its
        shards. Tied parameters appear under each name and share memory.
        """
        self.synchronize()
        values: dict[nn.Parameter, Tensor] = {}
        for unit in self.units:
            with self.gathered([unit]):
                for flat in unit.flats if rank() == 0 else ():
                    for slot in flat.slots:
                        whole = slot.view(flat.full).cpu().clone()
                        values[slot.parameter] = whole
        if rank() != 0:
            return {}
        weights = {
            name: values[p]
            for name, p in self.model.named_parameters(remove_duplicate=False)
        }
        others = {
            name: value.detach().cpu().clone()
            for name, value in self.model.state_dict().items()
            if name not in weights
        }
        return weights | others
