"""What the main job measured, beside what the formulas say."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialized

from minizero.comm.ledger import Ledger
from minizero.lab.training.job import Job
from minizero.memory.plan import estimate
from minizero.ranks.launch import world_size
from minizero.zero.data_parallel import DataParallel

STATE = ("parameters", "gradients", "optimizer")
CHECKS = ("gradient norm", "overflow")  # what is sent besides the states


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
    from minizero.lab.plots import loss_curves

    out = Path(job.out)
    # a file has no two names for one tensor: tied weights are written twice
    data = serialized({k: v.clone() for k, v in weights.items()})
    # `save_file` would make a file that its owner alone may read
    (out / "weights.safetensors").write_bytes(data)
    (out / "report.json").write_text(
        json.dumps({"job": asdict(job), **asdict(report)}, indent=1)
    )
    name = f"{job.model}, {report.plan}, {report.ranks} ranks"
    figure = loss_curves({name: report.losses})
    figure.savefig(out / "loss.png", dpi=160, bbox_inches="tight")


def describe(job: Job, report: Report) -> str:
    """The report as text: loss, bytes beside their formula, elements beside theirs."""
    skipped = report.skipped_steps
    head = (
        f"{report.n_params:,} parameters, {report.plan}, {report.ranks} ranks: "
        f"loss {report.losses[0]:.3f} to {report.losses[-1]:.3f}, "
        f"{report.valid_loss:.3f} on held-out text, "
        f"{report.tokens_per_second:,.0f} tokens/s"
        + (f", {skipped} steps skipped" if skipped else "")
    )
    tail = f"Written to {job.out}: loss.png, weights.safetensors, report.json"
    if job.trace:
        tail += f"\nThe trace of the first updates: {job.trace}"
    sample = f"A sample:\n{report.sample}"
    return "\n\n".join((head, _bytes(report), _elements(report), sample, tail))


def _bytes(report: Report) -> str:
    """A line a category: measured, by the formula, and what the formula leaves out."""
    lines = [
        "Bytes on a rank between two steps. The formula leaves out the padding to "
        "equal",
        "shards and the optimizer's step counters:",
        f"{'':18}{'measured':>14}{'formula':>14}{'left out':>14}   equal",
    ]
    for c, m in report.measured.items():
        f, o = report.formula[c], report.overhead[c]
        if m or f:
            same = _same(f + o, m)
            lines.append(f"{c:18}{m:14,}{f:14,.0f}{o:14,}   {same}")
    lines += [f"{'device, peak':18}{report.peak:14,}   with activations and all else"]
    return "\n".join(lines)


def _elements(report: Report) -> str:
    """A line for each kind of call, and their sum beside the formula's."""
    sent = {n: k for n, k in report.sent.items() if n.partition(": ")[2] not in CHECKS}
    states, formula = sum(sent.values()), report.sent_formula + report.sent_padding
    lines = [
        "Elements that rank 0 sent a step:",
        *(f"{name:28}{n:14,.0f}" for name, n in report.sent.items()),
        f"{'all but norm and overflow':28}{states:14,.0f}",
        f"{'formula + padding':28}{formula:14,.0f}   equal: {_same(formula, states)}",
    ]
    return "\n".join(lines)


def _same(expected: float, found: float) -> str:
    return "yes" if abs(expected - found) < 1 else "NO"
