"""`python -m minizero train`: a small GPT trained by the engine, beside the formulas.

The report puts the bytes that a rank held and the elements that it sent beside what the
formulas of chapters 1 and 3 say.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import RLock
from typing import Any

import torch

import minizero
from minizero import checkpoint, comm, zero
from minizero.activations import recompute_units
from minizero.comm import Call
from minizero.config import read
from minizero.engine import Engine, trace
from minizero.lab.models.corpus import Corpus, rows_per_rank
from minizero.lab.models.gpt import GPT, GPTConfig, count_parameters, decay_groups
from minizero.memory.plan import Plan, estimate
from minizero.memory.tracker import Tracker
from minizero.offload import NVMe
from minizero.ranks import device, rank, world_size

STATE = ("parameters", "gradients", "optimizer")
CHECKS = ("gradient norm", "overflow")  # what is sent beside the states
# a job that goes on may change these, because its losses do not depend on them
FREE = {"stage", "offload_optimizer", "offload_param", "nvme", "overlap", "trace"}
FREE |= {"precision", "checkpointing", "out", "save_every", "keep", "resume", "steps"}


@dataclass(frozen=True)
class Job:
    """What to train, and how; the fields are the options of the command line.

    batch: sequences of a step, over all ranks. clip: largest norm of the gradient.
    offload_optimizer, offload_param: "cpu" or "nvme" (files in `nvme`), or None.
    save_every: steps between two checkpoints in `out`. keep: how many of them stay.
    resume: go on from the newest. trace: file for the trace of the first updates.
    """

    stage: int = 3
    model: str = "1m"
    steps: int = 200
    batch: int = 16
    sequence: int = 128
    lr: float = 2e-3
    clip: float = 1.0
    precision: str = "fp32"
    offload_optimizer: str | None = None
    offload_param: str | None = None
    nvme: str | None = None
    overlap: bool = False
    checkpointing: str = "none"
    seed: int = 0
    data: str | None = None
    out: str = "runs/train"
    save_every: int | None = None
    keep: int = 2
    resume: bool = False
    trace: str | None = None

    @property
    def plan(self) -> Plan:
        return Plan.stage(self.stage, self.offload_optimizer, self.offload_param)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return Path(self.out, "checkpoints")

    def config(self, ranks: int) -> dict[str, Any]:
        """The engine's config."""
        zero: dict[str, Any] = {"stage": self.stage, "overlap_comm": self.overlap}
        if self.stage == 3:  # no unit is kept, so that bytes are the formula's
            zero["stage3_param_persistence_threshold"] = 0
        for name in ("offload_optimizer", "offload_param"):
            if place := getattr(self, name):
                files = {"nvme_path": self.nvme or "/tmp"} if place == "nvme" else {}
                zero[name] = {"device": place} | files
        return {
            "train_micro_batch_size_per_gpu": rows_per_rank(self.batch, ranks),
            "gradient_clipping": self.clip,
            "steps_per_print": 0,
            "zero_optimization": zero,
            **({} if self.precision == "fp32" else {self.precision: {"enabled": True}}),
        }

    def check(self, ranks: int) -> None:
        """Find bad input before any rank is started; raises ValueError or OSError."""
        estimate(1, ranks, self.plan, self.precision)
        model = GPTConfig.named(self.model)
        if not 1 <= self.sequence <= model.sequence:
            raise ValueError(
                f"sequence must be between 1 and {model.sequence} for the model "
                f"{self.model!r}, not {self.sequence}"
            )
        if not self.lr > 0 or not self.clip > 0:
            raise ValueError(f"lr and clip must be above 0, not {self.lr}, {self.clip}")
        for name in ("steps", "save_every", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        read(self.config(ranks), ranks)
        Corpus(self.data).batch(0, 0, ranks, self.batch, self.sequence)
        self._check_checkpoints()
        Path(self.out).mkdir(parents=True, exist_ok=True)

    def _check_checkpoints(self) -> None:
        """Raise ValueError unless the checkpoints in `out` fit to this job."""
        if not checkpoint.exists(self.checkpoints):
            return
        if not self.resume:
            if self.save_every:
                raise ValueError(
                    f"{self.checkpoints} has checkpoints of another run; go on from "
                    "them with --resume, give another folder with --out, or delete them"
                )
            return
        client = checkpoint.read_extra(self.checkpoints).get("client") or {}
        if "job" not in client:
            raise ValueError(
                f"{self.checkpoints} has checkpoints of another program; give another "
                "--out"
            )
        for name, value in asdict(self).items():
            if name not in FREE and client["job"].get(name) != value:
                raise ValueError(
                    f"the run in {self.checkpoints} has {name} "
                    f"{client['job'].get(name)}, not {value}; resume it with the same, "
                    "or start another one with --out"
                )
        if len(client["losses"]) >= self.steps:
            raise ValueError(
                f"the run in {self.checkpoints} has made all its steps; "
                "give more with --steps"
            )


def train(job: Job) -> dict[str, Any]:
    """Train on every rank; returns rank 0's report, which rank 0 also writes."""
    from tqdm import tqdm

    tqdm.set_lock(RLock())  # its own has a semaphore, which a killed rank leaves behind
    corpus, config = Corpus(job.data), job.config(world_size())
    torch.manual_seed(job.seed)
    with comm.ledger() as calls, Tracker() as tracker:
        with torch.device(device()), zero.Init(config=config):
            model = GPT(GPTConfig.named(job.model))
        recompute_units(model, job.checkpointing)
        optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=job.lr, fused=True)
        engine, *_ = minizero.initialize(
            model=model, optimizer=optimizer, config=config,
            lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(
                o, lambda step: learning_rate(step, job.steps)
            ),
        )  # fmt: skip
        losses: list[float] = []
        if job.resume and checkpoint.exists(job.checkpoints):
            _, state = engine.load_checkpoint(job.checkpoints)
            losses = list((state or {})["losses"])
            for group in optimizer.param_groups:  # there may be more --steps now
                updates = engine.lr_scheduler.last_epoch
                group["lr"] = job.lr * learning_rate(updates, job.steps)
        first, seconds = len(losses), []
        bar = tqdm(total=job.steps, initial=first, disable=rank() != 0, unit="step")
        # two updates show all there is; the later steps need not pay for the counting
        with trace(engine, job.trace) if job.trace else nullcontext():
            while len(losses) < job.steps and engine.global_steps < first + 2:
                seconds.append(_step(engine, corpus, job, losses, bar))
        held = _bytes(engine, job, tracker)
    with comm.ledger() as later:
        while len(losses) < job.steps:
            seconds.append(_step(engine, corpus, job, losses, bar))
    bar.close()
    report = {
        "ranks": world_size(),
        "n_params": count_parameters(model.config),
        "losses": losses,
        "valid_loss": _validate(engine, corpus, job),
        "tokens_per_second": job.batch * job.sequence / statistics.median(seconds),
        "skipped_steps": engine.skipped_steps,
        "peak": tracker.peak,
        "bytes": held,
        "sent": _sent(engine, [*calls, *later], len(losses) - first),
        "sample": _sample(model, job),
    }
    weights = engine.module_state_dict()
    engine.destroy()
    if rank() == 0:
        _write(job, report, weights)
    return report


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def _step(
    engine: Engine, corpus: Corpus, job: Job, losses: list[float], bar: Any
) -> float:
    """One step on this rank's rows, and a checkpoint if it is time; its seconds."""
    started = time.perf_counter()
    args = len(losses), rank(), world_size(), job.batch, job.sequence, job.seed
    x, y = (t.to(device()) for t in corpus.batch(*args))
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()
    mean = loss.detach().float().clone().view(1)
    with comm.phase("report"):
        comm.all_reduce(mean)
    losses.append(mean.item() / world_size())
    seconds = time.perf_counter() - started
    speed = f"loss {losses[-1]:.3f}, {job.batch * job.sequence / seconds:,.0f} tokens/s"
    bar.set_postfix_str(speed, refresh=False)
    bar.update()
    if job.save_every and len(losses) % job.save_every == 0:
        state = {"losses": losses, "job": asdict(job)}
        tag = f"step-{len(losses)}"
        engine.save_checkpoint(job.checkpoints, tag, state, keep=job.keep)
    return seconds


