"""The main job: train the GPT on the corpus under a plan, and hold it to account."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from minizero import comm, zero
from minizero.activations import Checkpointing, checkpoint_units
from minizero.ddp import DataParallel
from minizero.launch import device, rank, world_size
from minizero.ledger import Ledger
from minizero.memory import Plan, estimate
from minizero.nvme import NVMe
from minizero.offload import Offload
from minizero.overlap import Overlap
from minizero.precision import MixedPrecision
from minizero.tracker import Tracker
from minizero.zero3 import parallelize

from . import keeper
from .corpus import Corpus, rows_per_rank
from .gpt import GPT, GPTConfig, count_parameters, decay_groups

STATE = ("parameters", "gradients", "optimizer")
CHECKS = ("gradient norm", "overflow")  # what is sent besides the states
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Job:
    """What to train, and how; the fields are the options of the command line.

    batch: sequences in the global batch, over all ranks.
    clip: largest global norm of the gradient.
    precision: "fp32", "bf16" or "fp16"; the last two with fp32 master weights.
    offload_optimizer, offload_param: "cpu" or "nvme", or None for the device.
    nvme: folder for what is on "nvme".
    overlap: communicate while computing. checkpointing: "none", "selective", "full".
    save_every: steps between two checkpoints in `out`; None for no checkpoints.
    keep: how many of them stay. resume: go on from the newest, if there is one.
    """

    stage: int = 3
    model: str = "1m"
    steps: int = 200
    batch: int = 16
    sequence: int = 128
    lr: float = 2e-3
    clip: float = 1.0
    weight_decay: float = 0.1
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

    def check(self, ranks: int) -> None:
        """Find bad input before any rank is started; raises ValueError or OSError."""
        estimate(1, ranks, self.plan(), self.precision)
        Checkpointing(self.checkpointing)
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if not self.lr > 0 or not self.clip > 0:
            raise ValueError(f"lr and clip must be above 0, not {self.lr}, {self.clip}")
        self.config()
        keeper.check(self)
        rows_per_rank(self.batch, ranks)
        Corpus(self.data).batch(0, 0, ranks, self.batch, self.sequence)
        Path(self.out).mkdir(parents=True, exist_ok=True)

    def plan(self) -> Plan:
        return Plan.stage(self.stage, self.offload_optimizer, self.offload_param)

    def config(self) -> GPTConfig:
        config = GPTConfig.named(self.model)
        if not 1 <= self.sequence <= config.sequence:
            raise ValueError(
                f"sequence must be between 1 and {config.sequence} for the model "
                f"{self.model!r}, not {self.sequence}"
            )
        return config


@dataclass
class Report:
    """What one rank measured; bytes are live bytes between two steps.

    `formula` and `measured`: bytes by category, on the device and off it. `overhead`:
    the bytes of padding and of the optimizer's step counters, which the formula
    leaves out.
    `sent`: elements a step by what sent them, on average. `sent_formula`: theirs.
    `skipped_steps`: steps without an update, as a gradient was not finite in fp16.
    """

    plan: str
    ranks: int
    n_params: int
    losses: list[float]
    valid_loss: float
    tokens_per_second: float
    measured: dict[str, int]
    formula: dict[str, float]
    overhead: dict[str, int]
    peak: int
    sent: dict[str, float]
    sent_formula: float
    sent_padding: float
    skipped_steps: int
    sample: str


def build(job: Job) -> tuple[DataParallel, int]:
    """The model under its plan, and its number of parameters.

    Under a plan that shards parameters no rank ever holds the whole model.
    """
    config, plan = job.config(), job.plan()
    torch.manual_seed(job.seed)
    sharded = {"zero_optimization": {"stage": job.stage}}
    on_disk = "nvme" in (job.offload_optimizer, job.offload_param)
    home = NVMe(plan, job.nvme) if on_disk else Offload(plan)
    with torch.device(device()), zero.Init(config=sharded, home=home):
        model = GPT(config)
    groups = decay_groups(model, job.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=job.lr, fused=True)
    dtype = DTYPES.get(job.precision)
    net = parallelize(
        model,
        optimizer,
        plan,
        home=home,
        precision=MixedPrecision(dtype) if dtype else None,
        # none is kept, so that bytes between steps are the formula's
        schedule=Overlap(param_persistence_threshold=0) if job.overlap else None,
    )
    checkpoint_units(model, job.checkpointing)
    return net, count_parameters(config)


def train(job: Job) -> Report:
    """Train on every rank; the report is rank 0's, and rank 0 writes the files."""
    corpus = Corpus(job.data)
    with comm.ledger() as calls:
        # two updates show all there is; the rest need not pay for the counting
        with Tracker() as tracker:
            net, n_params = build(job)
            bar = tqdm(total=job.steps, disable=rank() != 0, unit="step")
            step = Stepper(net, corpus, job, bar)
            bar.update(step.first)
            while step.updates < 2 and len(step.losses) < job.steps - step.first:
                step()
            live = {c: tracker.live[c] for c in STATE}
            live |= {on_host(c): tracker.host[c] for c in STATE}
            if isinstance(net.home, NVMe):
                live |= {in_files(c): getattr(net.home.on_disk, c) for c in STATE}
        while len(step.losses) < job.steps - step.first:
            step()
    bar.close()
    report = Report(
        plan=title(job),
        ranks=world_size(),
        n_params=n_params,
        losses=step.keeper.losses(step.losses).tolist(),
        valid_loss=validate(net, corpus, job),
        tokens_per_second=step.tokens_per_second,
        measured=live,
        peak=tracker.peak,
        sample=sample(net, corpus, job),
        skipped_steps=net.precision.skipped_steps,
        **expected(net, n_params, job),
        **volume(net, n_params, calls, len(step.losses), step.updates),
    )
    weights = net.state_dict()
    if isinstance(net.home, NVMe):
        net.home.close()
    if rank() == 0:
        write(job, report, weights)
    return report


