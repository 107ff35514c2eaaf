"""`deepspeed.zero`: models that are sharded while they are built, under all its options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from .. import zero
from ..config.source import Source
from ..memory.plan import Plan
from ..ranks import init_distributed
from ..zero.absent import is_sharded
from ..zero.init import shard_module
from ..zero.interfaces import Home


class Init(zero.Init):
    """`minizero.zero.Init`; the ranks need not talk yet.

    `module`: shard this model at once. `remote_device`: "cpu" keeps shards in host
    memory until `initialize`. `dtype`: of floating-point parameters; default: as they
    come, for the config's dtype is made of fp32 masters. ValueError for a group or a
    quantization; nothing is to be done for the rest.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Source | None = None,
        config: Source | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        others |= {"data_parallel_group": data_parallel_group, "mpu": mpu}
        asked = [name for name, value in others.items() if value]
        if asked:
            raise ValueError(
                f"minizero does not do {', '.join(asked)} in zero.Init: parameters are "
                "sharded over all ranks as they are; leave it out"
            )
        if enabled:
            init_distributed()
        home = None
        if remote_device not in (None, "none", "cuda"):
            home = Home(Plan.stage(3, offload_param="cpu"))
        given = config_dict_or_path if config is None else config
        super().__init__(given, home, enabled=enabled)
        self.dtype = dtype
        if module is not None and self.enabled:
            for part in reversed([*module.modules()]):  # a child before its parent
                self._shard(part)

    def _added(self, parent: nn.Module, name: str, child: Any) -> None:
        if self.enabled and child is not None:
            self._shard(child)

    def _shard(self, module: nn.Module) -> None:
        for p in module.parameters() if self.dtype else ():
            if p.is_floating_point() and not is_sharded(p):
                p.data = p.data.to(self.dtype)
        shard_module(module, self.home)


def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter | None],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[None]:
    """`minizero.zero.GatheredParameters`, where None is no parameter.

    `enabled` false: nothing is done. There is nothing to do for `fwd_module`.
    """
    if not enabled:
        return nullcontext()
    chosen = [params] if isinstance(params, nn.Parameter) else params
    return zero.GatheredParameters([p for p in chosen if p is not None], modifier_rank)


class OffloadDeviceEnum(StrEnum):
    """Where states may rest."""

    none, cpu, nvme = "none", "cpu", "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What may rest there."""

    optim_states, hp_params, lp_params = "optim_states", "hp_params", "lp_params"
    lp_grads, contiguous_grad_buffer = "lp_grads", "contiguous_grad_buffer"


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Iterable[type[nn.Module] | str],
    raise_if_not_found: bool = True,
    flag: bool = True,
) -> list[nn.Module]:
    """Mark the modules of these classes; a unit is gathered as one anyway."""
    kinds = [*leaf_module_classes]
    found, _ = _mark(model, kinds, _is_of, flag, must=False)
    if raise_if_not_found and not found:
        raise ValueError(f"no module of the model is of a class in {kinds}")
    return found


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Iterable[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """The inverse."""
    return set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found, False)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these full names; those, and the names of none."""
    must = raise_if_not_found
    return _mark(model, module_names, lambda n, _, w: n == w, flag, must)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose full names end so; those, and the ends of none."""
    must = raise_if_not_found
    return _mark(model, module_name_suffixes, lambda n, _, w: n.endswith(w), flag, must)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are marked."""
    return [m for m in model.modules() if z3_leaf_module(m)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this one is."""
    return getattr(model, "_z3_leaf", False)


def _is_of(_: str, module: nn.Module, kind: type[nn.Module] | str) -> bool:
    """Whether a module is of a class, or of one of that name."""
    if isinstance(kind, type):
        return isinstance(module, kind)
    own = type(module)
    return kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")


def _mark(
    model: nn.Module,
    wanted: Iterable[Any],
    fits: Callable[[str, nn.Module, Any], bool],
    flag: bool,
    must: bool,
) -> tuple[list[nn.Module], list[Any]]:
    """The modules that fit one of `wanted`, marked so; what none fits."""
    every = [*model.named_modules()]
    found = {w: [m for name, m in every if fits(name, m, w)] for w in wanted}
    missing = [w for w, modules in found.items() if not modules]
    if must and missing:
        raise ValueError(f"no module of the model is {', '.join(missing)}")
    marked = [*dict.fromkeys(m for modules in found.values() for m in modules)]
    for m in marked:
        m._z3_leaf = flag
    return marked, missing
