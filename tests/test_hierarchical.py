"""Shards in groups, copies across them, and what is sent in 8 or 4 bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import nasty
import pytest
import torch
from nasty import Nasty
from test_muon import groups as muon_groups
from torch import Tensor, nn

import minizero
from minizero import Offload, Overlap, comm, initialize, parallelize, zero
from minizero.checkpoint import load, save
from minizero.comm.algorithms import ordered_sum
from minizero.comm.quantized import BLOCK, Code
from minizero.comm.scope import rank_of, shard_of
from minizero.config.read import read
from minizero.memory.plan import Placement, Plan, estimate
from minizero.memory.trace import Trace, joined
from minizero.memory.tracker import Tracker
from minizero.precision import MixedPrecision
from minizero.ranks.launch import Pool, rank
from minizero.zero.muon import Muon

GROUP, STEPS = 2, 2
SECONDARY = Plan(Placement(True, group=GROUP), Placement(True), Placement(True))
ON_HOST = Plan(SECONDARY.parameters, Placement(True, "cpu"), Placement(True, "cpu"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def trained(plan: Plan, steps: int = STEPS, **options: Any) -> nasty.Run:
    torch.set_num_threads(1)
    home = Offload(plan) if plan.optimizer.on == "cpu" else None
    return nasty.train(plan, steps=steps, home=home, **options)


CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "stage 1": (Plan.stage(1, group=GROUP), {"micro_batches": 2, "postpone": True}),
    "stage 2": (Plan.stage(2, group=GROUP), {"bucket_size": 200}),
    "stage 3": (Plan.stage(3, group=GROUP), {"micro_batches": 2}),
    "one group": (Plan.stage(3, group=4), {}),
    "overlap": (Plan.stage(3, group=GROUP), {"schedule": Overlap(10**6, 10**6, 200)}),
    "offload": (Plan.stage(3, "cpu", "cpu", group=GROUP), {}),
    "secondary": (SECONDARY, {"bucket_size": 200}),
    "secondary, offload": (ON_HOST, {}),
    "secondary, kept": (
        SECONDARY,
        {"micro_batches": 2, "schedule": Overlap(10**6, 10**6, 10**6)},
    ),
}


def test_groups_change_no_bit(pool: Pool) -> None:
    """Clipped, some of two micro-batches: sums of neighbours are summed, as without."""
    flat: dict[Any, list[nasty.Run]] = {}
    for name, (plan, options) in CASES.items():
        parts = {k: v for k, v in options.items() if k in ("micro_batches", "postpone")}
        if (key := tuple(parts)) not in flat:
            flat[key] = pool.run(trained, Plan.stage(0), **parts)
        assert nasty.same(pool.run(trained, plan, **options), flat[key]), name


@pytest.fixture(scope="module")
def six() -> Iterator[Pool]:
    with Pool(6) as pool:
        yield pool


def test_three_groups_of_two(six: Pool) -> None:
    """Groups that are not as many as their ranks; of three ranks, another sum."""
    flat = six.run(trained, Plan.stage(0), 1)
    for plan in (Plan.stage(3, group=2), SECONDARY):
        assert nasty.same(six.run(trained, plan, 1), flat), plan
    found = six.run(trained, Plan.stage(3, group=3), 1)
    assert not nasty.same(found, flat)
    for run, expected in zip(found, flat, strict=True):
        torch.testing.assert_close(run.losses, expected.losses)


def test_a_sum_may_be_made_in_groups_of_a_power_of_two() -> None:
    """And of other sizes not: the order is another."""
    differs = set()
    for n in range(1, 25):
        draw = torch.Generator().manual_seed(n)
        parts = list(torch.randn(n, 500, generator=draw))
        for g in (g for g in range(1, n + 1) if n % g == 0):
            inner = [ordered_sum(parts[i : i + g], True) for i in range(0, n, g)]
            if not torch.equal(ordered_sum(inner, True), ordered_sum(parts, True)):
                differs.add(g)
    assert differs == {3, 5, 6, 7, 9, 10, 11, 12}


def sent(plan: Plan) -> tuple[dict[Any, int], dict[str, int], int, int]:
    """Elements sent by scope and op in one step, state bytes, parameters, padded."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    gc.collect()
    with Tracker() as tracker:
        net = parallelize(model, torch.optim.AdamW(model.parameters()), plan)
        for _ in range(2):
            with comm.ledger() as calls:
                net.backward(net(torch.randn(2, 32)).square().mean())
                net.step()
        live = dict(tracker.live)
    found: dict[Any, int] = {}
    for call in calls:
        key = call.scope, call.op
        found[key] = found.get(key, 0) + call.sent
    padded = sum(flat.padded for unit in net.units for flat in unit.flats)
    return found, live, sum(p.numel() for p in model.parameters()), padded


