"""16-bit training: equal over plans, counted to the byte, and safe from overflow."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nasty
import pytest
import torch
from nasty import Nasty, batches, own, same
from torch import Tensor, nn

from minizero import Plan, comm, parallelize, zero
from minizero.precision import DynamicLossScale, LossScale, MixedPrecision
from minizero.ranks import Pool, device, rank, world_size
from minizero.zero import DataParallel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 8

RANKS = (1, 2, 3)


def masters(net: DataParallel) -> list[Tensor]:
    """The masters of each flat buffer, of all ranks: [padded], fp32."""
    full = []
    for flat in net.trained:
        own = flat.master.detach().clone()
        if own.numel() < flat.padded:
            own = own.new_empty(flat.padded)
            comm.all_gather(own, flat.master)
        full.append(own)
    return full


@dataclass
class Run:
    """What a run left behind; a norm that is not finite is -1."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    updated: list[bool] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: list[Tensor] = field(default_factory=list)


def build(stage: int, precision: MixedPrecision) -> tuple[Nasty, DataParallel]:
    torch.manual_seed(rank())  # rank 0's values must win
    model = Nasty()
    optimizer = nasty.adamw(nasty.groups(model))
    return model, parallelize(model, optimizer, Plan.stage(stage), precision=precision)


def train(
    stage: int,
    precision: MixedPrecision,
    clip: float | None = 0.5,
    leave_out: int | None = None,
    plant: str | None = None,
) -> Run:
    """Steps of the nasty model.

    `plant`: at step 4 an inf appears on the last rank only, in "loss" or "gradient".
    `leave_out`: this step is not made; the loss scale is halved instead.
    """
    model, net = build(stage, copy.deepcopy(precision))
    run = Run()
    for step in range(STEPS):
        if step == leave_out:
            assert net.precision.scaler is not None
            net.precision.scaler.scale /= 2
            net.precision.scaler.good_steps = 0
            continue
        last = rank() == world_size() - 1
        one_step(model, net, run, step, clip, plant if step == 4 and last else None)
    run.weights, run.masters = net.state_dict(), masters(net)
    assert net.precision.skipped_steps == run.updated.count(False)
    return run


def one_step(
    model: Nasty,
    net: DataParallel,
    run: Run,
    step: int,
    clip: float | None = 0.5,
    planted: str | None = None,
) -> None:
    model.step = step
    x, y = batches(nasty.STEPS, 1, rows=2)[step]
    run.scales.append(net.precision.loss_scale)
    loss = net(own(x, 2), own(y, 2)).float()
    run.losses.append(loss.item())
    if planted == "gradient":
        loss.register_hook(lambda grad: grad * torch.inf)
    net.backward(loss * torch.inf if planted == "loss" else loss)
    if clip is not None:
        run.norms.append(net.clip_grad_norm(clip).nan_to_num(-1, -1).item())
    run.updated.append(net.step())


def by_hand(dtype: torch.dtype, scale: float) -> Run:
    """The same without minizero: every rank in one process, one after the other.

    Each parameter has an fp32 master; each rank's 16-bit gradients are summed in
    fp32, neighbours first, divided by N, rounded, and unscaled in fp32.
    """
    n = world_size()
    torch.manual_seed(0)
    model = Nasty().to(device())
    model16 = copy.deepcopy(model).to(dtype)
    both = zip(model.parameters(), model16.parameters(), strict=True)
    trained = [(p, q) for p, q in both if p.requires_grad]
    optimizer = nasty.adamw(nasty.groups(model))
    run = Run()
    for step, (x, y) in enumerate(batches(nasty.STEPS, 1, rows=2)[:STEPS]):
        model16.step = step
        grads = []
        for r in range(n):
            loss = model16(x[2 * r : 2 * r + 2], y[2 * r : 2 * r + 2]).float()
            (loss * scale).backward()
            grads.append([q.grad for _, q in trained])
            model16.zero_grad()
            if r == rank():
                run.losses.append(loss.item())
        for (p, _), *ranks in zip(trained, *grads, strict=True):
            # without any gradient: zeros
            sums = [torch.zeros_like(p) if g is None else g.float() for g in ranks]
            while len(sums) > 1:  # neighbours first
                pairs = [sums[i : i + 2] for i in range(0, len(sums), 2)]
                sums = [a[0] + a[1] if len(a) > 1 else a[0] for a in pairs]
            p.grad = (sums[0] / n).to(dtype).float() / scale
        optimizer.step()
        with torch.no_grad():
            for p, q in trained:
                q.copy_(p)
    run.weights = {k: v.cpu() for k, v in model16.state_dict().items()}
    return run


