"""State in host memory: the same numbers, other bytes."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import nasty
import pytest
import torch
from nasty import Nasty, Run, batches, own, same, train
from torch import Tensor, nn

from minizero import Delayed, Offload, Tracker, estimate, parallelize, zero
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.lab.plots.offload import crossing, rounds, rounds_figure
from minizero.lab.toygpu import ToyGPU
from minizero.memory import labels
from minizero.memory.bytes import aligned, host_empty
from minizero.memory.plan import PRECISIONS as PRECISIONS_BYTES
from minizero.memory.plan import Placement, Plan
from minizero.offload.copy_streams import ArrivingGradients, CopyStream, DoubleBuffer
from minizero.overlap import Overlap
from minizero.precision.loss_scale import DynamicLossScale, LossScale
from minizero.precision.mixed import MixedPrecision
from minizero.ranks.launch import Pool, RankError, rank, world_size
from minizero.zero.interfaces import Home, Near

RANKS = (1, 2, 3)  # of `pool`; the plans are compared on 4 in test_exact

STATE = ("parameters", "gradients", "optimizer")
CONFIG = GPTConfig(layers=3, hidden=24, heads=2, sequence=16, vocabulary=50)


def combinations() -> Iterator[Plan]:
    """Every plan that keeps something in host memory, ZeRO-1 to 3."""
    for stage, on in itertools.product(
        (1, 2, 3), itertools.product(("device", "cpu"), repeat=3)
    ):
        sharded = (stage == 3, stage >= 2, True)
        placements = zip(sharded, on, strict=True)
        if all(s or o == "device" for s, o in placements) and "cpu" in on:
            yield Plan(*(Placement(s, o) for s, o in zip(sharded, on, strict=True)))


PLANS = list(combinations())
FULL = Plan.stage(3, offload_optimizer="cpu", offload_param="cpu")


def name(plan: Plan) -> str:
    stage = sum(p.sharded for p in (plan.parameters, plan.gradients, plan.optimizer))
    host = [c[0] for c in STATE if getattr(plan, c).on == "cpu"]
    return f"zero{stage} {'+'.join(host)}"


def offloaded(plan: Plan, **options: Any) -> Run:
    return train(plan, home=Offload(plan), **options)


def test_all_combinations_are_listed() -> None:
    assert len(PLANS) == 1 + 3 + 7


def test_every_combination_is_equal(pool: Pool) -> None:
    """Losses, norms and weights; two micro-batches, clipped.

    All of them on two ranks; on one and on three a part.
    """
    options = {"micro_batches": 2, "steps": 4}
    reference = pool.run(train, 0, **options)
    assert reference[0].norms.max() > 0.5  # clipping took part
    for plan in PLANS if len(reference) == 2 else PLANS[len(reference) % 2 :: 3]:
        assert same(pool.run(offloaded, plan, **options), reference), name(plan)


def test_postponed_reductions(two: Pool) -> None:
    options = {"micro_batches": 3, "postpone": True, "steps": 6}
    got = two.run(offloaded, Plan.stage(1, "cpu"), **options)
    assert same(got, two.run(train, 1, **options))


def test_small_buckets(two: Pool) -> None:
    got = two.run(offloaded, FULL, bucket_size=40, steps=6)
    assert same(got, two.run(train, 3, steps=6))


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "fused adamw": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "for-loop adam": partial(torch.optim.Adam, lr=1e-2, foreach=False, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}
# the optimizer on the host, with rows on the device or not; and on the device
THREE = [Plan.stage(2, "cpu"), FULL, Plan.stage(3, None, "cpu")]


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_any_elementwise_optimizer(two: Pool, which: str) -> None:
    options = {"make_optimizer": OPTIMIZERS[which], "steps": 6}
    reference = two.run(train, 0, **options)
    for plan in THREE:
        assert same(two.run(offloaded, plan, **options), reference), name(plan)


PRECISIONS = {
    "bf16": {},
    "bf16, fp32 gradients": {"reduce": torch.float32},
    # the first steps overflow and are skipped
    "fp16": {"parameters": torch.float16, "loss_scale": DynamicLossScale(24)},
}


@pytest.mark.parametrize("which", PRECISIONS)
def test_mixed_precision(two: Pool, which: str) -> None:
    """Gradients cross as they were reduced, and parameters rounded."""

    def run(plan: Plan, away: bool) -> Run:
        precision = MixedPrecision(**copy.deepcopy(PRECISIONS[which]))
        home = Offload(plan) if away else None
        done = train(plan, home=home, precision=precision, steps=6, micro_batches=2)
        done.norms.nan_to_num_(nan=-1.0)  # of skipped steps; a NaN equals nothing
        return done

    reference = two.run(run, Plan.stage(1), False)
    for plan in PLANS if which == "fp16" else PLANS[::3]:
        assert same(two.run(run, plan, True), reference), name(plan)


def test_with_overlap(two: Pool) -> None:
    """Gathers that are launched ahead read shards that have come home."""

    def run(plan: Plan, kind: type[Offload]) -> Run:
        return train(plan, home=kind(plan), schedule=Overlap(), steps=5)

    at_once = two.run(train, 1, steps=5)
    late_by_one = two.run(late, 1, steps=5)
    for plan in THREE:
        assert same(two.run(run, plan, Offload), at_once), name(plan)
    for plan in (Plan.stage(2, "cpu"), FULL):
        got = two.run(run, plan, Delayed)
        assert torch.equal(got[0].losses, late_by_one[0].losses), name(plan)


def stepped(plan: Plan, home: Home) -> dict[str, Tensor]:
    """An optimizer that has made steps before it is handed over."""
    torch.manual_seed(0)
    model = Nasty()
    optimizer = nasty.adamw(nasty.groups(model))
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    net = parallelize(model, optimizer, plan, home=home)
    for x, y in batches(2, 1, rows=2):
        net.backward(net(own(x, 2), own(y, 2)))
        net.step()
    return net.state_dict()


def test_state_from_before_is_kept(two: Pool) -> None:
    reference = two.run(stepped, Plan.stage(0), Home())[0]
    for plan in THREE:
        got = two.run(stepped, plan, Offload(plan))[0]
        assert all(torch.equal(reference[key], got[key]) for key in reference)


# Bytes


def measure(
    plan: Plan, precision: str = "fp32", delayed: bool = False
) -> dict[str, Any]:
    """Train a GPT for two steps; what rests, what crossed in the second."""
    gc.collect()
    mixed = MixedPrecision() if precision == "bf16" else None
    with Tracker() as seen:
        model = GPT(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters())
        home = Delayed(plan) if delayed else Offload(plan)
        net = parallelize(model, optimizer, plan, home=home, precision=mixed)
        x = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            down, up = home.down.nbytes, home.up.nbytes
            loss = net(x, x)
            net.backward(loss)
            net.step()
            del loss
        net.flush()
        flats = [flat for unit in net.units for flat in unit.flats]
        return {
            "device": dict(seen.live),
            "host": dict(seen.host),
            "crossed": (home.down.nbytes - down, home.up.nbytes - up),
            "padded": sum(flat.padded for flat in flats),
            "masters": sum(len(g["params"]) for g in optimizer.param_groups),
            # a GPT has one flat buffer a unit
            "largest": max(flat.size for flat in flats),
        }


def blocks(plan: Plan, precision: str, size: int) -> dict[str, int]:
    """Bytes of the blocks that take turns, by place; `size` of the largest row."""
    parameter, gradient, _ = PRECISIONS_BYTES[precision]
    at = plan.optimizer.on
    turn = aligned(parameter * size) * (plan.parameters.on != at)
    turn += aligned(gradient * size) * (plan.gradients.on != at)
    nbytes = {"device": 0, "cpu": 0}
    nbytes[at] += 2 * turn
    nbytes["cpu"] += 2 * aligned(gradient * size) * (plan.gradients.on == "cpu")
    return nbytes


def check_bytes(plan: Plan, precision: str, results: list[dict[str, Any]]) -> None:
    for seen in results:
        ranks, padded = len(results), seen["padded"]
        formula = estimate(padded, ranks, plan, precision)
        counters = {"device": 0, "cpu": 0}
        counters[plan.optimizer.on] = 4 * seen["masters"]
        passing = blocks(plan, precision, seen["largest"])
        for where, live, expected in (
            ("device", seen["device"], formula),
            ("cpu", seen["host"], formula.host),
        ):
            told = (name(plan), precision, where)
            assert live["parameters"] == expected.parameters, told
            assert live["gradients"] == expected.gradients, told
            assert live["optimizer"] == expected.optimizer + counters[where], told
            assert live["buffers"] == passing[where], told
        down, up = crossing(plan, precision)
        row = padded // ranks
        assert seen["crossed"] == (down * row, up * row), (name(plan), precision)


def test_bytes(pool: Pool) -> None:
    """What rests and what crosses, in each place, is what the formulas say."""
    for plan in PLANS:
        check_bytes(plan, "fp32", pool.run(measure, plan))


def test_bytes_in_mixed_precision(two: Pool) -> None:
    for plan in PLANS:
        check_bytes(plan, "bf16", two.run(measure, plan, "bf16"))


def big(plan: Plan, budget: float) -> dict[str, Any]:
    """Build a deep GPT inside zero.Init and train it, on a toy GPU."""
    gc.collect()
    deep = GPTConfig(
        layers=32, hidden=32, heads=2, sequence=8, vocabulary=50, checkpoint=True
    )
    config = {"stage": 3, "offload_param": {"device": plan.parameters.on}}
    with ToyGPU(budget) as gpu:
        torch.manual_seed(0)
        with zero.Init({"zero_optimization": config}):
            model = GPT(deep)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        net = parallelize(model, optimizer, plan, home=Offload(plan))
        x = torch.arange(8)[None]
        losses = []
        for _ in range(2):
            loss = net(x, x)
            net.backward(loss)
            losses.append(loss.item())
            del loss
            net.step()
        padded = sum(flat.padded for unit in net.units for flat in unit.flats)
        states = estimate(padded, world_size(), 3, "fp32").total
        return {"peak": gpu.peak, "states": states, "losses": losses}


BUDGET = 300_000


def test_ten_times_the_budget(two: Pool) -> None:
    """The states of one rank, built and trained on a toy GPU of a tenth of them."""
    expected = two.run(big, Plan.stage(3), 1e9)
    for seen, plain in zip(two.run(big, FULL, BUDGET), expected, strict=True):
        assert seen["states"] >= 10 * BUDGET >= 10 * seen["peak"]
        assert seen["losses"] == plain["losses"]
    with pytest.raises(RankError, match="Out of memory"):
        two.run(big, Plan.stage(3), BUDGET)


def sharded_by(config: dict[str, Any]) -> tuple[int, int, int]:
    gc.collect()
    with Tracker() as seen:
        with zero.Init({"zero_optimization": config}):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        live = seen.live["parameters"], seen.host["parameters"]
        with zero.GatheredParameters(model[0].weight, modifier_rank=0):
            with torch.no_grad():
                model[0].weight.fill_(3.0)
        with zero.GatheredParameters(model[0].weight):
            return *live, int(model[0].weight.sum())


def test_init_in_host_memory(two: Pool) -> None:
    """DeepSpeed's key puts the shards there; what is written there is kept."""
    shards = 4 * 2 * (8 * 8 + 8) // 2
    offload = {"stage": 3, "offload_param": {"device": "cpu"}}
    # between steps an empty flat buffer keeps one NaN, of 4 bytes
    assert two.run(sharded_by, offload) == [(0, shards, 192)] * 2
    on_device = {"stage": 3, "offload_param": {"device": "none"}}
    assert two.run(sharded_by, on_device) == [(shards, 0, 192)] * 2