@pytest.mark.parametrize("secondary", [False, True])
def test_bytes_within_and_across(pool: Pool, secondary: bool) -> None:
    plan = SECONDARY if secondary else Plan.stage(3, group=GROUP)
    n, copies = 4, 4 // GROUP
    for found, live, parameters, padded in pool.run(sent, plan):
        inside = padded * (GROUP - 1) // GROUP
        outside = padded // GROUP * (copies - 1) // copies
        assert found["within", "all_gather"] == 2 * inside
        assert found["within", "reduce_scatter"] == inside
        if secondary:
            assert found["across", "reduce_scatter"] == outside
            assert found["across", "all_gather"] == outside
        else:
            assert found["across", "all_reduce"] == 2 * outside
        assert not [key for key in found if key[0] == "all"]
        expected = estimate(parameters, n, plan, "fp32")
        assert live["parameters"] == expected.parameters
        assert live["gradients"] == expected.gradients
        # and a counter of steps for each shard
        counters = live["optimizer"] - expected.optimizer
        assert 0 <= counters <= 16 * copies * 4


def made(plan: Plan, muon: bool = False, **options: Any) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Nasty()
    if muon:
        for block in model.blocks:
            block.mixer = torch.nn.Parameter(torch.randn(5, 11))
        return parallelize(model, Muon(muon_groups(model)), plan, **options)
    return parallelize(model, nasty.adamw(nasty.groups(model)), plan, **options)


def steps(net: Any, first: int, last: int, clip: float = 0.5) -> Tensor:
    data, losses = nasty.batches(20, 1, rows=2), []
    for step in range(first, last):
        net.model.step = step
        x, y = data[step]
        losses.append(net(nasty.own(x, 2), nasty.own(y, 2)))
        net.backward(losses[-1])
        net.clip_grad_norm(clip)
        net.step()
    return torch.stack(losses).detach()


def resumed(folder: Path, plan: Plan, tag: str, muon: bool) -> dict[str, Tensor]:
    net = made(plan, muon)
    load(net, folder, tag)
    steps(net, 1, 2)
    return net.state_dict()


def saved(folder: Path, plan: Plan, tag: str, muon: bool) -> dict[str, Tensor]:
    net = made(plan, muon)
    steps(net, 0, 1)
    save(net, folder, tag)
    steps(net, 1, 2)
    return net.state_dict()


@pytest.mark.parametrize("muon", [False, True], ids=["AdamW", "Muon"])
def test_checkpoints_and_muon(pool: Pool, tmp_path: Path, muon: bool) -> None:
    """From groups to none and back; each shard is in one file, once."""
    every = {
        "flat": Plan.stage(2),
        "grouped": Plan.stage(3, group=GROUP),
        "secondary": SECONDARY,
    }
    runs = {
        tag: pool.run(saved, tmp_path, plan, tag, muon)[0]
        for tag, plan in every.items()
    }
    for tag, run in runs.items():
        assert all(torch.equal(v, runs["flat"][k]) for k, v in run.items()), tag
    sizes = {
        tag: sum(f.stat().st_size for f in (tmp_path / tag).glob("*.safetensors"))
        for tag in every
    }
    assert max(sizes.values()) - min(sizes.values()) < 200 * 4
    for tag, other in (
        ("flat", "secondary"),
        ("grouped", "flat"),
        ("secondary", "grouped"),
    ):
        found = pool.run(resumed, tmp_path, every[other], tag, muon)[0]
        assert all(torch.equal(v, runs["flat"][k]) for k, v in found.items()), tag


def test_each_shard_has_one_saver() -> None:
    for n in (1, 2, 4, 6, 12):
        for g in (g for g in range(1, n + 1) if n % g == 0):
            shards = [shard_of(r, g, n) for r in range(n)]
            assert sorted(shards) == list(range(n))
            assert [rank_of(s, g, n) for s in shards] == list(range(n))