@pytest.mark.parametrize(("dtype", "scale"), [(BF16, 1.0), (FP16, 1024.0)])
def test_as_a_loop_by_hand(pool: Pool, dtype: torch.dtype, scale: float) -> None:
    """An independent loop with fp32 masters gives the same bits."""
    precision = MixedPrecision(dtype, loss_scale=LossScale(scale))
    expected = pool.run(by_hand, dtype, scale)
    got = pool.run(train, 3, precision, clip=None)
    assert [run.losses for run in got] == [run.losses for run in expected]
    assert all(got[0].updated)
    for name, weight in got[0].weights.items():
        if weight.dtype == dtype:  # the module's buffer stays in fp32
            assert torch.equal(weight, expected[0].weights[name]), name


# -- overflow ------------------------------------------------------------------


@pytest.mark.parametrize(("plant", "stage"), [("loss", 3), ("gradient", 1)])
def test_an_overflow_on_one_rank(two: Pool, plant: str, stage: int) -> None:
    """All ranks skip, the scale halves, and it is as if the batch had not been."""
    precision = MixedPrecision(FP16, loss_scale=DynamicLossScale(10, 100, 1))
    without = two.run(train, 0, precision, leave_out=4)
    runs = two.run(train, stage, precision, plant=plant)
    for run, reference in zip(runs, without, strict=True):
        assert run.updated == [step != 4 for step in range(STEPS)]
        assert run.scales == [1024.0] * 5 + [512.0] * (STEPS - 5)
        assert run.norms[4] == -1
        for what in ("losses", "norms", "scales", "updated"):
            del getattr(run, what)[4]
            assert getattr(run, what) == getattr(reference, what), what
        assert same(run.weights, reference.weights)
        assert all(map(torch.equal, run.masters, reference.masters))


def test_loss_scale_has_deepspeeds_rules() -> None:
    """Against what DeepSpeed 0.19.8's class did (deepspeed_loss_scale.json)."""
    path = Path(__file__).with_name("deepspeed_loss_scale.json")
    for case in json.loads(path.read_text()):
        scale = DynamicLossScale(**case["options"])
        for overflow, expected in zip(case["overflows"], case["scales"], strict=True):
            if expected is None:
                with pytest.raises(OverflowError):
                    scale.update(bool(int(overflow)))
            else:
                scale.update(bool(int(overflow)))
                assert scale.scale == expected, case


# -- dtypes ----------------------------------------------------------------------


class Mixed(nn.Module):
    """One layer in fp32 and one in bf16, a buffer, float and integer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8).to(BF16)
        self.places = nn.Parameter(torch.arange(8), requires_grad=False)
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, extra: dict[str, Tensor]) -> Tensor:
        self.seen = x.dtype, extra["float"].dtype, extra["int"].dtype
        return self.second(self.first(x)).float().square().mean()


def dtypes() -> dict[str, Any]:
    torch.manual_seed(rank())
    model = Mixed()
    trained = [p for p in model.parameters() if p.requires_grad]
    originals = [p.detach().clone().to(device()) for p in trained]
    for p in originals:
        comm.broadcast(p)
    optimizer = torch.optim.AdamW(trained)
    precision = MixedPrecision(BF16, reduce=FP32, buffers=FP16)
    net = parallelize(model, optimizer, Plan.stage(3), precision=precision)
    first = [m.clone() for m in masters(net)]
    inputs = {"float": torch.ones(1), "int": torch.ones(1, dtype=torch.int64)}
    net.backward(net(torch.randn(2, 8), extra=inputs))
    assert all(f.grad_dtype == FP32 for f in net.trained)
    net.step()
    return {
        "seen": model.seen,
        "parameters": {n: p.dtype for n, p in model.named_parameters()},
        "buffers": {n: b.dtype for n, b in model.named_buffers()},
        "masters": [m.dtype for m in masters(net)],
        "first": torch.cat([m[:72] for m in first]),  # of each layer: weight, bias
        "originals": torch.cat([p.flatten().float() for p in originals]),
    }


def test_dtypes(two: Pool) -> None:
    for seen in two.run(dtypes):
        assert seen["seen"] == (BF16, BF16, torch.int64)
        floats = {n: d for n, d in seen["parameters"].items() if n != "places"}
        assert set(floats.values()) == {BF16}
        assert seen["parameters"]["places"] == torch.int64
        assert seen["buffers"] == {"mean": FP16, "count": torch.int64}
        assert set(seen["masters"]) == {FP32}
        # from rank 0's values, before they were rounded
        assert torch.equal(seen["first"], seen["originals"])


def by_hand_written() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Masters before and after one parameter is set, and its value after a step."""
    model, net = build(3, MixedPrecision(BF16))
    one_step(model, net, Run(), 0)
    before = [m.clone() for m in masters(net)]
    p = model.blocks[2].up.bias
    with zero.GatheredParameters([p], modifier_rank=1):
        if rank() == 1:
            p.data.fill_(3.0)
    after = masters(net)
    net.optimizer.param_groups[1]["lr"] = 0.0
    one_step(model, net, Run(), 1)
    with zero.GatheredParameters([p]):
        return before, after, p.detach().clone()


