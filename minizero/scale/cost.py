"""A job, the ways to train it, and what each costs: seconds of a unit, bytes of a GPU.

At the end what chapter 8's simulator takes: the layers of a job, and a rank's link.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..activations import MODES
from ..comm.quantized import BLOCK
from ..memory.placement import check
from ..memory.plan import PRECISIONS, Plan, estimate
from ..overlap.simulator import Buffer, Layer
from ..overlap.simulator import Machine as Link
from ..zero.parallelize import check_groups
from .machines import ADAM, BUS, STREAM, Machine, bus
from .shapes import Shape, check_counts

ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}


@dataclass(frozen=True)
class Job:
    """What is to be trained, and where.

    sequences: of a step, on all ranks. sequence: tokens of each. precision: one of
    `ITEMSIZES`; "fp32" has products in TF32, "fp8" is for the blocks' products alone.
    quantize: whether a plan may round what is sent (ZeRO++), which changes losses.
    reduce: in what gradients are sent (default: `precision`). logit: bytes that the
    loss needs for each logit: the fp32 log-softmax and two gradients of it, or 4 of a
    fused 16-bit kernel.
    """

    shape: Shape
    machine: Machine
    gpus: int
    sequences: int
    sequence: int
    precision: str = "bf16"
    quantize: bool = False
    reduce: str | None = None
    logit: int = 12

    def __post_init__(self) -> None:
        check_counts(gpus=self.gpus, sequence=self.sequence)
        check("precision", self.precision, ITEMSIZES)
        check("reduce", self.reduce or self.precision, ITEMSIZES)
        if self.sequences < 1 or self.sequences % self.gpus:
            more = (max(self.sequences_per_gpu, 0) + 1) * self.gpus
            raise ValueError(
                f"{self.sequences} sequences of a step cannot be shared equally by "
                f"{self.gpus} GPUs; use {more}, which are {more * self.sequence:,} tokens"
            )

    @property
    def sequences_per_gpu(self) -> int:
        """Sequences of a step that one GPU trains on."""
        return self.sequences // self.gpus

    @property
    def gpus_per_node(self) -> int:
        """GPUs of this job that share a host."""
        return min(self.machine.gpus, self.gpus)

    @property
    def device_bytes(self) -> float:
        """Bytes of a GPU's memory that a plan may use."""
        return (1 - self.machine.reserved) * self.machine.memory

    @property
    def host_bytes(self) -> float:
        """Bytes of the host's memory that a plan may use for each GPU."""
        return (1 - self.machine.reserved) * self.machine.host / self.gpus_per_node

    def allows(self, how: Candidate) -> bool:
        """Whether this job accepts a candidate, which may round what it sends."""
        return self.quantize or not how.weight_bits

    @property
    def reduced(self) -> int:
        """Bytes of an element of a gradient as it is reduced."""
        return ITEMSIZES[self.reduce or self.precision]


