"""The machines that the book computes with: their data sheets, and what runs reach.

Every bandwidth is bytes a second in one direction, decimal, and the vendor's peak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..memory.placement import check

ATTAINED = 0.4
"""The share of peak arithmetic that large runs sustain: 38 to 43 % of an H100's
(Grattafiori et al. 2024, table 4)."""

# What a run reaches of a data sheet, in shares. None is fitted to a run.
STREAM = 0.85  # of `hbm`, reading and writing: Dao et al. 2022 count 1.5 to 1.7 TB/s
NVLINK = 0.78  # of `link`: NCCL's own model caps an A100's bus bandwidth at 235 GB/s
NETWORK = 0.9  # of `network`, behind headers and acknowledgements
BUS = 0.8  # of `pcie` and of `dram`
ADAM = 40
"""Bytes that Adam reads and writes a parameter, as chapter 10 counts them: 28 in fp32;
in mixed precision 12 more, to widen the gradient and to round the parameter."""
# NCCL's own model of a ring (src/graph/tuning.cc): seconds to start, and of each hop
# within a node and between two.
START, HOP, FAR_HOP = 8.4e-6, 3.4e-6, 14e-6


@dataclass(frozen=True)
class Machine:
    """One host and its GPUs. All rates are a second; links are for one direction.

    gpus: GPUs of the node.
    peak: dense 16-bit FLOP of a GPU, summed in fp32.
    memory, hbm: bytes of a GPU's memory, and bytes it reads or writes.
    link: bytes that a GPU sends to the others of its node.
    network: bytes that a GPU sends to other nodes, its share of the node's ports.
    pcie: bytes of a GPU's slot, to or from the host. shared: GPUs behind one such link
        to the host: a switch joins them.
    host, dram: bytes of the host's memory, and bytes it reads or writes.
    drives, drive: NVMe drives of the node, and bytes that one reads. Writing is about
        half as fast.
    sources: keys of the book's references.
    matmul, attention: shares of `peak` that large matrix products reach, and the
        backward of flash attention. The two constants that `scale.published` fits.
    fp8: how many times faster 8-bit products are; 1 where there are none.
    contention: share of its arithmetic that a GPU loses while a collective runs, whose
        kernels hold 8 to 16 of 108 multiprocessors.
    reserved: the share of its memory that CUDA, NCCL and the allocator's gaps take.
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
    matmul: float = 0.7
    attention: float = 0.3
    fp8: float = 1.0
    shared: int = 1
    contention: float = 0.1
    reserved: float = 0.1

    def slot(self, gpus: int) -> float:
        """Bytes a second between the host and each of `gpus` GPUs that copy at once."""
        return BUS * self.pcie / min(self.shared, gpus)

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
H100 = Machine(
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
    matmul=0.641,
    attention=0.172,
    fp8=2.0,
)
A100 = Machine(
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
    matmul=0.784,
    attention=0.299,
    shared=2,  # four switches
)
A100_40GB = replace(
    A100, name="DGX A100 40GB", memory=40e9, hbm=1555e9, matmul=0.759, attention=0.303
)
V100 = Machine(
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
    matmul=0.41,  # one GPU at 39 and at 40e12 FLOP/s: Shoeybi et al. 2019, Ren et al. 2021
    shared=4,  # ZeRO-Infinity, fig. 2b: 3 GB/s for each of 16 that copy at once
)
WORKSTATION = Machine(
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
MACHINES = {
    "h100-80gb": H100,
    "a100-80gb": A100,
    "a100-40gb": A100_40GB,
    "v100-32gb": V100,
    "rtx-4090": WORKSTATION,
}


def find(machine: str) -> Machine:
    """The machine of that name; ValueError with the names there are."""
    check("machine", machine, MACHINES)
    return MACHINES[machine]


def bus(
    machine: Machine, ranks: int, per_node: int | None = None
) -> tuple[float, float]:
    """Seconds that a ring of `ranks` takes to start, and bytes a second of each rank.

    A ring enters each node once and leaves it once, so it uses all ports of a node
    together. Its speed is the slower of NVLink and all these ports.
    per_node: ranks of the ring in a node (default: all GPUs of a node).
    """
    per_node = per_node or machine.gpus
    nodes = -(-ranks // per_node)
    hops = (ranks - nodes) * HOP + (nodes - 1) * FAR_HOP
    speed = NVLINK * machine.link
    if nodes > 1:
        speed = min(speed, NETWORK * machine.network * per_node)
    return (START + hops if ranks > 1 else 0.0), speed
