"""Sharded parameters by hand: look at them, set them, build a model of them.

These are the two names that DeepSpeed keeps under `deepspeed.zero`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from minizero import comm
from minizero.launch import world_size
from minizero.memory import Plan
from minizero.zero3 import ShardedFlat, is_sharded, owners


@contextmanager
def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
) -> Iterator[None]:
    """Sharded parameters are whole inside the block, for every rank to read.

    With `modifier_rank`, what that rank has written is kept, on every rank;
    without it, what is written is lost. Parameters that are not sharded are
    whole anyway. All ranks must enter, with the same parameters.
    """
    params = [params] if isinstance(params, nn.Parameter) else list(params)
    if modifier_rank is not None and not 0 <= modifier_rank < world_size():
        raise ValueError(
            f"modifier_rank must be a rank below {world_size()}, not {modifier_rank!r}"
        )
    flats = owners(params)
    for flat in flats:
        if not flat.whole:
            flat.gather().wait()
        flat.pinned += 1
    try:
        yield
        if modifier_rank is not None:
            for p in (p for p in params if not is_sharded(p)):
                comm.broadcast(p, modifier_rank)
            for flat in flats:
                comm.broadcast(flat.full, modifier_rank)
                flat.shard.copy_(flat.row(flat.full))
    finally:
        for flat in flats:
            flat.pinned -= 1
            flat.free()


class Init(TorchFunctionMode):
    """Build a model that is never whole on any rank.

    Inside the block a module is sharded as soon as it becomes part of
    another, so a rank holds its shards and one module. Code that touches a
    sharded parameter (an initialisation, say) sees it whole for that one
    operation.

    `config`: a DeepSpeed config dict; below stage 3 the block does nothing.
    Every rank must run the same code; rank 0's values are taken.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        zero = {} if config is None else config.get("zero_optimization", {})
        stage = 3 if config is None else zero.get("stage", 0)
        self.enabled = Plan.stage(stage).parameters.sharded

    def __enter__(self) -> Init:
        super().__enter__()
        self._hook = register_module_module_registration_hook(self._shard_module)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hook.remove()
        super().__exit__(*exc)

    def _shard_module(self, parent: nn.Module, name: str, child: Any) -> None:
        if not self.enabled or child is None:
            return
        named = [
            (f"{type(child).__name__}.{key}", p)
            for module in child.modules()
            for key, p in module.named_parameters(recurse=False)
            if not is_sharded(p)
        ]
        kinds: dict[object, list[tuple[str, nn.Parameter]]] = {}
        for key, p in named:
            kind = (p.dtype, p.device, p.requires_grad)
            kinds.setdefault(kind, []).append((key, p))
        with comm.phase("init"):
            for part in kinds.values():
                flat = ShardedFlat(part, None)
                comm.broadcast(flat.full)
                flat.split()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        touched = [x for x in leaves if isinstance(x, nn.Parameter) and is_sharded(x)]
        name = getattr(func, "__name__", "")
        if not touched or name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        with GatheredParameters(touched, modifier_rank=0):
            return func(*args, **kwargs)