# Refusals


def refusal(plan: Plan, home: Home | None) -> str:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError) as error:
        parallelize(model, optimizer, plan, home=home)
    return str(error.value)


@pytest.mark.parametrize("kind", [Offload, Delayed])
def test_one_home_serves_one_net(kind: type[Offload]) -> None:
    home = kind(FULL)
    for expected in (nullcontext(), pytest.raises(ValueError, match="another net")):
        model = Nasty()
        with expected:
            parallelize(model, nasty.adamw(nasty.groups(model)), FULL, home=home)


def test_a_plan_needs_a_home_that_does_it() -> None:
    said = refusal(FULL, None)
    assert "places parameters on 'cpu'" in said and "home=minizero.Offload" in said
    nvme = Plan.stage(3, "nvme")
    assert "optimizer on 'nvme'" in refusal(nvme, Offload(nvme))
    assert "give both the same plan" in refusal(Plan.stage(3), Offload(FULL))


@pytest.mark.parametrize(
    "arguments", [(0, "cpu", None), (2, None, "cpu"), (1, None, "cpu")]
)
def test_replicated_state_is_not_offloaded(arguments: Any) -> None:
    with pytest.raises(ValueError, match="must be sharded"):
        Plan.stage(*arguments)
    with pytest.raises(ValueError, match="must be sharded"):
        Placement(False, "cpu")  # gradients at stage 1, say


