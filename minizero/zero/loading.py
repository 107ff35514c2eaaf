"""Parameters that come to modules while a model is built or loaded."""

from __future__ import annotations

import gc
import os
from typing import Any, Self
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from ..ranks.launch import device
from .absent import is_sharded
from .interfaces import Home
from .module_hooks import guard
from .sharded_buffer import ShardedFlat

# transformers' threads would read the files far ahead, up to the whole model
ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"


class ShardsLoaded(TorchFunctionMode):
    """Shards a parameter as it takes the place of one on the meta device.

    That is how `from_pretrained` of transformers loads. Each rank keeps its shard of what
    it has read itself; nothing is sent, so ranks may load in any order. At the end the
    modules are sharded that have become part of no other: the whole model's own.
    """

    enabled: bool
    home: Home

    def _added(self, parent: nn.Module, name: str, child: Any) -> None:
        """Shard what becomes part of a module."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        super().__enter__()
        self._owners: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._loads = register_module_parameter_registration_hook(self._loaded)
        self._before = os.environ.get(ONE_BY_ONE)
        if self.enabled:
            os.environ[ONE_BY_ONE] = "1"
        return self

    def __exit__(self, *exc: Any) -> None:
        os.environ.pop(ONE_BY_ONE, None)
        if self._before is not None:
            os.environ[ONE_BY_ONE] = self._before
        self._loads.remove()
        super().__exit__(*exc)
        if self.enabled and exc[0] is None:
            gc.collect()  # or ranks might differ in what is left of dropped ones
            for module in [*self._owners]:
                self._added(module, "", module)

    def _loaded(self, module: nn.Module, name: str, p: Any) -> None:
        self._owners[module] = None
        before = module._parameters.get(name)
        if not self.enabled or before is None or not before.is_meta:
            return
        if not p.is_meta and not is_sharded(p):
            p.data = p.data.to(device())
            if not any(map(is_sharded, module.parameters(recurse=False))):
                guard(module)
            flat = ShardedFlat([(f"{type(module).__name__}.{name}", p)], None)
            flat.home = self.home
            flat.split()