def refused() -> list[str]:
    told = []
    plans: list[tuple[Plan, dict[str, Any]]] = [
        (Plan.stage(3, group=3), {}),
        (Plan(Placement(True), Placement(True, group=2), Placement(True, group=2)), {}),
        (Plan.stage(2), {"weight_bits": 8}),
        (Plan.stage(0), {"gradient_bits": 4}),
        (Plan.stage(3), {"weight_bits": 5}),
        (Plan(Placement(True, "cpu", 2), Placement(True), Placement(True)), {}),
    ]
    for plan, options in plans:
        with pytest.raises(ValueError) as error:
            made(
                plan,
                home=Offload(plan) if plan.parameters.on == "cpu" else None,
                **options,
            )
        told.append(str(error.value))
    return told


def test_what_does_not_fit_is_told(pool: Pool) -> None:
    size, mixed, weights, nothing, bits, host = pool.run(refused)[0]
    assert "groups of 3 ranks cannot be made of 4" in size and "2, 4" in size
    assert "one group" in mixed
    assert "stage 3" in weights and "weight_bits" in weights
    assert "stage 0" in nothing
    assert "8 or 4 bits, not 5" in bits
    assert "offload_param" in host
    with pytest.raises(ValueError, match="2 or more"):
        Placement(True, group=1)
    with pytest.raises(ValueError, match="divides"):
        estimate(1e9, 8, Plan.stage(3, group=3))


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_codes_of_themselves(bits: int) -> None:
    """What is decoded is encoded to the same bytes, and 16 bits hold it."""
    code, draw = Code(bits), torch.Generator().manual_seed(0)
    x = torch.randn(10 * BLOCK + 7, generator=draw)
    x *= 10 ** torch.randn(x.shape, generator=draw)
    x[3], x[5] = -0.0, 0.0
    sent = code.encode(x)
    assert sent.numel() == code.nbytes(x.numel())
    back = code.decode(sent, torch.empty_like(x))
    assert torch.equal(code.encode(back), sent)
    assert torch.equal(code.decode(sent, back.bfloat16()).float(), back)
    assert back[3].signbit() and not back[5].signbit()
    blocks = x[: 10 * BLOCK].view(10, -1)
    most = blocks.abs().amax(1, keepdim=True)
    errors = (back[: 10 * BLOCK].view(10, -1) - blocks).abs()
    assert (errors <= most / code.most).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hard_values(bits: int, dtype: torch.dtype) -> None:
    """What is not finite spoils its block and no other; zeros and extremes stay."""
    code = Code(bits)
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.randn(3 * BLOCK + 1).to(dtype)
        x[200] = bad
        back = code.decode(code.encode(x), torch.empty_like(x))
        assert back[BLOCK : 2 * BLOCK].isnan().all() and back.isnan().sum() == BLOCK
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for value in (0.0, most, -most, least, 1.0, 3.0):
        for n in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1):
            x = torch.full((n,), value, dtype=dtype)
            sent = code.encode(x)
            assert sent.numel() == code.nbytes(n)
            back = code.decode(sent, torch.empty_like(x))
            close = (back - x).abs() <= x.abs() / code.most
            assert back.isfinite().all() and close.all(), (value, n)


def lopsided(n: int, bad: bool) -> Tensor:
    """A coded mean of rows, [n] for each rank, one of them with a NaN in it."""
    draw = torch.Generator().manual_seed(rank())
    rows = torch.randn(4, n, generator=draw)
    if bad and rank() == 3:
        rows[1, -1] = torch.nan
    out = torch.empty(n)
    with comm.quantized(8):
        comm.reduce_scatter(out, rows.flatten(), average=True)
        whole = torch.empty(4 * n)
        comm.all_gather(whole, out)
    return whole


def test_one_rank_s_nan_reaches_all(pool: Pool) -> None:
    """In the block where it was; rows need not fill blocks."""
    n = BLOCK + 7
    for bad in (False, True):
        every = pool.run(lopsided, n, bad)
        assert all(torch.equal(a.isnan(), every[0].isnan()) for a in every)
        spoilt = every[0].isnan().view(4, n)
        assert spoilt[1, BLOCK:].all() == bad and spoilt.sum() == 7 * bad
    draws = [torch.Generator().manual_seed(r) for r in range(4)]
    mean = sum(torch.randn(4, n, generator=draw) for draw in draws) / 4
    assert (every[0].view(4, n)[0] - mean[0]).abs().max() < 0.1