def test_what_is_written_by_hand_reaches_the_masters(two: Pool) -> None:
    for before, after, value in two.run(by_hand_written):
        assert value.float().eq(3.0).all()
        changed = [(a != b).sum() for a, b in zip(after, before, strict=True)]
        assert sum(changed) == value.numel()  # the others keep all their digits


# -- clipping and errors ---------------------------------------------------------


def clipped(max_norms: list[float]) -> tuple[list[float], float, int]:
    """Norms that were returned, the fp32 gradients' norm, and how many are zero."""
    scale = LossScale(256.0)
    model, net = build(0, MixedPrecision(FP16, loss_scale=scale))
    data = batches(1, 1, rows=2)[0]
    net.backward(net(own(data[0], 2), own(data[1], 2)).float())
    norms = [net.clip_grad_norm(max_norm).item() for max_norm in max_norms]
    seen: list[Tensor] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            grads = (m.grad for m in group["params"])
            seen.extend(g.clone() for g in grads if g is not None)

    net.optimizer.register_step_pre_hook(look)
    net.step()
    whole = torch.cat(seen)
    return norms, whole.norm().item(), int((whole == 0).sum())


def test_clipping_is_done_in_fp32(two: Pool) -> None:
    (norm,), unclipped, zeros = two.run(clipped, [1e9])[0]
    assert norm == pytest.approx(unclipped, rel=1e-5)  # unscaled
    _, small, flushed = two.run(clipped, [1e-7])[0]
    assert small == pytest.approx(1e-7, rel=1e-3)
    assert flushed == zeros
    (first, second), final, _ = two.run(clipped, [0.5, 0.1])[0]
    assert (first, second) == (norm, pytest.approx(0.5, rel=1e-5))
    assert final == pytest.approx(0.1, rel=1e-4)


def test_backward_after_clipping_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    net = parallelize(model, optimizer, Plan.stage(0), precision=MixedPrecision())
    net.backward(net(torch.ones(1, 4)).sum())
    net.clip_grad_norm(1.0)
    with pytest.raises(RuntimeError, match="between clip_grad_norm and step"):
        net.backward(net(torch.ones(1, 4)).sum())
    net.zero_grad()
    net.backward(net(torch.ones(1, 4)).sum())
    assert net.step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MixedPrecision(torch.float64), "not of torch.float64"),
        (lambda: MixedPrecision(BF16, reduce=torch.int8), "not of torch.int8"),
        (lambda: LossScale(0), "above 0 and finite, not 0"),
        (lambda: DynamicLossScale(0, min_loss_scale=2), "not 1000, 2 and 2"),
        (lambda: DynamicLossScale(hysteresis=0), "at least 1, .*, not 1000, 0 and"),
        (
            lambda: LossScale().load_state_dict(DynamicLossScale().state_dict()),
            "another loss scale's state: scale, lives, good_steps",
        ),
        (
            lambda: MixedPrecision(BF16).load_state_dict(
                MixedPrecision(FP16).state_dict()
            ),
            "the saved run had a loss scale",
        ),
    ],
)
def test_errors_are_sentences(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
