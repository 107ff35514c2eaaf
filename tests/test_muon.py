"""Muon under ZeRO: every matrix has one owner, and every plan gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nasty
import pytest
import torch
from nasty import Nasty, same
from torch import Tensor, nn

from minizero import Plan, initialize, parallelize
from minizero import zero as zero_
from minizero.comm import ordered_sum
from minizero.engine.muon_groups import muon_groups
from minizero.kernels import muon_options
from minizero.ranks import Pool, device, rank, world_size
from minizero.zero import Muon

BLOCKS = ("up.weight", "down.weight", "mixer")


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


def batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + part)
    return tuple(torch.randint(17, (2, 2, 6), generator=draw).to(device()))  # type: ignore[return-value]


def alone(n: int) -> dict[str, Tensor]:
    """What torch's own Muon and AdamW make of the mean, summed in the ranks' order."""
    model = build().to(device())
    first, second, rest = (
        {k: v for k, v in group.items() if k != "use_muon"} for group in groups(model)
    )
    optimizers = [torch.optim.Muon([first, second]), torch.optim.AdamW([rest])]
    for step in range(3):
        model.step = step
        parts = []
        for part in range(n):
            model(*batch(step, part)).backward()
            parts.append({k: p.grad for k, p in model.named_parameters()})
            model.zero_grad()
        for name, p in model.named_parameters():
            if parts[0][name] is not None:
                p.grad = ordered_sum([part[name] for part in parts], True)
        for optimizer in optimizers:
            every = [p for group in optimizer.param_groups for p in group["params"]]
            nasty.step(optimizer, every)
    return model.state_dict()


def sharded() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = build()
    net = parallelize(model, Muon(groups(model)), Plan.stage(3))
    for step in range(3):
        model.step = step
        net.backward(net(*batch(step, rank())))
        net.step()
    return net.state_dict(), alone(world_size())


def test_as_torchs_own_in_one_process(pool: Pool) -> None:
    """Bit for bit, if it sums what the ranks have in their order."""
    assert same(*pool.run(sharded)[0])


REFUSED: dict[str, tuple[Callable[[Nasty], Any], str]] = {
    "a vector": (
        lambda m: Muon([{"params": list(m.parameters()), "use_muon": True}]),
        "only supports 2D",
    ),
    "torch's own": (
        lambda m: parallelize(m, torch.optim.Muon([m.blocks[1].mixer])),
        "minizero.zero.Muon",
    ),
    "no matrix": (
        lambda m: muon_groups(nn.Linear(1, 1, bias=False), [], {}, {}),
        "use AdamW, or set use_muon",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    make, sentence = REFUSED[what]
    with pytest.raises(ValueError, match=sentence):
        make(build())


MUON = {"type": "Muon", "params": {"muon_lr": 0.03, "lr": 0.004, "weight_decay": 0.1}}


def test_by_config() -> None:
    config = {
        "train_batch_size": 2,
        "gradient_clipping": 0,
        "optimizer": MUON,
        "zero_optimization": {"stage": 3},
    }
    with zero_.Init(config=config):
        model = build()
    engine, optimizer, *_ = initialize(model=model, config=config)
    assert isinstance(optimizer.optimizer, Muon)
    before = engine.net.state_dict()
    engine.backward(engine(*batch(0, 0)))
    engine.step()
    after = engine.net.state_dict()
    assert not torch.equal(before["blocks.2.up.weight"], after["blocks.2.up.weight"])


class Named(nn.Module):
    """Every kind of parameter that has two dimensions, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 4)
        self.patch_embed = nn.Linear(4, 4, bias=False)
        self.filters = nn.Conv2d(1, 1, 2)
        self.other = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.lm_head = nn.Linear(4, 5, bias=False)
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.tokens.weight
        self.asked = nn.Linear(4, 4, bias=False)
        self.other.weight.use_muon = False


def test_which_parameters_are_muons() -> None:
    model = Named()
    names = {p: name for name, p in model.named_parameters()}
    plain = [{"params": [p for p in names if p.ndim < 2], "weight_decay": 0.0}]
    rest = [{"params": [p for p in names if p.ndim > 1], "betas": (0.5, 0.6)}]
    halves = muon_options(MUON["params"])
    made = muon_groups(model, plain + rest, *halves)
    found = Muon(made).param_groups
    kinds = [group["use_muon"] for group in found]
    assert kinds == [False, True, False]
    vectors, inside, others = found
    assert {names[p] for p in inside["params"]} == {"inner.weight", "asked.weight"}
    assert [group["lr"] for group in found] == [0.004, 0.03, 0.004]
    assert [group["weight_decay"] for group in found] == [0.0, 0.1, 0.1]
    assert (vectors["betas"], others["betas"]) == ((0.9, 0.95), (0.5, 0.6))