# The delayed update


class Late(Home):
    """Updates with the gradients, and the options, of the step before."""

    kept: tuple[Any, ...] | None = None

    def update(self, near: Near, optimizer: Any, precision: Any) -> None:
        groups = optimizer.param_groups
        shards = [replace(s, grad=s.grad.clone()) for s in near.shards]
        now = Near(shards, near.leave), copy.copy(precision), [g["lr"] for g in groups]
        before, self.kept = self.kept, now
        if before is not None:
            for group, rate in zip(groups, before[2], strict=True):
                group["lr"] = rate
            super().update(before[0], optimizer, before[1])
            for group, rate in zip(groups, now[2], strict=True):
                group["lr"] = rate


def late(stage: int, **options: Any) -> Run:
    plan = Plan.stage(stage)
    return train(plan, home=Late(plan), **options)


def delayed(plan: Plan, bf16: bool = False, **options: Any) -> Run:
    precision = MixedPrecision() if bf16 else None
    return train(plan, home=Delayed(plan), precision=precision, **options)


DELAYED = [Plan.stage(1, "cpu"), Plan.stage(2, "cpu"), FULL]


def test_delay_is_one_step(two: Pool) -> None:
    """Against an optimizer that keeps each gradient for a step itself."""
    reference = two.run(late, 0, steps=6)
    at_once = two.run(train, 0, steps=6)
    assert not torch.equal(reference[0].losses, at_once[0].losses)
    for plan in DELAYED:
        got = two.run(delayed, plan, steps=6)
        for a, b in zip(got, reference, strict=True):
            assert torch.equal(a.losses, b.losses), name(plan)
            assert torch.equal(a.norms, b.norms), name(plan)