@torch.no_grad()
def _validate(engine: Engine, corpus: Corpus, job: Job, batches: int = 4) -> float:
    """Mean loss over held-out text and all ranks."""
    engine.eval()
    total = torch.zeros(1, device=device())
    sequence = min(job.sequence, len(corpus.valid) - 1)
    for step in range(batches):
        args = step, rank(), world_size(), job.batch, sequence, job.seed, "valid"
        x, y = (t.to(device()) for t in corpus.batch(*args))
        total += engine(x, y)
    comm.all_reduce(total)
    engine.train()
    return total.item() / (batches * world_size())


def _sample(model: GPT, job: Job, length: int = 200) -> str:
    """Text that the model continues; every rank draws the same bytes."""
    generator = torch.Generator().manual_seed(job.seed)
    text = b"def " + model.generate(b"def ", length, 0.7, generator)
    shown = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in shown)


def _bytes(engine: Engine, job: Job, tracker: Tracker) -> dict[str, list[float]]:
    """What a rank holds between two steps, by category and place: measured, and by the
    formula, with the padding of shards and Adam's step counters."""
    flats = [flat for unit in engine.net.units for flat in unit.trainable]
    padded = sum(flat.padded for flat in flats)
    formula = estimate(padded, world_size(), job.plan, job.precision)
    counters = {"host" if job.offload_optimizer else "device": 4 * len(flats)}
    storage = engine.net.storage
    disk = vars(storage.on_disk) if isinstance(storage, NVMe) else {}
    rows = {}
    for place, held, expected in (
        ("device", tracker.live, formula),
        ("host", tracker.host, formula.host),
        ("disk", disk, formula.disk),
    ):
        for name in STATE:
            more = counters.get(place, 0) if name == "optimizer" else 0
            pair = [held.get(name, 0), getattr(expected, name) + more]
            if any(pair):
                rows[f"{name}, {place}"] = pair
    return rows


