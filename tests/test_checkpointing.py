"""deepspeed.checkpointing: the same gradients, and the arguments in host memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minizero import parallelize
from minizero.activations import CHECKPOINT, Offloaded
from minizero.deepspeed import checkpointing
from minizero.memory.labels import label
from minizero.memory.plan import Plan
from minizero.memory.tracker import Tracker
from minizero.ranks.launch import Pool, rank

HIDDEN = 24


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """What is configured is configured for the process."""
    yield
    checkpointing.configure()


class Layer(nn.Module):
    """Two inputs, one by keyword and not a tensor, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.down = nn.Linear(3 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor, *, gain: float) -> tuple[Tensor, Tensor]:
        h = F.dropout(torch.tanh(self.up(x)) * gain, 0.2, self.training)
        return x + self.down(h) * mask, mask


class Model(nn.Module):
    """As a script of DeepSpeed's checkpoints: a function over several layers."""

    def __init__(self, call: Callable[..., Any] | None, chunk: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(5, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.call, self.chunk = call, chunk

    def forward(self, x: Tensor) -> Tensor:
        h, mask = self.first(x), (x[:, :1] > 0).float()

        def run(start: int) -> Callable[..., Any]:
            def these(h: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
                for layer in self.layers[start : start + self.chunk]:
                    h, mask = layer(h, mask, gain=0.7)
                return h, mask

            return these

        for start in range(0, len(self.layers), self.chunk):
            if self.call is None:
                h, mask = run(start)(h, mask)
            else:
                h, mask = self.call(run(start), h, mask)
        return h.square().mean()


def build(call: Callable[..., Any] | None, chunk: int = 2) -> Model:
    torch.manual_seed(0)
    return Model(call, chunk)


def data(rows: int = 6) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(rank() + 1))


def gradients(model: Model) -> list[Tensor]:
    torch.manual_seed(3)  # of the dropout
    loss = model(data())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_gradients_are_the_same_bits(cpu: bool, chunk: int) -> None:
    expected = gradients(build(None, chunk))
    checkpointing.configure(None, checkpoint_in_cpu=cpu)
    got = gradients(build(checkpointing.checkpoint, chunk))
    assert len(got) == len(expected) == 19
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def trained(stage: int, cpu: bool | None) -> dict[str, Tensor]:
    """Three steps; `cpu` is None without checkpointing."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "activation_checkpointing": {"cpu_checkpointing": bool(cpu)},
    }
    checkpointing.configure(None, config)
    model = build(None if cpu is None else checkpointing.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    net = parallelize(model, optimizer, Plan.stage(stage), bucket_size=500)
    for step in range(3):
        torch.manual_seed(step)
        net.backward(net(data()))
        net.step()
    return net.state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_also_where_parameters_are_sharded(two: Pool, stage: int) -> None:
    expected = two.run(trained, 0, None)[0]
    for cpu in (False, True):
        got = two.run(trained, stage, cpu)[0]
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def kept(call: Callable[..., Any] | None, chunk: int) -> tuple[int, int]:
    """Bytes that a forward leaves for backward: on the device, and in host memory."""
    gc.collect()
    model, x = build(call, chunk), data(50)
    with Tracker(model) as tracker:
        label(x, "activations")
        before, host = tracker.live["activations"], tracker.host["activations"]
        loss = model(x)
        left = tracker.live["activations"] - before - loss.nbytes
        moved = tracker.host["activations"] - host
        loss.backward()
        assert tracker.host["activations"] == host
    return left, moved


def test_arguments_wait_in_host_memory() -> None:
    assert kept(None, 2)[1] == 0
    whole, _ = kept(None, 2)
    checkpointing.configure()
    left, moved = kept(checkpointing.checkpoint, 2)
    # the arguments of two calls: h, of [50, HIDDEN], and the mask that both share;
    # and what the last operations keep, h again
    h, mask = 50 * HIDDEN * 4, 50 * 4
    assert moved == 0 and left < whole / 3
    checkpointing.configure(checkpoint_in_cpu=True)
    less, moved = kept(checkpointing.checkpoint, 2)
    assert moved == 2 * (h + mask)
    assert left - less == 2 * h + mask


def test_in_an_evaluation_nothing_is_kept() -> None:
    checkpointing.configure(checkpoint_in_cpu=True)
    model = build(checkpointing.checkpoint).eval()
    with torch.no_grad(), Tracker(model) as tracker:
        before = tracker.host["activations"]
        loss = model(data())
        assert tracker.host["activations"] == before
    assert torch.equal(loss, build(None).eval()(data()))


def test_it_is_configured_once_for_the_process() -> None:
    checkpointing.configure(None, deepspeed_config=None)
    assert checkpointing.is_configured()
    config = {
        "train_batch_size": 2,
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    checkpointing.configure(deepspeed_config=config)
    assert isinstance(CHECKPOINT.store, Offloaded)
    # arguments take precedence, and what is left out is at its default again
    checkpointing.configure(deepspeed_config=config, checkpoint_in_cpu=False)
    assert CHECKPOINT.store is None
    checkpointing.configure(checkpoint_in_cpu=True)
    checkpointing.configure()
    assert CHECKPOINT.store is None


def test_options_without_effect() -> None:
    with pytest.warns(UserWarning, match="^profile without effect"):
        checkpointing.configure(profile=True)
