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
from ..ranks.launch import rank, world_size
from .adopted import adopt_optimizer
from .elementwise import groups_of, take_state
from .flat_buffer import Flat, Place, Unit, in_order
from .interfaces import Home
from .materialise import blank_modules, materialise
from .muon import Muon, Owners, adopt, cuts
from .units import NO_GROUP, Policy, assign, split, units_of
from .update import Step

# the wrapper of each parameter; neither is kept alive
_nets: WeakIdKeyDictionary = WeakIdKeyDictionary()


def nets_of(params: Iterable[nn.Parameter]) -> list[Any]:
    """The wrappers that train these parameters, each once."""
    found = (_nets[p]() for p in params if p in _nets)
    return list(dict.fromkeys(net for net in found if net is not None))


def _take_over(buffer: Tensor) -> None:
    """Give a buffer rank 0's values."""
    values = buffer.contiguous()
    comm.broadcast(values)
    if values is not buffer:
        # in its own layout, by which products round; but an expanded tensor has memory
        # from now on, for it cannot be written to
        buffer.data = torch.empty_like(buffer).copy_(values)
    labels.label(buffer, "buffers")


def _refuse_script(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"a {module.original_name} of the model is a ScriptModule, whose parameters "
            "and calls are out of Python's reach; leave out torch.jit.script, and use "
            "engine.compile() if it shall be compiled"
        )


def _call_if_alive(method: weakref.WeakMethod[Any], p: Tensor) -> None:
    alive = method()
    # autograd reports a parameter that was frozen since the forward, without a gradient
    if alive is not None and p.grad is not None:
        alive(p)


