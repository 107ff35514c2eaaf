"""Labels: what each storage is for, and whether it is on the device or the host.

Training labels what it allocates and marks moments; a running `Tracker` sees both.
Helpers for host memory and bytes follow at the end.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from .placement import check

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")

# Of each storage, weakly; without a label it counts as activations.
categories: WeakIdKeyDictionary = WeakIdKeyDictionary()
_hosted: WeakIdKeyDictionary = WeakIdKeyDictionary()  # whether it is host memory
_on_gpu: WeakIdKeyDictionary = WeakIdKeyDictionary()  # a set, of labelled ones
trackers: list[Any] = []  # those that are running
_allocates_on_host = False


def label(tensor: Tensor, category: str, on: str | None = None) -> Tensor:
    """Name the category of a tensor's storage, for trackers now and later.

    `on`: "cpu" if it is host memory, "device" if not; None leaves that as it is.
    """
    if category not in CATEGORIES:
        raise ValueError(f"category must be one of {CATEGORIES}, not {category!r}")
    storage = tensor.untyped_storage()
    categories[storage] = category
    if tensor.device.type != "cpu":
        _on_gpu[storage] = True
    if on is not None:
        check("on", on, ("device", "cpu"))
        _hosted[storage] = on == "cpu"
    for tracker in trackers:
        tracker.see(storage, category)
    return tensor


def on_host(x: Tensor | torch.UntypedStorage) -> bool:
    """Whether a storage, or a tensor's, counts as host memory: as its label says.

    Without a label, CPU memory counts as the host's as soon as a labelled storage is
    on a GPU. Before that the CPU plays the device.
    """
    storage = x.untyped_storage() if isinstance(x, Tensor) else x
    on_cpu = bool(_on_gpu) and storage.device.type == "cpu"
    return bool(_hosted.get(storage, on_cpu))


@contextmanager
def separate_labels() -> Iterator[None]:
    """Use an empty table of labels inside, as a dry run does; then the old one again."""
    global categories, _hosted, _on_gpu
    before = categories, _hosted, _on_gpu
    categories, _hosted, _on_gpu = (WeakIdKeyDictionary() for _ in before)
    try:
        yield
    finally:
        categories, _hosted, _on_gpu = before


@contextmanager
def host_memory() -> Iterator[None]:
    """What operations allocate inside the block is host memory."""
    global _allocates_on_host
    before, _allocates_on_host = _allocates_on_host, True
    try:
        yield
    finally:
        _allocates_on_host = before


def inherit_host(outputs: list[Tensor], *arguments: Any) -> None:
    """Count an operation's CPU outputs as host memory inside `host_memory`, or if all
    its inputs are. (A copy from the device has one that is not: label the copy.)
    """
    hosted = _allocates_on_host
    if not hosted and (_hosted or _on_gpu):
        tensors = [x for x in tree_iter(arguments) if isinstance(x, Tensor)]
        hosted = bool(tensors) and all(on_host(x) for x in tensors)
    for x in outputs if hosted else ():
        if x.device.type == "cpu":
            _hosted.setdefault(x.untyped_storage(), True)


def label_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Label an optimizer's states: on the host, if their parameter is."""
    for p, state in list(optimizer.state.items()):
        hosted = isinstance(p, Tensor) and on_host(p)
        for leaf in tree_iter(state):
            # but for placeholders of a state that is offloaded, labelled already
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in categories:
                label(leaf, "optimizer", "cpu" if hosted else None)


def labelled_bytes(on: str = "device") -> dict[str, int]:
    """Live bytes by category of what is labelled, on "device" or "cpu", the host."""
    check("on", on, ("device", "cpu"))
    live = dict.fromkeys(CATEGORIES, 0)
    for storage, category in list(categories.items()):
        if on_host(storage) == (on == "cpu"):
            live[category] += storage.nbytes()
    return live


def mark(event: str, unit: str = "") -> None:
    """Mark a moment in every tracker that is running."""
    for tracker in trackers:
        tracker.mark(event, unit)


def start(tracker: Any) -> None:
    """Show a tracker all labels, now and later; `trackers.remove` ends that."""
    trackers.append(tracker)
    for storage, category in list(categories.items()):
        tracker.see(storage, category)


# ---- host memory, bytes


def host_empty(
    shape: Sequence[int], dtype: torch.dtype, category: str, temporary: bool = False
) -> Tensor:
    """Uninitialized host memory, page-locked where there is a GPU.

    `temporary`: it is freed soon. Then it comes from torch's allocator, which keeps
    what is freed and rounds up to powers of two.
    """
    size, count = tuple(shape), torch.Size(shape).numel()
    pin = torch.cuda.is_available() and count > 0
    with host_memory():
        if pin and not temporary:
            host = page_locked(count, dtype).view(size)
        else:
            host = torch.empty(size, dtype=dtype, device="cpu", pin_memory=pin)
    return label(host, category, on="cpu")


def page_locked(count: int, dtype: torch.dtype) -> Tensor:
    """[count]: pages of its own, registered with CUDA until the tensor is gone."""
    nbytes = count * dtype.itemsize
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    host = torch.frombuffer(pages, dtype=dtype, count=count)
    error = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), nbytes, 0)
    if int(error):
        raise RuntimeError(
            f"{nbytes:,} bytes of host memory could not be page-locked ({error}); raise "
            "the limit (ulimit -l), or offload less"
        )

    def unlock(address: int, pages: mmap.mmap) -> None:  # `pages`: to keep them so long
        torch.cuda.synchronize()  # a copy may be under way
        torch.cuda.cudart().cudaHostUnregister(address)

    end = weakref.finalize(host.untyped_storage(), unlock, host.data_ptr(), pages)
    end.atexit = False
    return host


def aligned(nbytes: int, to: int = 64) -> int:
    """The next multiple of `to`; 64 bytes are a cache line."""
    return -(-nbytes // to) * to


def view(buffer: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, which the caller must keep alive."""
    array = ctypes.c_ubyte * buffer.nbytes
    return memoryview(array.from_address(buffer.data_ptr())).cast("B")


def amount(nbytes: float) -> str:
    """Bytes in decimal units and at most four digits: "38.5 GB"."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))
    unit, size = next((u for u in units if abs(nbytes) >= u[1]), ("B", 1))
    return f"{short(nbytes / size)} {unit}"


def short(number: float) -> str:
    """At most four digits and no trailing zero: "112", "26.25", "0.4"."""
    decimals = max(0, 4 - len(str(int(abs(number)))))
    text = f"{number:,.{min(decimals, 2)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