def learning_rate(step: int, warmup: int, steps: int) -> float:
    """A linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


class Stepper:
    """Makes one training step after the other, and tells a progress bar.

    `first`: the step to begin with, above 0 where the job resumes. `losses`: this
    rank's, of the steps made since. `updates`: how many of these were not skipped.
    """

    def __init__(self, net: DataParallel, corpus: Corpus, job: Job, bar: Any) -> None:
        self.net, self.corpus, self.job, self.bar = net, corpus, job, bar
        warmup = max(1, job.steps // 10)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            net.optimizer, lambda step: learning_rate(step, warmup, job.steps)
        )
        self.seconds: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.updates = 0
        self.keeper = keeper.Keeper(net, self.schedule, job)
        self.first = self.keeper.restore()

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks, at the median step."""
        return self.job.batch * self.job.sequence / statistics.median(self.seconds)

    def __call__(self) -> None:
        """One step on this rank's rows, and a checkpoint if it is time for one."""
        started, job = time.perf_counter(), self.job
        step = self.first + len(self.losses)
        x, y = self.corpus.batch(
            step, rank(), world_size(), job.batch, job.sequence, seed=job.seed
        )
        loss = self.net(x.to(device()), y.to(device()))
        self.net.backward(loss)
        self.net.clip_grad_norm(job.clip)
        if self.net.step():
            self.schedule.step()
            self.updates += 1
        shown = loss.item()  # waits for the device
        self.seconds.append(time.perf_counter() - started)
        speed = f"{self.tokens_per_second:,.0f} tokens/s"
        self.bar.set_postfix_str(f"loss {shown:.3f}, {speed}", refresh=False)
        self.bar.update()
        self.losses.append(loss.detach())
        self.keeper.stepped(self.losses)


@torch.no_grad()
def validate(net: DataParallel, corpus: Corpus, job: Job, batches: int = 4) -> float:
    """Mean loss over held-out text and all ranks."""
    net.model.eval()
    total = torch.zeros(1, device=device())
    sequence = min(job.sequence, len(corpus.valid) - 1)
    for step in range(batches):
        x, y = corpus.batch(
            step, rank(), world_size(), job.batch, sequence, job.seed, "valid"
        )
        total += net(x.to(device()), y.to(device()))
    comm.all_reduce(total)
    net.model.train()
    return total.item() / (batches * world_size())


def sample(net: DataParallel, corpus: Corpus, job: Job, length: int = 200) -> str:
    """Text that the model continues; every rank draws the same bytes."""
    generator = torch.Generator().manual_seed(job.seed)
    prompt = b"def "
    model = cast(GPT, net.model)
    text = prompt + model.generate(prompt, length, 0.7, generator)
    shown = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in shown)


def title(job: Job) -> str:
    """The plan in words."""
    parts = [f"stage {job.stage}", job.precision]
    for what, place in (
        ("optimizer", job.offload_optimizer),
        ("parameters", job.offload_param),
    ):
        if place:
            parts.append(f"{what} on {place}")
    return ", ".join(parts)


def on_host(category: str) -> str:
    """How a report calls what rests in host memory."""
    return f"{category}, host"


def in_files(category: str) -> str:
    """How a report calls what rests on disk."""
    return f"{category}, disk"