def test_delay_with_accumulation(two: Pool) -> None:
    options = {"steps": 4, "micro_batches": 2}
    reference = two.run(late, 0, **options)
    for plan in (Plan.stage(2, "cpu"), Plan.stage(3, "cpu")):
        got = two.run(delayed, plan, **options)
        assert torch.equal(got[0].losses, reference[0].losses), name(plan)


def with_schedule(how: str) -> Run:
    """The learning rate changes while the update of the step before runs."""
    torch.manual_seed(0)
    model = Nasty()
    optimizer = nasty.adamw(nasty.groups(model))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    plan = Plan.stage(0) if how == "late" else FULL
    home = Late(plan) if how == "late" else Delayed(plan)
    net = parallelize(model, optimizer, plan, home=home)
    losses = []
    for x, y in batches(5, 1, rows=2):
        loss = net(own(x, 2), own(y, 2))
        net.backward(loss)
        net.step()
        schedule.step()
        losses.append(loss.detach())
    return Run(torch.stack(losses), torch.zeros(1), net.state_dict())


def test_an_update_keeps_the_options_of_its_step(two: Pool) -> None:
    got, expected = two.run(with_schedule, "delayed"), two.run(with_schedule, "late")
    assert torch.equal(got[0].losses, expected[0].losses)


def waiting(how: str) -> Run:
    """Nothing is late if every step waits, or looks at the weights."""
    torch.manual_seed(0)
    model = Nasty()
    plan = Plan.stage(2, "cpu")
    home = Delayed(plan, start=5 if how == "start" else 0)
    net = parallelize(model, nasty.adamw(nasty.groups(model)), plan, home=home)
    losses, norms = [], []
    for x, y in batches(5, 1, rows=2):
        loss = net(own(x, 2), own(y, 2))
        net.backward(loss)
        norms.append(net.clip_grad_norm(0.5))
        net.step()
        if how == "state_dict":
            net.state_dict()
        losses.append(loss.detach())
    return Run(torch.stack(losses), torch.stack(norms), net.state_dict())


