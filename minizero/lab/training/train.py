"""The main job: train the GPT on the corpus under a plan, and hold it to account."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import nullcontext
from typing import Any, cast

import torch
from tqdm import tqdm

from minizero import comm, zero
from minizero.activations.recompute import recompute_units
from minizero.engine import trace
from minizero.lab.models.corpus import Corpus
from minizero.lab.models.gpt import GPT, count_parameters, decay_groups
from minizero.lab.training import keeper
from minizero.lab.training.job import Job
from minizero.lab.training.report import (
    STATE,
    Report,
    expected,
    in_files,
    on_host,
    title,
    volume,
    write,
)
from minizero.memory.tracker import Tracker
from minizero.offload import Offload
from minizero.offload import NVMe
from minizero.overlap import Overlap
from minizero.precision.mixed import MixedPrecision
from minizero.ranks.launch import device, rank, world_size
from minizero.zero.data_parallel import DataParallel
from minizero.zero.parallelize import parallelize

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    recompute_units(model, job.checkpointing)
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
            with trace(net, job.trace, tracker) if job.trace else nullcontext():
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
