"""The real engine's step as one rank of many, on tensors without memory.

One process takes the part of a rank: torch's fake process group lets collectives return
at once, and fake tensors have shapes and no contents. Everything else is the engine that
trains: its units, its schedule, its calls.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .. import comm
from ..comm import Ledger, collectives
from ..engine import Engine, initialize
from ..memory import labels
from ..memory.placement import check
from ..memory.tracker import Tracker
from ..offload import delayed, disk
from ..offload.swap_file import Transfer
from .shapes import Shape

aten = torch.ops.aten


class FakeValues(TorchDispatchMode):
    """Fake tensors have no values: they compare as equal, and a number reads as NaN.

    NaN is above no limit, so no overflow is found, and no step is skipped.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.allclose.default, aten.equal.default):
            return True
        if func is aten._local_scalar_dense.default:
            return float("nan") if args[0].is_floating_point() else 0
        return func(*args, **(kwargs or {}))


class FakeTracker(Tracker):
    """A tracker of storages without memory."""

    def see(self, storage: UntypedStorage, category: str | None = None) -> None:
        if storage.device.type == "meta":  # else a real tensor, not of this run
            super().see(storage, category)

    def at_peak(self) -> tuple[str, dict[str, int]]:
        """The last mark before the peak, and the live bytes of each category then."""
        totals = [sum(sample.live.values()) for sample in self.samples]
        first = totals.index(max(totals))
        marks = [s for s in self.samples[: first + 1] if s.event]
        when = f"{marks[-1].event} {marks[-1].unit}".strip() if marks else ""
        return when, {k: n for k, n in self.samples[first].live.items() if n}


class InstantFile:
    """In place of a swap file: reads and writes are over at once, and move nothing."""

    def __init__(self, folder: Path, *limits: int) -> None:
        self.size = 0

    def allocate(self, nbytes: int) -> int:
        self.size += nbytes
        return self.size - nbytes

    def read(self, offset: int, buffer: Tensor) -> Transfer:
        return Transfer(time.perf_counter(), [])

    write = read

    def close(self) -> None: ...


class InstantThread:
    """In place of a thread: what is submitted has run when `submit` returns."""

    def __init__(self, *args: object) -> None: ...

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args))
        return done


def _address(tensor: Tensor) -> int:
    """In place of `data_ptr`: equal for two tensors that share their first element."""
    storage = tensor.untyped_storage()
    return (storage._cdata << 44) + tensor.storage_offset() * tensor.itemsize