@pytest.mark.parametrize("how", ["start", "state_dict"])
def test_steps_that_wait(two: Pool, how: str) -> None:
    plain = two.run(by_hand)
    assert same(two.run(waiting, how), plain)


def by_hand() -> Run:
    torch.manual_seed(0)
    model = Nasty()
    net = parallelize(model, nasty.adamw(nasty.groups(model)), Plan.stage(2))
    losses, norms = [], []
    for x, y in batches(5, 1, rows=2):
        loss = net(own(x, 2), own(y, 2))
        net.backward(loss)
        norms.append(net.clip_grad_norm(0.5))
        net.step()
        losses.append(loss.detach())
    return Run(torch.stack(losses), torch.stack(norms), net.state_dict())


def test_delay_in_mixed_precision(two: Pool) -> None:
    """The factor of clipping is that of the gradients' step, not the next."""
    late_in_bf16 = partial(late, precision=MixedPrecision())
    reference = two.run(late_in_bf16, 1, steps=6)
    for plan in DELAYED:
        got = two.run(delayed, plan, bf16=True, steps=6)
        assert torch.equal(got[0].losses, reference[0].losses), name(plan)


def skipped(home: type[Offload]) -> list[Tensor]:
    """The parameters' rows after an update, and a step that is skipped."""
    torch.manual_seed(0)
    model = Nasty()
    plan, precision = Plan.stage(2, "cpu"), MixedPrecision(loss_scale=LossScale())
    options = {"home": home(plan), "precision": precision}
    net = parallelize(model, nasty.adamw(nasty.groups(model)), plan, **options)
    for (x, y), factor in zip(batches(2, 1, rows=2), (1, torch.inf), strict=True):
        net.backward(net(own(x, 2), own(y, 2)) * factor)
        net.step()
    assert precision.skipped_steps == 1
    return [net.owned(flat)[0].clone() for unit in net.units for flat in unit.flats]


def test_a_delayed_update_arrives_with_a_skipped_step(two: Pool) -> None:
    """It is late by one step, whatever comes of that."""
    expected, got = two.run(skipped, Offload)[0], two.run(skipped, Delayed)[0]
    assert all(map(torch.equal, expected, got))


class Failing(torch.optim.SGD):
    """Fails in its second update."""

    def step(self, closure: Any = None) -> None:
        self.defaults["calls"] = self.defaults.get("calls", 0) + 1
        if self.defaults["calls"] == 2:
            raise RuntimeError("the second update fails")
        super().step()


def test_an_error_in_the_thread_is_raised_by_the_next_step() -> None:
    model = nn.Linear(3, 3)
    optimizer = Failing(model.parameters(), lr=0.1)
    optimizer.defaults["calls"] = -100
    plan = Plan.stage(2, "cpu")
    net = parallelize(model, optimizer, plan, home=Delayed(plan))
    optimizer.defaults["calls"] = 0
    for _ in range(2):
        net.backward(net(torch.ones(3)).sum())
        net.step()
    net.backward(net(torch.ones(3)).sum())
    with pytest.raises(RuntimeError, match="the second update fails"):
        net.step()