class Construction(Step):
    """Makes units and flat buffers, hangs up the hooks, adopts the optimizer."""

    def _build(self, policy: Policy | None) -> None:
        """Units and their buffers, with rank 0's values, placed as the plan says."""
        group_of = groups_of(self.model, self.optimizer)
        modules, blank = units_of(self.model, policy), blank_modules(self.model)
        self.units, self._masters = [], {}
        owners = Owners(world_size())
        with comm.phase("init"):
            for name, named in assign(self.model, modules).items():
                materialise(blank.get(p) for _, p in named)
                unit = Unit(name or "root", list(modules[name].values()))
                for group, part in split(named, group_of):
                    whole = self._owns_whole(group)
                    place = owners if whole else in_order
                    unit.flats.append(self._build_flat(part, group, place))
                self.units.append(unit)
            materialise(blank.values())
            for module in self.model.modules():
                _refuse_script(module)
                for buffer in module.buffers(recurse=False) if module._buffers else ():
                    _take_over(buffer)
                    self.precision.attach_buffer(buffer, module)

    def _owns_whole(self, group: int | None) -> bool:
        """Whether the optimizer needs the tensors of this group whole."""
        if group is None or not isinstance(self.optimizer, Muon):
            return False
        return self.optimizer.owns_whole(group)

    def _new_flat(
        self, named: list[tuple[str, nn.Parameter]], group: int | None, place: Place
    ) -> Flat:
        return self.flat_type(named, group, place)

    def _build_flat(
        self, named: list[tuple[str, nn.Parameter]], group: int | None, place: Place
    ) -> Flat:
        flat = self._new_flat(named, group, place)
        comm.broadcast(flat.full)
        self.precision.attach(flat, self.owned_shards(flat, flat.full))
        self.place(flat)
        if flat.trainable:
            self._make_masters(flat)
        return flat

    over = False  # whether another net has taken over

    def _make_masters(self, flat: Flat) -> list[Tensor]:
        shards = self.owned(flat)
        masters = self.precision.masters(flat, shards)
        self._masters[flat] = self.home.masters(flat, shards, masters)
        return self._masters[flat]

    def _hang_up_hooks(self) -> None:
        """Autograd reports each parameter's gradient to `_on_grad`."""
        self._owner = {
            slot.parameter: (unit, flat, slot)
            for unit in self.units
            for flat in unit.flats
            for slot in flat.slots
        }
        self.handles: list[Any] = []
        self._reporting = {}
        for p in self._owner:
            _nets[p] = weakref.ref(self)
        self._hook(self._owner)
        self._watch()

    def _hook(self, params: Iterable[nn.Parameter]) -> None:
        # weak: these hooks are out of the garbage collector's sight, and a
        # strong reference from a parameter to its owner would keep both
        hook = partial(_call_if_alive, weakref.WeakMethod(self._on_grad))
        for p in params:
            if p.requires_grad and p not in self._reporting:
                handle = p.register_post_accumulate_grad_hook(hook)
                self._reporting[p] = handle.id
                self.handles.append(handle)

    def let_go(self) -> None:
        """Leave the parameters to another net, with their values; this one is over.

        Every rank calls it. `handles`: of all hooks on the model, whoever has hung them.
        """
        self.synchronize()
        self.zero_grad()
        self.over = True
        for handle in self.handles:
            handle.remove()
        for p in self._owner:
            del _nets[p]
            p.grad = None

    def _unfreeze(self, flat: Flat) -> None:
        """A parameter of a frozen buffer requires gradients by now."""
        name = next(s.name for s in flat.slots if s.parameter.requires_grad)
        if flat.group is None:
            raise ValueError(NO_GROUP.format(name))
        if type(self.home) is not Home:
            raise RuntimeError(
                f"parameter {name!r} was unfrozen after the model was wrapped, and "
                f"{type(self.home).__name__} has made no room for its states; unfreeze "
                "it before, and freeze it after"
            )
        flat.trainable = True
        self.place(flat)
        self._give(flat, self._make_masters(flat))
        self._given = self._in_groups()
        self._hook(slot.parameter for slot in flat.slots)

    def _adopt_optimizer(self) -> None:
        """Point the optimizer's groups at owned shards instead of parameters."""
        for group in self.optimizer.param_groups:
            group["params"] = []
        for flat, masters in self._masters.items():
            self._give(flat, masters)
        adopt_optimizer(self.optimizer, self.zero_grad)
        self._given = self._in_groups()

    def _give(self, flat: Flat, masters: list[Tensor]) -> None:
        """Let the optimizer update these, with the state that it has already."""
        self._adopt_state(flat, masters)
        assert flat.group is not None
        self.optimizer.param_groups[flat.group]["params"] += masters
        if flat.uncut:
            for number, master in zip(self.numbers(masters), masters, strict=True):
                adopt(master, cuts(flat, number))

    def _adopt_state(self, flat: Flat, masters: list[Tensor]) -> None:
        """Cut the state that the optimizer has already into shards."""
        for key, value in take_state(self.optimizer, flat).items():
            whole = isinstance(value, Tensor) and value.ndim == 1
            parts = self.owned_shards(flat, value) if whole else [value] * len(masters)
            for master, part in zip(masters, parts, strict=True):
                if isinstance(part, Tensor):
                    if whole and part.is_floating_point():
                        # a 16-bit model's state gets an fp32 master's dtype
                        part = part.to(torch.promote_types(part.dtype, master.dtype))
                    part = self.home.store(part, "optimizer", flat)
                self.optimizer.state[master][key] = part

    def refresh(self) -> None:
        """Take over what was written to parameters by hand.

        Call it on every rank after loading or changing weights, if the
        precision keeps master copies: the next update would undo the change.
        """
        for flat in self._trainable():
            masters, shards = self._masters[flat], self.owned(flat)
            self.home.refresh(flat, masters, shards, self.precision.read)
        self._versions = self._now()

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

    def state_dict(self, frozen: bool = True) -> dict[str, Tensor]:
        """Whole weights and buffers in host memory, on rank 0; {} on others.

        Gathered unit by unit: no rank holds more than one unit beside its
        shards. Tied parameters appear under each name and share memory.
        `frozen`: whether those that require no gradient are wanted too.
        """
        self._check_places()
        self.synchronize()
        values: dict[nn.Parameter, Tensor] = {}
        for unit in self.units:
            with self.gathered([unit]):
                for flat in unit.flats if rank() == 0 else ():
                    for slot in flat.slots if frozen or flat.trainable else ():
                        p = slot.parameter
                        values[p] = p.detach().cpu().clone()
        if rank() != 0:
            return {}
        weights = {
            name: values[p]
            for name, p in self.model.named_parameters(remove_duplicate=False)
            if p in values
        }
        others = {k: v.detach().cpu().clone() for k, v in self.module_state().items()}
        return weights | others

    def module_state(self) -> dict[str, Any]:
        """Persistent buffers, and what modules have as extra state, by name."""
        named = self.model.named_parameters(remove_duplicate=False)
        parameters = {name for name, _ in named}
        state = self.model.state_dict()
        return {k: v for k, v in state.items() if k not in parameters}