CODED = {"weight_bits": 8, "gradient_bits": 4}


def coded(folder: Path | None, overlap: bool) -> dict[str, Tensor]:
    """Two micro-batches a step; saved in the middle and gone on with, if asked."""

    def new() -> Any:
        late = {"schedule": Overlap(10**6, 10**6, 200)} if overlap else {}
        return made(SECONDARY, **late, **CODED)

    net, data = new(), nasty.batches(2, 2, rows=2)
    for step in range(2):
        if step and folder is not None:
            save(net, folder, "half")
            net = new()
            load(net, folder, "half")
        for x, y in data[2 * step : 2 * step + 2]:
            net.backward(net(nasty.own(x, 2), nasty.own(y, 2)) / 2)
        net.clip_grad_norm(0.5)
        net.step()
    return net.state_dict()


def test_coded_with_overlap_accumulation_and_a_resume(
    pool: Pool, tmp_path: Path
) -> None:
    """What is sent in code depends on neither the schedule nor on a stop."""
    plain, *_ = pool.run(coded, None, False)
    found, *_ = pool.run(coded, tmp_path, True)
    assert all(torch.equal(found[k], v) for k, v in plain.items())


def quantized(plan: Plan, **bits: int) -> tuple[Any, ...]:
    """Losses, weights, whether own shards are and stay exact, what is computed with."""
    net = made(plan, **bits)
    losses = steps(net, 0, 2)
    weights = [
        shard.clone() for u in net.units for f in u.flats for shard in net.owned(f)
    ]
    with zero.GatheredParameters(net.model.parameters(), modifier_rank=0):
        whole = [f.full.clone() for u in net.units for f in u.flats]
    after = [shard for u in net.units for f in u.flats for shard in net.owned(f)]
    kept = all(map(torch.equal, weights, after))
    code = Code(8)
    coded = [code.decode(code.encode(w), torch.empty_like(w)) for w in weights]
    exact = not any(map(torch.equal, weights, coded))
    unit = net.units[1]
    for flat in unit.flats:
        flat.gather().wait()
    seen = [flat.full.clone() for flat in unit.flats]
    for flat in unit.flats:
        flat.free()
    return losses, whole, kept and exact, seen


@pytest.mark.parametrize("plan", [Plan.stage(3), SECONDARY, CASES["stage 3"][0]])
def test_ranks_agree_on_quantized_weights(pool: Pool, plan: Plan) -> None:
    """All compute with the same values; the shards stay as the optimizer made them."""
    every = pool.run(quantized, plan, weight_bits=8)
    for _, whole, kept, seen in every:
        assert kept
        assert all(map(torch.equal, seen, every[0][3]))
        assert all(map(torch.equal, whole, every[0][1]))


def ratio(plan: Plan, **bits: int) -> dict[Any, int]:
    """Bytes of one step of 16-bit training, by op and scope."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(128, 128, bias=False) for _ in range(3))
    model = torch.nn.Sequential(*layers)
    net = parallelize(
        model,
        torch.optim.AdamW(model.parameters()),
        plan,
        precision=MixedPrecision(torch.bfloat16),
        **bits,
    )
    for _ in range(2):
        with comm.ledger() as calls:
            net.backward(net(torch.randn(2, 128)).square().mean())
            net.step()
    found: dict[Any, int] = {}
    for call in calls:
        key = call.op, call.scope
        found[key] = found.get(key, 0) + call.bytes
    return found


def test_bytes_as_in_the_paper(pool: Pool) -> None:
    """A half for weights in 8 bits, a quarter for gradients in 4, scales counted."""
    plain = pool.run(ratio, Plan.stage(3))[0]
    coded = pool.run(ratio, Plan.stage(3), weight_bits=8, gradient_bits=4)[0]
    for op, share in (("all_gather", 1 / 2), ("reduce_scatter", 1 / 4)):
        found = coded[op, "all"] / plain[op, "all"]
        assert found == pytest.approx(share, rel=0.02), op
    plain = pool.run(ratio, SECONDARY)[0]
    coded = pool.run(ratio, SECONDARY, weight_bits=8, gradient_bits=4)[0]
    for op, share in (("all_gather", 1 / 2), ("reduce_scatter", 1 / 4)):
        found = coded[op, "across"] / plain[op, "across"]
        assert found == pytest.approx(share, rel=0.02), op


def descent(**bits: int) -> list[float]:
    """Losses of all ranks' batches: a net that learns what another one does."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, target = (
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in "ab"
    )
    net = parallelize(model, torch.optim.AdamW(model.parameters()), SECONDARY, **bits)
    losses = []
    for step in range(30):
        x = torch.randn(
            16, 64, generator=torch.Generator().manual_seed(4 * step + rank())
        )
        loss = (net(x) - target(x).detach()).square().mean()
        net.backward(loss)
        net.step()
        comm.all_reduce(mean := loss.detach(), average=True)
        losses.append(mean.item())
    return losses


