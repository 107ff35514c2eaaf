"""Shards in groups, copies across them, and what is sent in 8 or 4 bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nasty import Case, muon, on_each_rank, some
from resumed import Small, equal, resumed, steps, unbroken
from test_equal import ALL, at, both, check, reference
from torch import Tensor, nn

from minizero import Placement, Plan, Tracker, comm, estimate, zero
from minizero.comm.quantized import BLOCK
from minizero.config import read
from minizero.ranks import Pool, rank

__all__ = ["reference"]  # a fixture

GROUP = 2
SECONDARY = Plan(Placement(True, group=GROUP), Placement(True), Placement(True))
EQUAL: dict[str, Case] = {
    **{f"groups at stage {s}": Case(at(s, group=2)) for s in (1, 2, 3)},
    "groups, accumulated": Case(at(3, group=2), "bf16", micro=2),
    "groups, Muon": Case(at(3, group=2), "bf16", muon),
    "groups, offloaded": Case(at(3, "cpu", "cpu", group=2), "bf16"),
    "parameters in groups": Case(SECONDARY, "bf16", micro=2),
    "parameters in groups, Muon": Case(SECONDARY, "bf16", muon),
    "parameters in groups, overlap": Case(SECONDARY, **both, overlap=(2000, 3000, 900)),
    "quantized in groups": Case(
        SECONDARY, "bf16", bits=(8, 4), overlap=(ALL, ALL, 900)
    ),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


FEW = ("groups at stage 3", "parameters in groups, overlap")


@pytest.mark.parametrize("name", some(EQUAL, lambda name: name not in FEW))
def test_equal(pool: Pool, tmp_path: Path, reference: Any, name: str) -> None:
    """As data parallelism, bit for bit: 4 gradients have the same sum in pairs."""
    check(pool, EQUAL[name], reference, tmp_path)


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def stored(plan: Plan) -> tuple[dict[str, int], int]:
    """Bytes by category between steps, and elements with padding."""
    gc.collect()
    with Tracker() as tracker:
        net = Case(plan).build(layers)
        net.backward(net(torch.ones(2, 8)).sum())
        net.step()
        return dict(tracker.live), sum(flat.padded for flat in net.flats)


@pytest.mark.parametrize("secondary", [False, True])
def test_bytes(pool: Pool, secondary: bool) -> None:
    plan = SECONDARY if secondary else Plan.stage(3, group=GROUP)
    for live, padded in pool.run(stored, plan):
        expected = estimate(padded, 4, plan, "fp32")
        assert live["parameters"] == expected.parameters
        assert live["gradients"] == expected.gradients
        # and a counter of steps for each buffer
        assert 0 <= live["optimizer"] - expected.optimizer <= 16 * 4 * 4


def test_checkpoints(pool: Pool, tmp_path: Path) -> None:
    """From groups to none and back; each shard is in one file, once."""
    cases = {
        "flat": Case(Plan.stage(2)),
        "grouped": Case(Plan.stage(3, group=GROUP)),
        "secondary": Case(SECONDARY),
    }
    how = 1, 1, tmp_path
    runs = [pool.run(unbroken, cases[tag], *how, tag) for tag in cases]
    pairs = ("secondary", "flat"), ("flat", "grouped"), ("grouped", "secondary")
    runs += [pool.run(resumed, cases[a], *how, tag) for a, tag in pairs]
    assert all(equal(run, runs[0]) for run in runs)
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / tag).glob("*.safetensors"))
        for tag in cases
    ]
    assert max(sizes) - min(sizes) < 200 * 4


MIXED = Plan(Placement(True), Placement(True, group=2), Placement(True, group=2))
REFUSED: list[tuple[Case, str]] = [
    (Case(at(3, group=3)), "groups of 3 ranks cannot be made of 4; .*2, 4"),
    (Case(MIXED), "everything sharded has one group"),
    (Case(at(2), bits=(8, None)), "stage 3.*weight_bits"),
    (Case(at(0), bits=(None, 4)), "gradients at stages 1 to 3"),
]


@on_each_rank
def test_what_does_not_fit_is_refused() -> None:
    for case, sentence in REFUSED:
        with pytest.raises(ValueError, match=sentence):
            case.build()
    keys = {"stage": 3, "mics_shard_size": 3}
    with pytest.raises(ValueError, match="divides them"):
        read({"train_batch_size": 4, "zero_optimization": keys}, 4)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_values_are_quantized_to_themselves(bits: int) -> None:
    form, draw = comm.Quantized(bits), torch.Generator().manual_seed(0)
    x = torch.randn(10 * BLOCK + 7, generator=draw)
    x *= 10 ** torch.randn(x.shape, generator=draw)
    bytes_ = form.encode(x)
    assert bytes_.numel() == form.nbytes(x.numel())
    back = form.decode(bytes_, torch.empty_like(x))
    assert torch.equal(form.encode(back), bytes_)
    blocks = x[: 10 * BLOCK].view(10, -1)
    most = blocks.abs().amax(1, keepdim=True)
    errors = (back[: 10 * BLOCK].view(10, -1) - blocks).abs()
    assert (errors <= most / form.largest).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hard_values(bits: int, dtype: torch.dtype) -> None:
    """What is not finite spoils its block and no other; zeros and extremes stay."""
    form = comm.Quantized(bits)
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.randn(3 * BLOCK + 1).to(dtype)
        x[200] = bad
        back = form.decode(form.encode(x), torch.empty_like(x))
        assert back[BLOCK : 2 * BLOCK].isnan().all() and back.isnan().sum() == BLOCK
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for value in (0.0, most, -most, least, 1.0, 3.0):
        for n in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1):
            x = torch.full((n,), value, dtype=dtype)
            back = form.decode(form.encode(x), torch.empty_like(x))
            close = (back - x).abs() <= x.abs() / form.largest
            assert back.isfinite().all() and close.all(), (value, n)


def quantized(plan: Plan) -> tuple[list[Tensor], bool]:
    """Parameters as gathered, and whether own shards are and stay exact."""
    net = Case(plan, bits=(8, None), overlap=(ALL, ALL, 900)).build(Small)
    steps(net, 0, 2)
    before = [flat.shard.clone() for flat in net.flats]
    kept_unsharded = [(f, f.full.clone()) for f in net.flats if f.is_unsharded]
    assert kept_unsharded
    with zero.GatheredParameters(net.model.parameters(), modifier_rank=0):
        whole = [flat.full.clone() for flat in net.flats]
    assert all(torch.equal(flat.full, values) for flat, values in kept_unsharded)
    kept = all(map(torch.equal, before, (flat.shard for flat in net.flats)))
    form = comm.Quantized(8)
    sent = [form.decode(form.encode(w), torch.empty_like(w)) for w in before]
    with zero.GatheredParameters(net.model.parameters(), modifier_rank=3):
        for p in net.model.parameters() if rank() == 3 else ():
            p.data.fill_(7)
    with zero.GatheredParameters(net.model.parameters()):
        assert all((p == 7).all() for p in net.model.parameters())
    return whole, kept and not any(map(torch.equal, before, sent))


@pytest.mark.parametrize(
    "plan", [Plan.stage(3), SECONDARY, Plan.stage(3, group=GROUP)], ids=str
)
def test_ranks_agree_on_quantized_weights(pool: Pool, plan: Plan) -> None:
    """All gather the same values; the shards stay as the optimizer made them."""
    every = pool.run(quantized, plan)
    for whole, kept in every:
        assert kept
        assert all(map(torch.equal, whole, every[0][0]))
