"""Counts the bytes that operators and interpreted kernels move, on any machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What these write they do not read first, though they are given it.
_ONLY_WRITTEN = {"aten::copy_", "aten::zero_", "aten::fill_"}
# Their schema marks gradients as written, for a loss scale that they are not given.
_ONLY_READ = {"aten::_fused_adam_": "grads", "aten::_fused_adamw_": "grads"}
_ALLOCATE = ("aten::empty", "aten::new_empty")


class Traffic(TorchDispatchMode):
    """Inside the block, what each operator and each kernel reads and writes.

    A byte counts once for each launch that reads it, and once for each that writes it:
    what memory has to deliver if nothing stays in a cache between launches. `read`,
    `written`: bytes. `loaded`: bytes in all loads of kernels, where a byte counts as
    often as it is loaded. `launches`: how often each operator or kernel ran; views,
    allocations and arithmetic on scalars are none. A list of tensors given to one
    operator is one launch here, and one or a few on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = self.loaded = 0
        self.launches: Counter[str] = Counter()
        self._interpreting = False
        self._patch: Any = None

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        shared = [r.alias_info for r in schema.returns if r.alias_info]
        is_view = any(not alias.is_write for alias in shared)
        if self._interpreting or is_view or schema.name.startswith(_ALLOCATE):
            return out
        given = dict(zip((a.name for a in schema.arguments), args, strict=False))
        given |= kwargs or {}
        if any(tensor.ndim for tensor in _tensors((given, out))):
            self.launches[schema.name.partition("::")[2]] += 1
            self._count(schema, given)
            self.written += 0 if shared else _nbytes(out)
        return out

    def _count(self, schema: Any, given: dict[str, Any]) -> None:
        read = []
        for argument in schema.arguments:
            value = given.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and _ONLY_READ.get(schema.name) != argument.name:
                self.written += _nbytes(value)
            if not (writes and schema.name in _ONLY_WRITTEN):
                read.append(value)
        self.read += _nbytes(read)

    def __enter__(self) -> Traffic:
        if "triton" in sys.modules:
            from triton.runtime.interpreter import GridExecutor

            run = GridExecutor.__call__

            def counted(executor: Any, *args: Any, **kwargs: Any) -> None:
                with self._interpreted(executor.fn.__name__):
                    run(executor, *args, **kwargs)

            self._patch = mock.patch.object(GridExecutor, "__call__", counted)
            self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._patch is not None:
            self._patch.stop()

    @contextmanager
    def _interpreted(self, name: str) -> Iterator[None]:
        """Look at the loads and stores of a kernel that Triton interprets inside."""
        from triton.runtime.interpreter import interpreter_builder as builder

        load, store = builder.create_masked_load, builder.create_masked_store
        touched: dict[str, list[tuple[Tensor, int]]] = {"load": [], "store": []}

        def note(kind: str, pointers: Any, mask: Any) -> None:
            at = torch.from_numpy(pointers.data[mask.data].view("int64"))
            size = pointers.get_element_ty().primitive_bitwidth // 8
            touched[kind].append((at, size))

        def loading(pointers: Any, mask: Any, *rest: Any) -> Any:
            note("load", pointers, mask)
            return load(pointers, mask, *rest)

        def storing(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            note("store", pointers, mask)
            return store(pointers, value, mask, *rest)

        self._interpreting = True
        with (
            mock.patch.object(builder, "create_masked_load", loading),
            mock.patch.object(builder, "create_masked_store", storing),
        ):
            try:
                yield
                self.loaded += sum(size * len(at) for at, size in touched["load"])
                self.read += sum(_distinct(touched["load"]))
                self.written += sum(_distinct(touched["store"]))
            finally:
                self._interpreting = False
        self.launches[name] += 1


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _nbytes(value: Any) -> int:
    """Of the tensors in it, each once, and so the elements of an expanded one."""
    every = {t.data_ptr(): t for t in _tensors(value)}.values()
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in every)


def _distinct(touched: list[tuple[Tensor, int]]) -> Iterator[int]:
    """Bytes at different addresses, for each size of element."""
    for size in {size for _, size in touched}:
        every = torch.cat([at for at, other in touched if other == size])
        yield size * len(every.unique())