def _sent(engine: Engine, calls: list[Call], steps: int) -> dict[str, list[float]]:
    """Elements that this rank sent a step: measured, and by the formula with padding.

    Skipped steps publish nothing, so those calls are divided by the others.
    """
    counted: dict[str, float] = {}
    for call in calls:
        if call.phase in ("forward", "backward", "step") and call.unit not in CHECKS:
            made = steps - engine.skipped_steps * (call.phase == "step")
            name = f"{call.phase}: {call.op}"
            counted[name] = counted.get(name, 0.0) + call.sent / made
    factor = 3 if engine.net.plan.parameters.sharded else 2
    padded = sum(flat.padded for unit in engine.net.units for flat in unit.flats)
    formula = factor * padded * (world_size() - 1) / world_size()
    rows = {name: [n] for name, n in counted.items()}
    return rows | {"together": [sum(counted.values()), formula]}


def _write(job: Job, report: dict[str, Any], weights: dict[str, Any]) -> None:
    """The weights, the report as data, and the loss curve as a picture."""
    from safetensors.torch import save

    from minizero.lab.plots import loss_curves

    out = Path(job.out)
    # a file has no two names for one tensor: tied weights are written twice
    data = save({k: v.clone() for k, v in weights.items()})
    # `save_file` would make a file that its owner alone may read
    (out / "weights.safetensors").write_bytes(data)
    text = json.dumps({"job": asdict(job), **report}, indent=1)
    (out / "report.json").write_text(text)
    figure = loss_curves({f"{job.model}, stage {job.stage}": report["losses"]})
    figure.savefig(out / "loss.png", dpi=160, bbox_inches="tight")


def describe(job: Job, report: dict[str, Any]) -> str:
    """The report as text: loss, bytes beside their formula, elements beside theirs."""
    losses, skipped = report["losses"], report["skipped_steps"]
    lines = [
        f"{report['n_params']:,} parameters, stage {job.stage}, {job.precision}, "
        f"{report['ranks']} ranks: loss {losses[0]:.3f} to {losses[-1]:.3f}, "
        f"{report['valid_loss']:.3f} on held-out text, "
        f"{report['tokens_per_second']:,.0f} tokens/s"
        + (f", {skipped} steps skipped" if skipped else ""),
    ]
    for title, rows in (
        ("Bytes on a rank between two steps", report["bytes"]),
        ("Elements that rank 0 sent a step", report["sent"]),
    ):
        lines += ["", f"{title}:", f"{'':28}{'measured':>16}{'formula':>16}   equal"]
        for name, row in rows.items():
            numbers = "".join(f"{n:16,.0f}" for n in row)
            same = "" if len(row) < 2 else "yes" if abs(row[0] - row[1]) < 1 else "NO"
            lines.append(f"{name:28}{numbers}   {same}".rstrip())
    lines += [
        "", f"At most {report['peak']:,} bytes, with activations and all else.",
        "", f"A sample:\n{report['sample']}",
        "", f"Written to {job.out}: loss.png, weights.safetensors, report.json",
    ]  # fmt: skip
    if job.trace:
        lines.append(f"The trace of the first updates: {job.trace}")
    return "\n".join(lines)
