"""Sharded parameters by hand: look at them, set them, build models of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import comm
from ..ranks.launch import rank
from .data_parallel import OWNERS


@contextmanager
def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None
) -> Iterator[None]:
    """Sharded parameters are whole inside the block, for every rank to read.

    With `modifier_rank`, what that rank has written is kept, on every rank; without it,
    what is written is lost. All ranks must enter, with the same parameters.
    """
    params = [params] if isinstance(params, nn.Parameter) else list(params)
    nets = {net for p in params if p in OWNERS and (net := OWNERS[p]())}
    flats = {p.sharded_in: None for p in params if hasattr(p, "sharded_in")}
    for net in nets:
        net.wait()  # an update that arrived later would undo the change
    for flat in flats:
        flat.users += 2
        work = flat.gather()
        if work:
            work.wait()
    try:
        yield
        if modifier_rank is not None:
            for p in params:
                if not hasattr(p, "sharded_in"):
                    comm.broadcast(p.data, modifier_rank)
            for flat in flats:
                comm.broadcast(flat.full, modifier_rank)
                flat.storage.write_shard(flat.shard, flat.own(flat.full))
            for net in nets:
                net.refresh()
    finally:
        for flat in flats:
            flat.users -= 2
            flat.free()


class Init:
    """Build a model that is never whole on any device.

    Rank 0 builds it in host memory, the others without values; wrapping it then takes
    it to the devices unit by unit, with rank 0's values, and shards each before the
    next.
    """

    def __init__(self, config: Any = None, *, enabled: bool = True) -> None:
        self._device = (
            torch.device("cpu" if rank() == 0 else "meta") if enabled else None
        )

    def __enter__(self) -> Init:
        if self._device is not None:
            self._device.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._device is not None:
            self._device.__exit__(*exc)
