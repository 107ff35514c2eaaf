"""Sharded parameters by hand: look at them, set them, build a model of them.

These are the two names that DeepSpeed keeps under `deepspeed.zero`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules import module as registry
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .. import comm
from ..memory.plan import Plan
from ..ranks import device
from .guards import is_sharded, nets_of, refuse_sharded_state
from .seams import Storage
from .stage3 import ShardedFlat


def owners(params: Iterable[Any]) -> list[ShardedFlat]:
    """The sharded buffers that hold these parameters, each once."""
    return list(dict.fromkeys(p.sharded_in for p in params if is_sharded(p)))


@contextmanager
def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
) -> Iterator[None]:
    """Sharded parameters are unsharded inside the block, for every rank.

    With `modifier_rank`, what that rank has written is kept, on every rank; without it,
    what is written to sharded ones is lost. Others have their values in any case.
    All ranks of a net's `group` must enter alike; `modifier_rank` counts within it.
    """
    params = [params] if isinstance(params, nn.Parameter) else list(params)
    flats, nets = owners(params), nets_of(params)
    for net in nets:
        net.synchronize()  # an update that arrived later would undo a write
    group = nets[0].group if nets else None  # of all ranks
    with ExitStack() as stack:
        for flat in flats:
            stack.enter_context(flat.gathered())
        yield
        if modifier_rank is not None:
            for p in (p for p in params if not is_sharded(p)):
                comm.broadcast(p.data, modifier_rank, group=group)
            for flat in flats:
                take_over(flat, modifier_rank, group)
            for net in nets:
                net.refresh()


def take_over(flat: ShardedFlat, src: int, group: comm.Group | None = None) -> None:
    """Keep what rank `src` of the group has written to a buffer's parameters."""
    with torch._C.DisableTorchFunction():  # inside `Init` this would gather
        for slot, view in zip(flat.slots, flat.views(), strict=True):
            view.copy_(slot.parameter.data)  # after `p.data = values`
    comm.broadcast(flat.full, src, group=group)
    flat.storage.write_shard(flat.stored, flat.stored_part(flat.full))


class Init(TorchFunctionMode):
    """Build a model that no rank ever holds in full.

    Parameters are sharded when the next module registers its own: a rank holds its
    shards, and one module. Code inside the block that touches sharded ones sees their
    values: they are gathered, until code touches others. Every rank runs the same code;
    rank 0's values are taken. A model on the meta device is sharded as it is loaded.

    `config`: DeepSpeed's: a dict, a path, or JSON text. Below stage 3, and with
    `enabled=False`, the block does nothing. `storage`: stores the shards (default: on
    the device, or in host memory if `config` has `offload_param`).
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        storage: Storage | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        super().__init__()
        plan = Plan.stage(3)
        if config is not None:
            from ..config import load  # others need no pydantic

            zero = load(config)[0].get("zero_optimization", {})
            stage, off = zero.get("stage", 0), zero.get("offload_param") or {}
            on_host = stage == 3 and off.get("device") not in (None, "none")
            plan = Plan.stage(stage, offload_param="cpu" if on_host else None)
        self.enabled = enabled and plan.parameters.sharded
        self.storage = storage or Storage(plan)
        self._unsharded: list[ShardedFlat] = []  # for the code that runs
        self._waiting: list[tuple[nn.Module, str, nn.Parameter, bool]] = []

    def __enter__(self) -> Init:
        if self.enabled:
            self._ends = ExitStack()
            if device().type != "cpu":  # where it will train; NCCL moves nothing else
                self._ends.enter_context(device())
            super().__enter__()
            for hook in (
                registry.register_module_module_registration_hook(self._added),
                registry.register_module_parameter_registration_hook(self._registered),
            ):
                self._ends.callback(hook.remove)
            # transformers' threads would read the files far ahead of this
            ahead = patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1")
            self._ends.enter_context(ahead)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.enabled:
            super().__exit__(*exc)
            self._ends.close()
            if exc[0] is None:
                self._unshard_only([])
                gc.collect()  # parameters that others have replaced, as by tying

    def _added(self, parent: nn.Module, name: str, child: Any) -> None:
        """Shard what a module brings along that was not registered, as a copy's."""
        for module in child.modules() if child is not None else ():
            for key, p in module.named_parameters(recurse=False):
                self._registered(module, key, p)

    def _registered(self, module: nn.Module, name: str, p: Any) -> None:
        """Shard a parameter, once its module has initialized it.

        If it takes the place of one on the meta device, it has been loaded: each rank
        keeps its shard of what it has read itself, so ranks may load in any order.
        """
        if p is None or p.is_meta or is_sharded(p):
            return
        if self._waiting and self._waiting[0][0] is not module:
            self._shard_waiting()
        before = module._parameters.get(name)
        self._waiting.append((module, name, p, before is not None and before.is_meta))

    def _shard_waiting(self) -> None:
        new, self._waiting = self._waiting, []
        for module, name, p, loaded in new:
            if not is_sharded(p):  # it may be here twice
                refuse_sharded_state(module)
                p.data = p.data.to(device())
                flat = ShardedFlat([(f"{type(module).__name__}.{name}", p)], None)
                if not loaded:
                    comm.broadcast(flat.full)
                flat.store(self.storage)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        sharded = [x for x in tree_leaves((args, kwargs)) if is_sharded(x)]
        is_attribute = getattr(func, "__name__", "") in ("__get__", "__set__")
        # `requires_grad` and others need no values; `.data` shows or replaces them
        if sharded and not (is_attribute and func.__self__ is not torch.Tensor.data):
            self._unshard_only(owners(sharded))
        return func(*args, **kwargs)

    def _unshard_only(self, flats: list[ShardedFlat]) -> None:
        """Unshard these, and shard those again that code touched before."""
        if flats and all(flat in self._unsharded for flat in flats):
            return
        self._shard_waiting()
        held, self._unsharded = self._unsharded, flats
        with torch._C.DisableTorchFunction(), comm.phase("init"):
            for flat in held:
                take_over(flat, 0)
                flat.end_reading()
            for flat in flats:
                flat.gather().wait()
                flat.readers += 1
