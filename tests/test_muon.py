"""Muon under ZeRO: every matrix has one owner, and every plan gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import nasty
import pytest
import torch
from nasty import Nasty
from torch import Tensor, nn

from minizero import Offload, comm, parallelize
from minizero.checkpoint import load, save
from minizero.memory.plan import Plan
from minizero.offload.nvme import NVMe
from minizero.ranks.launch import Pool, rank
from minizero.zero.muon import Muon, Owners, cost, cuts

BLOCKS = ("up.weight", "down.weight", "mixer")


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=lambda n: f"{n} ranks")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(request.param) as pool:
        yield pool


def build() -> Nasty:
    """Tied and frozen ones, odd shapes, and a matrix that a second group has."""
    torch.manual_seed(3)
    model = Nasty()
    for block in model.blocks:
        block.mixer = nn.Parameter(torch.randn(5, 11))  # never used
    model.blocks[0].down.weight.requires_grad_(False)
    return model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in trained if n.endswith(BLOCKS)]
    return [
        {"params": matrices[:3], "use_muon": True, "lr": 0.02},
        {
            "params": matrices[3:],
            "use_muon": True,
            "lr": 0.01,
            "adjust_lr_fn": "match_rms_adamw",
            "weight_decay": 0.0,
        },
        {"params": [p for n, p in trained if not n.endswith(BLOCKS)], "lr": 0.003},
    ]


def batch(step: int, part: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + part)
    return tuple(torch.randint(17, (2, rows, 6), generator=draw))  # type: ignore[return-value]


def steps(net: Any, first: int, last: int) -> None:
    for step in range(first, last):
        net.model.step = step
        net.backward(net(*batch(step, rank())))
        net.clip_grad_norm(0.5)
        net.step()


def made(plan: Plan, home: Any = None) -> Any:
    model = build()
    options = {"home": home} if home else {}
    return parallelize(model, Muon(groups(model)), plan, **options)


HOMES = {
    "device": lambda stage: (Plan.stage(stage), None),
    "host": lambda stage: (p := Plan.stage(stage, "cpu"), Offload(p)),
}


def trained(stage: int, where: str) -> dict[str, Tensor]:
    net = made(*HOMES[where](stage))
    steps(net, 0, 4)
    return net.state_dict()


def resumed(folder: Path, first: int, second: int) -> dict[str, Tensor]:
    net = made(Plan.stage(first))
    steps(net, 0, 2)
    save(net, folder, "half")
    net = made(Plan.stage(second))
    load(net, folder, "half")
    steps(net, 2, 4)
    return net.state_dict()


def test_every_plan_is_equal(pool: Pool, tmp_path: Path) -> None:
    """Bit for bit: stages, host offload, and a resume at another stage."""
    expected = pool.run(trained, 0, "device")[0]
    for stage, where in product(range(4), HOMES):
        if stage or where == "device":
            found = pool.run(trained, stage, where)[0]
            assert all(torch.equal(found[k], v) for k, v in expected.items())
    found = pool.run(resumed, tmp_path, 3, 1)[0]
    assert all(torch.equal(found[k], v) for k, v in expected.items())


def alone(n: int) -> dict[str, Tensor]:
    """What torch's own Muon and AdamW make of the mean over the ranks' batches."""
    model = build()
    first, second, rest = (
        {k: v for k, v in group.items() if k != "use_muon"} for group in groups(model)
    )
    optimizers = [torch.optim.Muon([first, second]), torch.optim.AdamW([rest])]
    for step in range(4):
        model.step = step
        for part in range(n):
            (model(*batch(step, part)) / n).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            every = [p for group in optimizer.param_groups for p in group["params"]]
            nasty.step(optimizer, every)
    return model.state_dict()


def test_as_torchs_own_in_one_process(pool: Pool) -> None:
    """Newton-Schulz runs in bf16, so rounding of the mean may show at its spacing."""
    found, expected = pool.run(trained, 3, "device")[0], alone(pool.size)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-3, msg=name)


def owned(stage: int) -> list[Any]:
    """By unit: the matrices that lie here, and elements sent and padded."""
    net = made(Plan.stage(stage))
    with comm.ledger() as calls:
        steps(net, 0, 1)
    found = []
    for unit in net.units:
        flats = [f for f in unit.trainable if f.group in (0, 1)]
        for flat in flats:
            for slot in flat.slots:
                last = slot.offset + slot.numel - 1
                assert slot.offset // flat.size == last // flat.size
        mine = [tuple(shape) for flat in flats for _, shape in cuts(flat, rank())]
        sent = [
            c.sent for c in calls if (c.op, c.unit) == ("reduce_scatter", unit.name)
        ]
        found.append((mine, sum(sent), sum(f.padded for f in unit.trainable)))
    return found


def test_a_matrix_has_one_owner_and_goes_there_only(pool: Pool) -> None:
    """No border runs through one; reduce-scatter is all that gradients cost."""
    n, ranks = pool.size, pool.run(owned, 1)
    here = sorted(shape for units in ranks for mine, *_ in units for shape in mine)
    every = [p.shape for group in groups(build())[:2] for p in group["params"]]
    assert here == sorted(tuple(shape) for shape in every)
    for units in ranks:
        for _, sent, padded in units:
            assert n == 1 or sent * n == padded * (n - 1)


def test_owners_have_about_the_same_work() -> None:
    """Of 12 blocks on 4 ranks, nobody has a tenth more than the mean."""
    owners = Owners()
    owners.work = [0] * 4
    shapes = [(96, 288), (96, 96), (96, 384), (384, 96)]
    for _ in range(12):
        starts, size = owners([nn.Parameter(torch.empty(s)) for s in shapes])
        ends = [a + m * n for a, (m, n) in zip(starts, shapes, strict=True)]
        assert all(
            a // size == (b - 1) // size for a, b in zip(starts, ends, strict=True)
        )
    assert sum(owners.work) == 12 * sum(cost(torch.Size(s)) for s in shapes)
    assert max(owners.work) <= 1.1 * sum(owners.work) / 4


def refused() -> list[str]:
    told = []
    model, plan = build(), Plan.stage(1, "nvme")
    for make in (
        lambda: Muon([{"params": list(model.parameters()), "use_muon": True}]),
        lambda: Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "decay": 1}]),
        lambda: parallelize(model, torch.optim.Muon([model.blocks[1].mixer])),
        lambda: made(plan, NVMe(plan)),
    ):
        with pytest.raises(ValueError) as error:
            make()
        told.append(str(error.value))
    return told


def test_what_does_not_fit_is_told() -> None:
    vector, option, flat, slices = refused()
    assert "matrices" in vector
    assert "decay" in option and "weight_decay" in option
    assert "minizero.zero.Muon" in flat
    assert "NVMe" in slices and "whole matrices" in slices