def test_training_converges_when_quantized(pool: Pool) -> None:
    plain, sent = (pool.run(descent, **bits)[0] for bits in ({}, CODED))
    assert plain != sent
    assert plain[-1] < plain[0] / 2
    assert sent == pytest.approx(plain, rel=0.05)


CONFIGS: dict[str, dict[str, Any]] = {
    "flat": {},
    "mics_shard_size": {"mics_shard_size": GROUP},
    "zero_hpz_partition_size": {"zero_hpz_partition_size": GROUP},
    "quantized": {
        "zero_hpz_partition_size": GROUP,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    },
}


def by_config(keys: dict[str, Any]) -> tuple[list[float], set[tuple[str, str]]]:
    """Losses of a model made inside `Init`, and which kinds went where."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, **keys},
    }
    torch.manual_seed(1)
    with zero.Init(config=config):
        model = Nasty()
    engine, *_ = initialize(model=model, config=config)
    losses = []
    with comm.ledger() as calls:
        for x, y in nasty.batches(2, 1, rows=2):
            loss = engine(nasty.own(x, 2), nasty.own(y, 2))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses, {(c.scope, c.dtype) for c in calls}


def test_by_config(pool: Pool) -> None:
    """The keys of DeepSpeed, and what they send; groups alone change no loss."""
    runs = {name: pool.run(by_config, keys)[0] for name, keys in CONFIGS.items()}
    for name in ("mics_shard_size", "zero_hpz_partition_size"):
        losses, kinds = runs[name]
        assert losses == runs["flat"][0], name
        assert {("within", "float32"), ("across", "float32")} <= kinds
    losses, kinds = runs["quantized"]
    assert losses != runs["flat"][0]
    assert losses == pytest.approx(runs["flat"][0], rel=0.05)
    coded = {
        (scope, kind) for scope in ("within", "across") for kind in ("int8", "int4")
    }
    assert coded <= kinds


def test_config_refuses_groups_with_files() -> None:
    zero_keys = {"stage": 3, "zero_hpz_partition_size": 2}
    disk = {"device": "nvme", "nvme_path": "/tmp"}
    for keys, word in (
        ({**zero_keys, "offload_optimizer": disk}, "several shards"),
        ({**zero_keys, "offload_param": {"device": "cpu"}}, "mics_shard_size"),
        ({"stage": 3, "mics_shard_size": 3}, "use a number that divides them: 2, 4"),
    ):
        with pytest.raises(ValueError, match=word):
            read({"train_batch_size": 4, "zero_optimization": keys}, 4)


def traced(plan: Plan) -> Trace:
    """A step of a small model, recorded."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))
    net = parallelize(model, torch.optim.SGD(model.parameters(), lr=1.0), plan)
    with minizero.trace(net) as run:
        net.backward(net(torch.ones(1, 8)).sum())
        net.step()
    return run.trace


def test_arrows_of_a_trace_stay_in_their_group(pool: Pool) -> None:
    traces = pool.run(traced, Plan.stage(2, group=GROUP))
    events = joined(traces).chrome()["traceEvents"]
    sent, got = ({e["id"]: e["pid"] for e in events if e["ph"] == ph} for ph in "sf")
    assert sent.keys() == got.keys()
    pairs = {(sent[name], got[name]) for name in sent}
    calls = {c for trace in traces for c in (s.peers for s in trace.slices) if c}
    assert calls == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert pairs >= {(a, b) for ranks in calls for a, b in permutations(ranks, 2)}
    flows = [len(s.peers or range(4)) - 1 for s in joined(traces).slices if s.call >= 0]
    assert len(sent) == sum(flows)
