"""The machines that the book counts with, and the one formula that it counts by.

Their numbers are those of `minizero.scale.machines`: the vendors' peaks, and what a run
attains of the arithmetic.
"""

from __future__ import annotations

from minizero.lab.plots.charts import peer_table
from minizero.lab.plots.style import short
from minizero.scale.machines import A100, H100, V100, WORKSTATION, Machine

NODES = (H100, A100, V100, WORKSTATION)


def break_even(
    moved: float, bandwidth: float, flops: float, operations: float = 6
) -> float:
    """Tokens from which computing takes at least as long as moving: it can hide it.

    On T tokens a rank computes for operations * T / flops seconds per parameter, and
    moves `moved` bytes per parameter in moved / bandwidth seconds; T is between two
    such movements, so of a micro-batch or of a step. The parameters cancel. Without
    overlap a share 1 / (1 + T / break_even) of the time is spent waiting.

    operations: FLOP per parameter and token: 6 for forward and backward, 8 with the
        forward recomputed, 2 and 4 for one of the two.
    moved: see `sent` for collectives.

    Raises ValueError unless all are above 0.
    """
    for name, value in {
        "moved": moved, "bandwidth": bandwidth, "flops": flops, "operations": operations
    }.items():  # fmt: skip
        if not value > 0:
            raise ValueError(f"{name} must be above 0, not {value!r}")
    return moved * flops / (operations * bandwidth)


def sent(times: float, ranks: int, itemsize: int = 2) -> float:
    """Bytes per parameter that a rank sends in `times` gathers or scatters of all.

    times: 2 a step for data parallelism, ZeRO-1 and ZeRO-2, 3 for ZeRO-3; with k
        micro-batches k + 1 for ZeRO-2 and 3 k for ZeRO-3.
    itemsize: bytes of an element.
    """
    return times * itemsize * (ranks - 1) / ranks


def intensity(
    what: str,
    sequence: int,
    micro_batch: int,
    hidden: int = 0,
    interval: int = 1,
) -> float:
    """Operations for each byte that a state moves: FLOP/byte, a GPU.

    `what`: "parameters" (with their gradients), "optimizer" or
    "activations" (checkpoints, one every `interval` blocks of size
    `hidden`). With 16-bit parameters and gradients, fp32 optimizer states
    and full recomputation (Rajbhandari et al. 2021, sec. 4.1): forward,
    recomputation and twice backward are 8 operations per token and parameter.
    """
    tokens = sequence * micro_batch
    return {
        # read for forward, recomputation and backward, written as gradients
        "parameters": 8 * tokens / (2 * 4),
        # 16 bytes read and 16 written in a step
        "optimizer": 8 * tokens / (16 * 2),
        # 2 bytes written and read, against 8 x 12 h^2 a token and block
        "activations": 24.0 * hidden * interval,
    }[what]


def efficiency(ait: float, bandwidth: float, peak: float) -> float:
    """The share of time spent computing, if nothing overlaps: 0 to 1.

    `ait`: operations a byte moved. `bandwidth`: bytes a second. `peak`:
    operations a second while computing (Rajbhandari et al. 2021, sec. 4):
    ait * bandwidth / (ait * bandwidth + peak).
    """
    return ait * bandwidth / (ait * bandwidth + peak)


ROWS = {
    "GPUs of a node": lambda n: n.gpus,
    "16-bit arithmetic, peak, TFLOP/s": lambda n: n.peak / 1e12,
    "of which a run attains, TFLOP/s": lambda n: n.flops / 1e12,
    "GPU memory, GB": lambda n: n.memory / 1e9,
    "GPU memory, GB/s": lambda n: n.hbm / 1e9,
    "between GPUs of a node, GB/s": lambda n: n.link / 1e9,
    "network, for a GPU, GB/s": lambda n: n.network / 1e9,
    "PCIe, for a GPU, GB/s": lambda n: n.pcie / 1e9,
    "host memory, GB": lambda n: n.host / 1e9,
    "host memory, GB/s": lambda n: n.dram / 1e9,
    "disks of a node, reading, GB/s": lambda n: n.disk / 1e9,
}
"""By what the table shows, with its unit: the number in it."""


class Table(str):
    """A table in Markdown, which a notebook draws."""

    __repr__ = _repr_markdown_ = str.__str__


def table(*nodes: Machine) -> Table:
    """A column for each of these nodes (default: all), a row for each quantity."""
    nodes = nodes or NODES
    rows = [
        [name, *(short(float(f"{value(n):.4g}")) for n in nodes)]
        for name, value in ROWS.items()
    ]
    return Table(peer_table(["", *(n.name for n in nodes)], rows))