@dataclass(frozen=True)
class Candidate:
    """One way to train: a stage, its options, and how a batch is divided.

    checkpointing: what backward computes again, as `activations.Recompute` has it.
    accumulation: micro-batches of a step.
    group: ranks that share a copy of all that is sharded (MiCS); secondary: of the
    parameters alone (hpZ). weight_bits, gradient_bits: in which these are sent (qwZ,
    qgZ).
    """

    stage: int
    checkpointing: str = "none"
    micro_batch: int = 1
    accumulation: int = 1
    offload_optimizer: str | None = None
    offload_param: str | None = None
    group: int | None = None
    secondary: int | None = None
    weight_bits: int | None = None
    gradient_bits: int | None = None

    def __post_init__(self) -> None:
        check_counts(micro_batch=self.micro_batch, accumulation=self.accumulation)
        check("checkpointing", self.checkpointing, MODES)
        if self.secondary and (self.group or self.stage < 3):
            raise ValueError(
                "secondary keeps copies of parameters that are sharded over all ranks: "
                "use it at stage 3, without group"
            )
        bits = self.weight_bits, self.gradient_bits
        if self.plan.group or any(bits):
            check_groups(self.plan, *bits)

    @property
    def plan(self) -> Plan:
        """Where each category is stored, and over which ranks it is sharded."""
        plan = Plan.stage(
            self.stage, self.offload_optimizer, self.offload_param, self.group
        )
        if self.secondary:
            copy = replace(plan.parameters, group=self.secondary)
            plan = replace(plan, parameters=copy)
        return plan

    @property
    def extras(self) -> int:
        """How many options there are beside the stage: offload, groups, few bits."""
        used = self.offload_optimizer, self.offload_param, self.weight_bits
        return sum(map(bool, (*used, self.group or self.secondary)))

    @property
    def kind(self) -> str:
        """Stage, groups, bits and offload, in words."""
        moved = {"optimizer": self.offload_optimizer, "parameters": self.offload_param}
        off = " and ".join(name for name, place in moved.items() if place)
        return "".join((
            f"stage {self.stage}",
            f" in groups of {self.group}" if self.group else "",
            f", parameters in groups of {self.secondary}" * bool(self.secondary),
            ", sent in 8 and 4 bits" if self.weight_bits else "",
            f", {off} on the CPU" if off else "",
        ))  # fmt: skip

    @property
    def batching(self) -> str:
        """Checkpointing and micro-batches, in words."""
        batch = f"{self.accumulation} x {self.micro_batch} sequences"
        return f"{self.checkpointing.replace('none', 'no')} checkpointing; {batch}"

    def __str__(self) -> str:
        return f"{self.kind}; {self.batching}"


def adam_seconds(machine: Machine, gpus_per_node: int, on: str) -> float:
    """Seconds an element for Adam to read and write its bytes in the memory `on`.

    All GPUs of a node share the host's: ZeRO-Offload reports 0.22 s for 1e9 on a DGX-2
    (Ren et al. 2021, table 4), these bytes take 0.20.
    """
    if on == "device":
        return ADAM / (STREAM * machine.hbm)
    return ADAM * gpus_per_node / (BUS * machine.dram)