def expected(net: DataParallel, n_params: int, job: Job) -> dict[str, Any]:
    """Bytes between steps by the formula, and what it leaves out."""

    def placed(n: float) -> dict[str, float]:
        guess = estimate(n, world_size(), job.plan(), job.precision)
        device = {c: getattr(guess, c) for c in STATE}
        host = {on_host(c): getattr(guess.host, c) for c in STATE}
        return device | host | {in_files(c): getattr(guess.disk, c) for c in STATE}

    formula = placed(n_params)
    flats = [flat for unit in net.units for flat in unit.trainable]
    padded = placed(sum(flat.padded for flat in flats))
    overhead = {c: round(padded[c] - formula[c]) for c in formula}
    counters = sum(len(group["params"]) for group in net.optimizer.param_groups) * 4
    optimizer = on_host("optimizer") if job.offload_optimizer else "optimizer"
    overhead[optimizer] += counters
    return {"formula": formula, "overhead": overhead}


def volume(
    net: DataParallel, n_params: int, calls: Ledger, steps: int, updates: int
) -> dict[str, Any]:
    """Elements sent a step by this rank, by the ledger and by the formula."""
    counted: dict[str, int] = {}
    per: dict[str, int] = {}  # steps
    for call in calls:
        if call.phase in ("forward", "backward", "step"):
            what = call.unit if call.unit in CHECKS else call.op
            name = f"{call.phase}: {what}"
            updating = call.phase == "step" and call.unit not in CHECKS
            times = updates if updating else steps
            counted[name] = counted.get(name, 0) + call.sent
            per[name] = times
    factor = 3 if net.plan.parameters.sharded else 2
    share = (world_size() - 1) / world_size()
    flats = [flat for unit in net.units for flat in unit.flats]
    padding = sum(flat.padded for flat in flats) - n_params
    return {
        "sent": {name: n / per[name] for name, n in counted.items()},
        "sent_formula": factor * n_params * share,
        "sent_padding": factor * padding * share,
    }


def write(job: Job, report: Report, weights: dict[str, torch.Tensor]) -> None:
    """The weights, the report as data, and the loss curve as a picture."""
    from .plots import loss_curves

    out = Path(job.out)
    # a file has no two names for one tensor: tied weights are written twice
    save_file({k: v.clone() for k, v in weights.items()}, out / "weights.safetensors")
    (out / "report.json").write_text(
        json.dumps({"job": asdict(job), **asdict(report)}, indent=1)
    )
    name = f"{job.model}, {report.plan}, {report.ranks} ranks"
    figure = loss_curves({name: report.losses})
    figure.savefig(out / "loss.png", dpi=160, bbox_inches="tight")


def describe(job: Job, report: Report) -> str:
    """The report as text: loss, bytes beside their formula, elements beside theirs."""
    lines = [
        f"{report.n_params:,} parameters, {report.plan}, {report.ranks} ranks: "
        f"loss {report.losses[0]:.3f} to {report.losses[-1]:.3f}, "
        f"{report.valid_loss:.3f} on held-out text, "
        f"{report.tokens_per_second:,.0f} tokens/s"
        + (f", {report.skipped_steps} steps skipped" if report.skipped_steps else ""),
        "",
        "Bytes on a rank between two steps. The formula leaves out the padding to "
        "equal",
        "shards and the optimizer's step counters:",
        f"{'':18}{'measured':>14}{'formula':>14}{'left out':>14}   equal",
    ]
    for c, m in report.measured.items():
        f, o = report.formula[c], report.overhead[c]
        same = "yes" if abs(f + o - m) < 1 else "NO"
        if m or f:
            lines.append(f"{c:18}{m:14,}{f:14,.0f}{o:14,}   {same}")
    lines += [
        f"{'device, peak':18}{report.peak:14,}   with activations and all else",
        "",
        "Elements that rank 0 sent a step:",
    ]
    lines += [f"{name:28}{n:14,.0f}" for name, n in report.sent.items()]
    states = sum(
        n for name, n in report.sent.items() if name.partition(": ")[2] not in CHECKS
    )
    formula, padding = report.sent_formula, report.sent_padding
    same = "yes" if abs(states - formula - padding) < 1 else "NO"
    lines += [
        f"{'all but norm and overflow':28}{states:14,.0f}",
        f"{'formula + padding':28}{formula + padding:14,.0f}   equal: {same}",
        "",
        "A sample:",
        report.sample,
        "",
        f"Written to {job.out}: loss.png, weights.safetensors, report.json",
    ]
    return "\n".join(lines)
