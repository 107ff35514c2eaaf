"""One process that believes it is a rank of many, and whose tensors have no values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from .. import comm
from ..memory import labels
from ..offload import nvme_storage, second_set
from ..offload.swap_file import Transfer

aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default  # what C++ asks twice for each operation


class Values(TorchDispatchMode):
    """Answers what only values can tell: all are equal, and a number is NaN.

    NaN is above nothing, so no overflow is found, and an update goes on with it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.allclose.default, aten.equal.default):
            return True
        if func is aten._local_scalar_dense.default:
            return float("nan") if args[0].is_floating_point() else 0
        return func(*args, **(kwargs or {}))


class Mode(FakeTensorMode):
    """Fake tensors, whose storages nothing keeps: torch's cache has them in its keys."""

    def _cached_dispatch_impl(
        self, func: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        if any(isinstance(x, UntypedStorage) for x in args):
            return self._dispatch_impl(func, types, args, kwargs)
        return super()._cached_dispatch_impl(func, types, args, kwargs)


class NoFile:
    """Where a swap file would be: reads bring nothing, and writes are over at once."""

    direct = True

    def __init__(self, path: Path, *limits: int) -> None:
        self.path, self.size = path, 0

    def allocate(self, nbytes: int) -> int:
        self.size += nbytes
        return self.size - nbytes

    def free(self, at: int, nbytes: int) -> None:
        pass

    def read(self, offset: int, buffer: Tensor) -> Transfer:
        return Transfer(self.path, time.perf_counter(), [])

    write = read

    def close(self) -> None:
        pass


def _in_turn(mode: FakeTensorMode) -> type[ThreadPoolExecutor]:
    """A thread with the modes, which are a thread's own. It is waited for: fake tensors
    are not for two at a time."""

    class InTurn(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            def inside() -> Any:
                with mode, Values():
                    return fn(*args, **kwargs)

            done = super().submit(inside)
            wait([done])
            return done

    return InTurn


def _address(tensor: Tensor) -> int:
    """Where a tensor without memory would be: equal for what is at one place."""
    storage = tensor.untyped_storage()
    return (storage._cdata << 44) + tensor.storage_offset() * tensor.itemsize


def _convert(
    module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """`nn.Module._apply`; torch's own swaps tensors, which these do not allow."""
    for part in module.modules() if recurse else [module]:
        for p in part.parameters(recurse=False):
            p.data = fn(p.data)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = fn(buffer)
    return module


@contextmanager
def rehearsal(world_size: int, rank: int, device: str) -> Iterator[FakeTensorMode]:
    """Inside, this process is `rank` of `world_size`, and tensors have no memory.

    Collectives return at once, and have moved nothing.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "this process is a rank already, and a dry run makes it one of others; "
            "call dryrun in a process of its own"
        )
    with ExitStack() as stack:
        dist.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=world_size
        )
        stack.callback(dist.destroy_process_group)
        stack.enter_context(patch.object(FakeTensor, "data_ptr", _address))
        stack.enter_context(patch.object(nn.Module, "_apply", _convert))
        # a GPU that is there would be given pinned memory and streams
        stack.enter_context(patch.object(torch.cuda, "is_available", lambda: False))
        stack.enter_context(labels.apart())
        stack.enter_context(patch.object(nvme_storage, "SwapFile", NoFile))
        own = "backend" if device == "cuda" else "direct"
        stack.enter_context(comm.algorithm(own))
        mode = Mode(allow_non_fake_inputs=True)
        thread = _in_turn(mode)
        stack.enter_context(patch.object(second_set, "ThreadPoolExecutor", thread))
        stack.enter_context(mode)
        stack.enter_context(Values())
        yield mode