def written_to(plan: Plan, kind: type[Offload], bf16: bool) -> float:
    """A weight that is set by hand after a step, two idle steps later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    precision = MixedPrecision() if bf16 else None
    home = kind(plan)
    net = parallelize(model, optimizer, plan, home=home, precision=precision)
    for step in range(3):
        net.backward(net(torch.ones(4)).sum())
        net.step()
        if step == 0:
            optimizer.param_groups[0]["lr"] = 0.0
            with zero.GatheredParameters(model[0].weight, modifier_rank=0):
                with torch.no_grad():
                    model[0].weight.fill_(3.0)
    weights = net.state_dict()
    return float(weights["0.weight"].sum()) if rank() == 0 else 48.0


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", [Offload, Delayed])
def test_what_is_written_by_hand_stays(two: Pool, kind: type, bf16: bool) -> None:
    for plan in (FULL, Plan.stage(3, "cpu"), Plan.stage(2, "cpu")):
        assert two.run(written_to, plan, kind, bf16) == [48.0] * 2


def test_writing_under_a_delayed_update_is_refused() -> None:
    model = nn.Linear(3, 3)
    plan = Plan.stage(2, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = parallelize(model, optimizer, plan, home=Delayed(plan))
    net.backward(net(torch.ones(3)).sum())
    net.step()
    with pytest.raises(RuntimeError, match="while an update was under way"):
        net.refresh()
    net.flush()
    net.refresh()


def test_delayed_bytes(two: Pool) -> None:
    """Gradients a second time, and the parameters as the optimizer keeps them."""
    for plan in DELAYED:
        for seen in two.run(measure, plan, "fp32", True):
            formula = estimate(seen["padded"], 2, plan, precision="fp32")
            row = 4 * seen["padded"] // 2
            assert seen["device"]["parameters"] == formula.parameters
            assert seen["device"]["gradients"] == formula.gradients
            assert seen["host"]["gradients"] == formula.host.gradients + row
            states = formula.host.optimizer + 4 * seen["masters"]
            assert seen["host"]["optimizer"] == states + row
            assert seen["device"]["buffers"] == 0


def test_delayed_needs_the_optimizer_on_the_host() -> None:
    with pytest.raises(ValueError, match="optimizer is on 'device'"):
        Delayed(Plan.stage(3))
    with pytest.raises(ValueError, match="start must be at least 0, not -1"):
        Delayed(FULL, start=-1)


# The bus


def test_two_blocks_take_turns() -> None:
    blocks = DoubleBuffer(256, "cpu", torch.device("cpu"))
    kept = []
    for value in range(3):
        blocks.turn()
        kept += [blocks.take(torch.empty(3)).fill_(value) for _ in range(2)]
    assert [int(t[0]) for t in kept] == [2, 2, 1, 1, 2, 2]
    assert all(labels.on_host(t) for t in kept)


def test_arriving_gradients_are_added() -> None:
    """In the order in which they came, though a block is used again."""
    arriving = ArrivingGradients(CopyStream())
    shard = host_empty((5,), torch.float32, "gradients").zero_()
    for value in (1.0, 2.0, 4.0):
        arriving.add(shard, torch.full((5,), value))
    larger = host_empty((50,), torch.float32, "gradients").zero_()
    arriving.add(larger, torch.full((50,), 8.0))
    arriving.finish()
    assert shard.tolist() == [7.0] * 5 and larger.tolist() == [8.0] * 50


def test_rounds_overlap() -> None:
    """Two blocks: one lane's time a unit, and no block is taken before it is free."""
    units = {str(i): (1.0, 2.0, 1.0) for i in range(5)}
    bars = {(b.lane, b.unit): b for b in rounds(units)}
    assert bars["out", "4"].end == 1 + 5 * 2 + 1
    for i in range(2, 5):
        assert bars["in", str(i)].begin >= bars["out", str(i - 2)].end
    assert rounds(units, pipelined=False)[-1].end == 5 * 4
    slow = {str(i): (3.0, 1.0, 3.0) for i in range(4)}
    assert rounds(slow)[-1].end < rounds(slow, pipelined=False)[-1].end
    assert len(rounds_figure({"a": rounds(units), "b": rounds(slow)}).axes) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("plan", [Plan.stage(2, "cpu"), FULL], ids=name)
def test_on_a_gpu(plan: Plan) -> None:
    """Through streams and page-locked memory; the two Adams round differently."""

    def losses(home: Home | None) -> Tensor:
        torch.manual_seed(0)
        model = GPT(CONFIG).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plan = home.plan if home else Plan.stage(3)
        net = parallelize(model, optimizer, plan, home=home)
        x = torch.arange(16, device="cuda")[None]
        seen = []
        for _ in range(8):
            loss = net(x, x)
            net.backward(loss)
            net.clip_grad_norm(1.0)
            net.step()
            seen.append(loss.detach())
        return torch.stack(seen)

    got, expected = losses(Offload(plan)), losses(None)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