class Costs:
    """Seconds that a GPU computes for `tokens` tokens of a job, and bytes that it saves.

    A product takes its FLOP at the rate that large ones reach, and the bytes of its
    three matrices at the memory's rate, because a small one cannot hide them.
    """

    def __init__(self, job: Job, tokens: int) -> None:
        self.job, self.shape, self.machine = job, job.shape, job.machine
        self.tokens, self.itemsize = tokens, ITEMSIZES[job.precision]

    def memory(self, nbytes: float) -> float:
        """Seconds to read or write so many bytes."""
        return nbytes / (STREAM * self.machine.hbm)

    def product(self, m: int, n: int, k: int, faster: float = 1.0) -> float:
        """Seconds of [m, k] times [k, n]; in TF32 twice as many as in 16 bits."""
        computing = 2.0 * m * n * k / (self.machine.matmul * self.machine.peak)
        moved = self.itemsize * (m * n + m * k + n * k)
        return computing * self.itemsize / 2 / faster + self.memory(moved)

    def linear(self, i: int, o: int, faster: float = 1.0) -> tuple[float, float]:
        """Forward and backward of a linear layer: one product, and two."""
        t = self.tokens
        forward = self.product(t, o, i, faster)
        return forward, self.product(t, i, o, faster) + self.product(i, o, t, faster)

    def scores(self) -> tuple[float, float]:
        """Forward and backward of attention between its projections.

        Flash computes the causal half of the scores, and again in backward: five
        products for the forward's two. Its forward is 73/63 as efficient (Dao 2023).
        """
        # on the diagonal a tile of 128 keys is computed in full
        flops = 2.0 * self.tokens * (self.job.sequence + 128) * self.shape.hidden
        rate = self.machine.attention * self.machine.peak
        return flops / (rate * 73 / 63), 2.5 * flops / rate

    def passes(self) -> tuple[float, float]:
        """Forward and backward bytes of all operations that only read and write."""
        shape, h, f = self.shape, self.shape.hidden, self.shape.ffn
        around = 2 * h + 2 * shape.kv  # queries, keys, values and the result
        # norms 2 and 3 passes, residuals 3 and 3, copies of what attention takes
        forward, backward = 2 * (2 + 3) * h + 2 * around, 2 * (3 + 3) * h + 2 * around
        if shape.gated:  # silu, times; positions turned in fp32
            turned = 10 * (h + shape.kv)
            forward, backward = forward + 5 * f + turned, backward + 8 * f + turned
        else:  # gelu; gradients of biases are sums over tokens
            biases = sum(o for _, o in shape.products)
            forward, backward = forward + 2 * f, backward + 3 * f + biases
        if self.job.precision == "fp8":  # each input and gradient cast, and transposed
            forward += 2 * sum(i for i, _ in shape.products)
            backward += 2 * sum(o for _, o in shape.products)
        size = float(self.itemsize * self.tokens)
        return size * forward, size * backward

    def block(self, checkpointing: str) -> tuple[float, float]:
        """Forward and backward of one block, with what is computed again.

        "full" keeps the block's input; recomputation stops at the last tensor that was
        saved, so the last product is not repeated. "selective" keeps the results of
        the products and of attention.
        """
        faster = self.machine.fp8 if self.job.precision == "fp8" else 1.0
        pairs = [self.linear(i, o, faster) for i, o in self.shape.products]
        forward, backward = (sum(side) for side in zip(*pairs, strict=True))
        scores, scores_back = self.scores()
        passes, passes_back = map(self.memory, self.passes())
        again = {
            "none": 0.0,
            "selective": passes,
            "full": forward - pairs[-1][0] + scores + passes,
        }[checkpointing]
        forward += scores + passes
        return forward, backward + scores_back + passes_back + again

    def head(self) -> tuple[float, float]:
        """Forward and backward of the head, and a cross-entropy in fp32."""
        h, vocab = self.shape.hidden, self.shape.vocab
        forward, backward = self.linear(h, vocab)
        logits = float(self.tokens * vocab)
        # cast (2 + 4), log-softmax (4 + 4); its backward (4 + 12), cast (4 + 2)
        return forward + self.memory(14 * logits), backward + self.memory(22 * logits)

    def element(self, how: Candidate) -> tuple[float, float, float, float]:
        """Of an element: bytes sent to gather and to reduce; memory seconds of each.

        Quantized parameters are decoded; gradients copied into one buffer, cast if they
        are reduced in another dtype, divided, and encoded and decoded if quantized.
        """
        job, size, reduced = self.job, self.itemsize, self.job.reduced
        gather_bytes, reduce_bytes = (
            bits / 8 + 1 / BLOCK if bits else full  # a block has a scale of one byte
            for bits, full in ((how.weight_bits, size), (how.gradient_bits, reduced))
        )
        decoding = (size + gather_bytes) * bool(how.weight_bits)
        casting = (size + reduced) * (size != reduced)
        reducing: float = (2 * size + casting + 2 * reduced) * (self.job.gpus > 1)
        reducing += 2 * (reduced + reduce_bytes) * bool(how.gradient_bits)
        if how.gradient_bits and not how.plan.group and job.gpus > job.gpus_per_node:
            reduce_bytes *= job.gpus_per_node  # not added on the way, as in a ring
        return gather_bytes, reduce_bytes, self.memory(decoding), self.memory(reducing)

    def update(self, plan: Plan) -> float:
        """Seconds an element for Adam and its copies, of which the slowest counts.

        To the host gradients come over the PCIe slot, and parameters go back. A disk
        reads 16 bytes and writes as many at half the speed.
        """
        machine, gpus, on = self.machine, self.job.gpus_per_node, plan.optimizer.on
        arithmetic = adam_seconds(machine, gpus, on)
        if on == "device":
            return arithmetic
        disk = 16 * 3 * gpus / machine.disk * (on == "nvme")
        return max(arithmetic, 6 / machine.slot(gpus), disk)

    def saved(self, checkpointing: str = "none") -> float:
        """Bytes that a block saves for backward.

        Korthikanti et al. 2022, sec. 4.1, without dropout: its input, the norms'
        results, queries, keys and values, the attention's result with a number a row,
        and the hidden layer; or what `checkpointing` keeps of them.
        """
        shape, h = self.shape, self.shape.hidden
        rows = 4.0 * self.tokens * shape.heads  # the logarithms of the sums
        if checkpointing == "none":
            wide = (4 if shape.gated else 2) * shape.ffn
            return self.itemsize * self.tokens * (6 * h + 2 * shape.kv + wide) + rows
        if checkpointing == "full":
            return self.itemsize * self.tokens * h
        elements = sum(o for _, o in shape.products) + 2 * h
        return self.itemsize * self.tokens * elements + rows

    def activations(self, checkpointing: str) -> float:
        """Bytes of activations at their peak in a step.

        All blocks have saved what they keep. Then there are, whichever is most: what
        the loss needs; the head's gradient and two copies of it; or what the last block
        computes again, with its gradients and those of its weights.
        """
        shape, size = self.shape, self.itemsize
        kept = self.saved(checkpointing)
        loss = self.tokens * (self.job.logit * shape.vocab + 2 * size * shape.hidden)
        wide = (2 if shape.gated else 1) * shape.ffn + shape.hidden
        weights = 2 * max(i * o for i, o in shape.products) / (1 + shape.gated)
        block = self.saved() - kept + size * (self.tokens * wide + weights)
        head = 3 * size * shape.vocab * shape.hidden
        return shape.layers * kept + max(loss, head, block)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of each category; `host` and `disk` off the device.

    parameters: the shard, and what is unsharded at once: the root and two blocks.
    gradients: the shard, and one unit's before and while it is reduced. The categories
    peak at different moments, so their sum is a bound on the peak of all.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    host: float = 0.0
    disk: float = 0.0

    @property
    def total(self) -> float:
        """On the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    def fits(self, job: Job) -> bool:
        """On the device, and with all ranks of a node in the host."""
        return self.total <= job.device_bytes and self.host <= job.host_bytes

    @classmethod
    def of(cls, job: Job, how: Candidate) -> Memory:
        """What a rank needs, before fragmentation and what CUDA takes."""
        shape, plan = job.shape, how.plan
        costs = Costs(job, how.micro_batch * job.sequence)
        kind = "bf16" if job.precision == "fp8" else job.precision
        state = estimate(shape.parameters, job.gpus, plan, kind)
        parameter, gradient, _ = PRECISIONS[kind]
        unit = max(shape.block, shape.root)
        gathered = shape.root + 2 * shape.block if plan.parameters.sharded else 0
        reducing = unit * (gradient + job.reduced) if plan.gradients.sharded else 0
        return cls(
            state.parameters + parameter * gathered,
            state.gradients + reducing,
            state.optimizer,
            costs.activations(how.checkpointing),
            state.host.total,
            state.disk.total,
        )


def layers_of(costs: Costs, how: Candidate, update: float) -> list[Layer]:
    """The root and the blocks; `update`: seconds an element."""
    shape, job = costs.shape, costs.job
    gathers, reduces, decoding, reducing = costs.element(how)

    def layer(name: str, n: int, forward: float, backward: float) -> Layer:
        padded = -(-n // job.gpus) * job.gpus
        sent, reduced = (gathers, reduces), job.reduced
        flat = Buffer(padded, costs.itemsize, reduced=reduced, sent=sent)
        forward += decoding * n
        backward += (decoding + reducing) * n
        return Layer(name, [flat], forward, backward, update * n)

    block = costs.block(how.checkpointing)
    names = [f"block {i}" for i in range(shape.layers)]
    root = layer("root", shape.root, *costs.head())
    return [root, *(layer(name, shape.block, *block) for name in names)]


def link_of(machine: Machine, ranks: int, plan: Plan) -> Link:
    """The ring, of a group if there are groups; then `across` is the other one.

    Parameters on the host cross the slot of each GPU before the ring passes them on.
    """
    across = None
    if plan.group:  # each rank of a group has its own port to the other groups
        copies, ranks = ranks // plan.group, plan.group
        if copies > 1:
            across = Link(copies, *bus(machine, copies, 1))
    latency, speed = bus(machine, ranks)
    if plan.parameters.on != "device":
        if ranks == 1:
            return Link(1, latency, speed, bus=machine.slot(1))
        # its own shard comes in, while N - 1 others come over the link
        speed = 1 / (1 / speed + 1 / (machine.slot(machine.gpus) * (ranks - 1)))
    return Link(ranks, latency, speed, contention=machine.contention, across=across)
