"""The machines that the book counts with, and the one formula that it counts by.

Every bandwidth is bytes a second in one direction, decimal, and the vendor's peak.
A run reaches less of it: `ATTAINED` says how much of the arithmetic. What it reaches
of a link has to be measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from minizero.lab.plots.style import short

ATTAINED = 0.4
"""The share of peak arithmetic that large runs sustain: 38 to 43 % of an H100's
(Grattafiori et al. 2024, table 4)."""


@dataclass(frozen=True)
class Node:
    """One host and its GPUs. All rates are a second; links are for one direction.

    gpus: GPUs of the node.
    peak: dense 16-bit FLOP of a GPU, summed in fp32.
    memory, hbm: bytes of a GPU's memory, and bytes it reads or writes.
    link: bytes that a GPU sends to the others of its node.
    network: bytes that a GPU sends to other nodes, its share of the node's ports.
    pcie: bytes of a GPU's slot, to or from the host.
    host, dram: bytes of the host's memory, and bytes it reads or writes.
    drives, drive: NVMe drives of the node, and bytes that one reads. Writing is about
        half as fast.
    sources: keys of the book's references.
    """

    name: str
    gpus: int
    peak: float
    memory: float
    hbm: float
    link: float
    network: float
    pcie: float
    host: float
    dram: float
    drives: int
    drive: float
    sources: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """FLOP a second that a GPU sustains in training."""
        return ATTAINED * self.peak

    @property
    def disk(self) -> float:
        """Bytes a second that all drives of the node read together."""
        return self.drives * self.drive


# A data sheet gives NVLink and PCIe for both directions together: here is half of it.
# A host's memory: sockets * channels * 8 bytes * transfers a second.
H100 = Node(
    "DGX H100",
    gpus=8,
    peak=989e12,
    memory=80e9,
    hbm=3350e9,
    link=450e9,
    network=50e9,  # 400 Gbit/s a GPU
    pcie=64e9,
    host=2e12,
    dram=2 * 8 * 8 * 4.8e9,
    drives=8,
    drive=6.5e9,
    sources=("nvidia2023h100", "nvidia2023dgxh100", "samsung2020pm9a3"),
)
A100 = Node(
    "DGX A100",
    gpus=8,
    peak=312e12,
    memory=80e9,
    hbm=2039e9,
    link=300e9,
    network=25e9,  # 200 Gbit/s a GPU
    pcie=32e9,
    host=2e12,
    dram=2 * 8 * 8 * 3.2e9,
    drives=8,
    drive=6.5e9,
    sources=("nvidia2021a100", "nvidia2021dgxa100", "samsung2020pm9a3"),
)
V100 = Node(
    "DGX-2 (V100)",
    gpus=16,
    peak=125e12,  # fp16: it has no bf16
    memory=32e9,
    hbm=900e9,
    link=150e9,
    network=6.25e9,  # eight ports of 100 Gbit/s for 16 GPUs
    pcie=16e9,
    host=1.5e12,
    dram=2 * 6 * 8 * 2.666e9,
    drives=8,
    drive=3.2e9,  # 1.6 GB/s for each GPU, as ZeRO-Infinity reports
    sources=("nvidia2020v100", "nvidia2018dgx2", "rajbhandari2021infinity"),
)
WORKSTATION = Node(
    "PC (RTX 4090)",
    gpus=1,
    peak=165e12,
    memory=24e9,
    hbm=1008e9,
    link=32e9,  # of a second card, over PCIe
    network=1.25e9,  # an office's 10 Gbit/s
    pcie=32e9,
    host=128e9,
    dram=2 * 8 * 5.2e9,
    drives=1,
    drive=6.5e9,
    sources=("nvidia2023ada", "amd2022ryzen", "samsung2020pm9a3"),
)
NODES = (H100, A100, V100, WORKSTATION)


def break_even(
    moved: float, bandwidth: float, flops: float, operations: float = 6
) -> float:
    """Tokens from which computing takes at least as long as moving: it can hide it.

    On T tokens a rank computes for operations * T / flops seconds a parameter, and
    moves `moved` bytes a parameter in moved / bandwidth seconds; T is between two
    such movements, so of a micro-batch or of a step. The parameters cancel. Without
    overlap a share 1 / (1 + T / break_even) of the time is spent waiting.

    operations: FLOP a parameter and token: 6 for forward and backward, 8 with the
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
    """Bytes a parameter that a rank sends in `times` gathers or scatters of all.

    times: 2 a step for data parallelism, ZeRO-1 and ZeRO-2, 3 for ZeRO-3; with k
        micro-batches k + 1 for ZeRO-2 and 3 k for ZeRO-3.
    itemsize: bytes of an element.
    """
    return times * itemsize * (ranks - 1) / ranks


ROWS = {
    "GPUs of a node": ("", lambda n: n.gpus),
    "16-bit arithmetic, peak": ("TFLOP/s", lambda n: n.peak / 1e12),
    "of which a run attains": ("TFLOP/s", lambda n: n.flops / 1e12),
    "GPU memory": ("GB", lambda n: n.memory / 1e9),
    "GPU memory, speed": ("GB/s", lambda n: n.hbm / 1e9),
    "between GPUs of a node": ("GB/s", lambda n: n.link / 1e9),
    "network, for a GPU": ("GB/s", lambda n: n.network / 1e9),
    "PCIe, for a GPU": ("GB/s", lambda n: n.pcie / 1e9),
    "host memory": ("GB", lambda n: n.host / 1e9),
    "host memory, speed": ("GB/s", lambda n: n.dram / 1e9),
    "disks of a node, reading": ("GB/s", lambda n: n.disk / 1e9),
}
"""By what the table shows: its unit, and the number in it."""


class Table:
    """A column for each node, a row for each quantity; a cell's last line."""

    def __init__(self, *nodes: Node) -> None:
        self.head = ["", *(n.name for n in nodes), ""]
        self.rows = [
            [name, *(short(float(f"{value(n):.4g}")) for n in nodes), unit]
            for name, (unit, value) in ROWS.items()
        ]

    def __repr__(self) -> str:
        columns = list(zip(self.head, *self.rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        lines = []
        for name, *numbers, unit in (self.head, *self.rows):
            middle = "  ".join(map(str.rjust, numbers, widths[1:-1]))
            lines.append(f"{name:{widths[0]}}  {middle} {unit}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def row(cells: list[str], tag: str) -> str:
            side = ["left", *["right"] * (len(cells) - 2), "left"]
            return "".join(
                f'<{tag} style="text-align: {s}">{escape(c)}</{tag}>'
                for c, s in zip(cells, side, strict=True)
            )

        body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in self.rows)
        return (
            '<div style="overflow-x: auto"><table><thead><tr>'
            f"{row(self.head, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"
        )


def table(*nodes: Node) -> Table:
    """The table of these nodes; of all of them by default."""
    return Table(*(nodes or NODES))
