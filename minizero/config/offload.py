"""Where state rests when it is off the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .schema import key

PLACES = ("none", "cpu", "nvme")

# Keys that both blocks have.


def _device(block: str) -> Any:
    return key(
        "none",
        "Rest on the device, in host memory, or in files.",
        f"`{block}` of `Plan.stage`",
        one_of=PLACES,
    )


def _nvme_path() -> Any:
    return key(
        None,
        "The folder of the files; needed with `nvme`.",
        "`folder` of `NVMe`",
        unset="none",
    )


def _buffer_count(default: int) -> Any:
    return key(
        default,
        "Host buffers that files are read into and written from.",
        "`buffer_count` of `NVMe`, the larger one of both blocks",
        unit="buffers",
        least=1,
    )


def _pin_memory() -> Any:
    return key(
        True,
        "Page-locked host memory, from which a GPU copies at full speed.",
        ignored="host memory is page-locked wherever there is a GPU",
    )


@dataclass(frozen=True, kw_only=True)
class OffloadParam:
    """Where sharded parameters rest between uses (stage 3)."""

    device: str = _device("offload_param")
    nvme_path: str | None = _nvme_path()
    buffer_count: int = _buffer_count(5)
    buffer_size: int = key(
        100_000_000,
        "Size of each of these buffers.",
        "`buffer_size` of `NVMe`",
        unit="elements",
        least=1,
    )
    max_in_cpu: int = key(
        1_000_000_000,
        "Parameters that stay in host memory although they have files.",
        ignored="host memory is bounded by the buffers alone",
        unit="elements",
        least=0,
        honours=0,
    )
    pin_memory: bool = _pin_memory()


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer:
    """Where optimizer state rests, and with it the update (stages 1 to 3)."""

    device: str = _device("offload_optimizer")
    nvme_path: str | None = _nvme_path()
    buffer_count: int = _buffer_count(4)
    pin_memory: bool = _pin_memory()
    pipeline_read: bool = key(
        False,
        "Read what the next update needs during this one.",
        ignored="reading, updating and writing always overlap",
        honours=True,
    )
    pipeline_write: bool = key(
        False,
        "Write what the last update made during this one.",
        ignored="reading, updating and writing always overlap",
        honours=True,
    )
    fast_init: bool = key(
        False,
        "Make the files faster at the start.",
        ignored="there is one way to make the files",
    )
    cpuadam_cores_perc: float = key(
        0.8,
        "Part of the cores that SuperOffload updates on.",
        ignored="it belongs to super_offload; set OMP_NUM_THREADS",
        least=0,
        most=1,
    )


@dataclass(frozen=True, kw_only=True)
class Aio:
    """How files are read and written, with nvme."""

    block_size: int = key(
        1_048_576,
        "Size of one request.",
        "`block_size` of `NVMe`",
        unit="bytes",
        least=1,
    )
    queue_depth: int = key(
        8,
        "Most requests in flight.",
        "`queue_depth` of `NVMe`",
        unit="requests",
        least=1,
    )
    intra_op_parallelism: int = key(
        1,
        "Threads that share one read or write.",
        ignored="queue_depth alone says how many requests are in flight",
        unit="threads",
        least=1,
    )
    single_submit: bool = key(
        False,
        "Hand requests over one by one, not as a group.",
        ignored="requests are handed over as they come",
    )
    overlap_events: bool = key(
        True,
        "Hand over new requests while others are in flight.",
        ignored="the queue is always kept full",
    )