@contextmanager
def rehearsal(world_size: int, rank: int, device: str) -> Iterator[FakeTensorMode]:
    """Inside, this process is `rank` of `world_size`, and tensors have no memory."""
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
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        for owner, name, value in (
            (FakeTensor, "data_ptr", _address),
            # on a real GPU the engine would ask for pinned memory and streams
            (torch.cuda, "is_available", lambda: False),
            (disk, "SwapFile", InstantFile),
            (delayed, "ThreadPoolExecutor", InstantThread),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(labels.separate_labels())
        stack.enter_context(patch.dict(collectives.sequences, clear=True))
        stack.enter_context(comm.algorithm("backend" if device == "cuda" else "direct"))
        stack.enter_context(mode)
        stack.enter_context(FakeValues())
        yield mode


@dataclass
class DryRun:
    """What one rank would do. Bytes; on the device unless said otherwise.

    peak: most live bytes in a step; when: the last call before that moment, in words.
    at_peak: the bytes of each category then; peaks: the most of each category, at
    moments of their own. between: the bytes of each category between steps. host: most
    in host memory. building: most while the engine was made. calls: the ledger.
    """

    world_size: int
    rank: int
    budget: float | None
    parameters: int
    peak: int
    when: str
    at_peak: dict[str, int]
    peaks: dict[str, int]
    host: int
    building: int
    between: dict[str, int]
    calls: Ledger = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.budget is None or self.peak <= self.budget

    def __str__(self) -> str:
        lines = [
            f"rank {self.rank} of {self.world_size}, {self.parameters / 1e9:.2f}B "
            f"parameters; GB = 10^9 bytes",
            f"{'':14}{'at the peak':>12}{'own peak':>12}{'between steps':>15}",
        ]
        for name, most in self.peaks.items():
            now, later = self.at_peak.get(name, 0), self.between.get(name, 0)
            if most:
                row = f"{now / 1e9:12.2f}{most / 1e9:12.2f}{later / 1e9:15.2f}"
                lines.append(f"{name:14}{row}")
        total = sum(self.between.values()) / 1e9
        moment = f"at {self.when!r}" if self.when else "before the first collective"
        lines += [
            f"{'together':14}{self.peak / 1e9:12.2f}{'':12}{total:15.2f}",
            f"The peak is {moment}. The categories have their own peaks at other moments,",
            "so those do not add up to it. Host memory: "
            f"{self.host / 1e9:.2f} GB; while building: {self.building / 1e9:.2f} GB.",
            "",
            self.calls.table(),
        ]
        if self.budget is not None:
            word = "fits" if self.fits else "does not fit"
            lines += ["", f"{word} in {self.budget / 1e9:.1f} GB"]
        return "\n".join(lines)


def dryrun(
    build_model: Callable[[], nn.Module],
    config: dict[str, Any],
    *,
    world_size: int,
    batch: Any,
    device: str = "cuda",
    budget: float | None = None,
    rank: int = 0,
) -> DryRun:
    """Train two steps with the real engine, as one rank of many, without hardware.

    The second step is the one that is measured.

    build_model: makes the model, on the CPU; its tensors will have shapes and no
        memory. It must return a loss when it is given the batch.
    config: of `minizero.initialize`, as a dict; files of "nvme" are not made.
    batch: one rank's micro-batch: a tuple of tensors, or a dict of them.
    device: whose collectives: "cuda" for NCCL's own, "cpu" for gloo's.
    budget: bytes of the device, for `DryRun.fits`.

    RuntimeError in a process that is a rank already; ValueError for another device.
    """
    check("device", device, ("cuda", "cpu"))
    with rehearsal(world_size, rank, device) as mode:
        with FakeTracker() as making:
            engine, *_ = initialize(model=build_model(), config=config)
        args = tree_map_only(
            Tensor, lambda t: mode.from_tensor(t, static_shapes=True), batch
        )
        _step(engine, args)  # the optimizer makes its states
        gc.collect()
        with FakeTracker() as seen, comm.ledger() as calls:
            _step(engine, args)
        count = sum(slot.numel for flat in engine.net.flats for slot in flat.slots)
        when, at_peak = seen.at_peak()
        return DryRun(
            world_size, rank, budget, count, seen.peak,
            when, at_peak, seen.peaks, seen.host_peak, making.peak, dict(seen.live),
            calls,
        )  # fmt: skip


def _step(engine: Engine, batch: Any) -> None:
    """One step, in which every micro-batch is this one."""
    for _ in range(engine.gradient_accumulation_steps()):
        out = engine(**batch) if isinstance(batch, dict) else engine(*batch)
        if not isinstance(out, Tensor):
            out = out[0] if isinstance(out, tuple) else out.loss
        engine.backward(out)
        engine.step()


class Block(nn.Module):
    """Attention and a feed-forward layer of a `Shape`, [batch, sequence, hidden].

    Both norms are layer norms: in a gated shape they stand for RMS norms, whose fused
    kernels save as much.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, bias = shape, not shape.gated
        self.norm1 = nn.LayerNorm(shape.hidden, bias=bias)
        self.norm2 = nn.LayerNorm(shape.hidden, bias=bias)
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(i, o, bias=bias) for i, o in shape.products
        )

    def forward(self, x: Tensor) -> Tensor:
        shape, (batch, sequence, hidden) = self.shape, x.shape
        split = self.qkv(self.norm1(x)).split([hidden, shape.kv, shape.kv], -1)
        heads = batch, sequence, -1, hidden // shape.heads
        q, k, v = (part.view(heads).transpose(1, 2) for part in split)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=shape.key_heads < shape.heads
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))
        y = self.up(self.norm2(x))
        if shape.gated:
            gate, y = y.chunk(2, -1)
            return x + self.down(F.silu(gate) * y)
        return x + self.down(F.gelu(y))


class Decoder(nn.Module):
    """A decoder of any shape, to rehearse with: tokens and targets [batch, sequence] to
    their mean cross-entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, bias=not shape.gated)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())
