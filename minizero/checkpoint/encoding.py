"""Python values as JSON and named tensors, and back, without pickle."""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# those that the safetensors format has a name for
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 "
        "complex64 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
    ).split()
}


def dtype_name(dtype: torch.dtype) -> str:
    """As indexes and sentences have it: "float32"."""
    return str(dtype).removeprefix("torch.")


def encode(value: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """A tree that JSON can hold, and the tensors that it refers to.

    None, bool, int, float (inf and NaN too), str, bytes, list, tuple, set, dict with
    any such keys, Counter, OrderedDict, tensors, NumPy's scalars (which come back as
    Python's) and arrays. `name` stands for the value in messages and begins the names
    of the tensors. Raises TypeError for anything else: what only pickle could bring
    back.
    """
    tensors: dict[str, Tensor] = {}
    numpy = sys.modules.get("numpy")

    def tree(value: Any, path: str, inside: tuple[int, ...] = ()) -> Any:
        kind = type(value)
        if kind is int and value.bit_length() > 10_000:
            raise TypeError(
                f"{path} is an integer of {value.bit_length():,} bits, which JSON "
                "readers refuse; save it as bytes"
            )
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, Tensor):
            return leaf(value, path)
        if numpy is not None and isinstance(value, numpy.generic):
            return tree(value.item(), path)
        if numpy is not None and kind is numpy.ndarray:
            try:
                array = torch.from_numpy(value.copy())
            except (TypeError, ValueError) as error:
                raise TypeError(f"{path}: {error}") from error
            return {"$array": leaf(array, path)}
        if id(value) in inside:
            raise TypeError(f"{path} contains itself; save a copy without")
        inside = (*inside, id(value))
        if kind in (list, tuple, set):
            items = [tree(v, f"{path}[{i}]", inside) for i, v in enumerate(value)]
            return items if kind is list else {f"${kind.__name__}": items}
        if kind not in (dict, Counter, OrderedDict):
            raise TypeError(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, which a "
                "checkpoint does not hold; save numbers, strings, lists, dicts and "
                "tensors (its state_dict(), if it has one)"
            )
        values = [tree(v, f"{path}[{k!r}]", inside) for k, v in value.items()]
        if kind is dict and all(type(k) is str and k[:1] != "$" for k in value):
            return dict(zip(value, values, strict=True))
        keys = [tree(k, f"a key of {path}", inside) for k in value]
        return {f"${kind.__name__}": list(map(list, zip(keys, values, strict=True)))}

    def leaf(value: Tensor, path: str) -> Any:
        dtype = dtype_name(value.dtype)
        if value.layout != torch.strided or dtype not in DTYPES:
            raise TypeError(
                f"{path} is a {value.layout} tensor of {dtype}, which a checkpoint "
                f"does not hold; save a dense one of {', '.join(DTYPES)}"
            )
        if value.ndim == 0 and not value.is_complex():
            return {"$scalar": [dtype, tree(value.item(), path)]}
        key = f"{name}/{len(tensors)}"
        tensors[key] = value.detach()
        return {"$tensor": key}

    try:
        return tree(value, name), tensors
    except RecursionError:
        raise TypeError(
            f"{name} is nested too deeply for a checkpoint; save it flatter"
        ) from None


def decode(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The inverse of `encode`; `tensor` brings a tensor by its name.

    Tensors come back on the CPU. Raises ValueError for what `encode` never writes.
    """

    def pairs(items: Any) -> dict[Any, Any]:
        return {back(k): back(v) for k, v in items}

    makers: dict[str, Callable[[Any], Any]] = {
        "$float": float,
        "$bytes": base64.b64decode,
        "$tuple": lambda items: tuple(map(back, items)),
        "$set": lambda items: set(map(back, items)),
        "$dict": pairs,
        "$Counter": lambda items: Counter(pairs(items)),
        "$OrderedDict": lambda items: OrderedDict(pairs(items)),
        "$scalar": lambda it: torch.tensor(back(it[1]), dtype=DTYPES[it[0]]),
        "$tensor": tensor,
        "$array": lambda inner: back(inner).numpy(),
    }

    def back(tree: Any) -> Any:
        if isinstance(tree, list):
            return [back(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if len(tree) == 1:
            [(key, value)] = tree.items()
            if key in makers:
                return makers[key](value)
        if any(key[:1] == "$" for key in tree):
            raise ValueError(f"{', '.join(tree)}: no such kind of value")
        return {key: back(value) for key, value in tree.items()}

    return back(tree)
