"""ZeRO-3 at its edges: Init, evaluation, ranks that call different units."""

from __future__ import annotations

import gc

import pytest
import torch
from nasty import same
from torch import Tensor, nn

from minizero import Plan, Tracker, comm, parallelize, zero
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.ranks import Pool, device, rank

CONFIG = GPTConfig(layers=4, hidden=32, heads=2, sequence=16, vocabulary=40)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(rank())
    return torch.randint(40, (2, 16), generator=generator).to(device())


def weights(inside: bool) -> tuple[dict[str, Tensor], int]:
    """Weights after training, and the peak of the parameters' bytes."""
    torch.manual_seed(3)
    gc.collect()  # models of tests before, which hang in reference cycles
    with Tracker() as tracker:
        with zero.Init(enabled=inside):
            model = GPT(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters())
        net = parallelize(model, optimizer, Plan.stage(3 * inside))
    for _ in range(2):
        net.backward(net(tokens(), tokens()))
        net.step()
    return net.state_dict(), tracker.peaks["parameters"]


def test_init_gives_the_same_model_without_holding_it(two: Pool) -> None:
    plain, inside = two.run(weights, False)[0][0], two.run(weights, True)
    assert same(plain, inside[0][0])
    model = GPT(CONFIG)
    full = sum(4 * p.numel() for p in model.parameters())
    block = sum(4 * p.numel() for p in model.blocks[0].parameters())
    for _, peak in inside:
        # the shards, one block, and the largest matrix of one
        assert peak < full / 2 + 1.5 * block


class Fussy(nn.Module):
    """Initialises again, from outside, what has been sharded already."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.free = nn.Parameter(torch.randn(5))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.3)
        with torch.no_grad():
            self.layers[1].bias.fill_(2.0)
        nn.init.zeros_(self.layers[2].weight[1])  # as a padding token's row
        bias = self.layers[0].bias
        with zero.GatheredParameters(bias, modifier_rank=0), torch.no_grad():
            bias[2:].fill_(3.0)
        self.register_buffer("mean", self.layers[1].weight.data.mean())
        self.register_buffer("row", self.layers[1].weight.detach()[0])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum() + self.free.sum()


def fussy(inside: bool) -> dict[str, Tensor]:
    torch.manual_seed(5 if rank() == 0 else 6)  # rank 0's values must win
    with zero.Init(enabled=inside):
        model = Fussy()
    return parallelize(model, sgd(model)).state_dict()


def test_init_lets_a_model_initialise_itself_again(two: Pool) -> None:
    assert same(two.run(fussy, False)[0], two.run(fussy, True)[0])


def test_init_at_other_stages_does_nothing() -> None:
    with zero.Init(config={"zero_optimization": {"stage": 2}}):
        model = nn.Sequential(nn.Linear(3, 3))
    assert not zero.is_sharded(model[0].weight)


def evaluate(mode: str) -> tuple[Tensor, Tensor, int]:
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device())
    plain = model(tokens()).detach()
    net = parallelize(model, sgd(model))
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with context(), comm.ledger() as calls:
        out = net(tokens()).clone()
    net.backward(net(tokens(), tokens()))  # training goes on afterwards
    net.step()
    assert all(not flat.is_unsharded for unit in net.units for flat in unit.flats)
    return plain, out, len(calls)


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_evaluation(two: Pool, mode: str) -> None:
    for plain, out, calls in two.run(evaluate, mode):
        assert torch.equal(plain, out)
        assert calls == CONFIG.layers + 1
