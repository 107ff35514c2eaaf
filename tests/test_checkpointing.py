"""deepspeed.checkpointing: the same gradients, and the arguments in host memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import minizero
from minizero.activations import CHECKPOINT, Offloaded
from minizero.deepspeed import checkpointing
from minizero.memory.labels import label
from minizero.memory.tracker import Tracker

HIDDEN = 24


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """What is configured is configured for the process."""
    yield
    checkpointing.configure()


class Model(nn.Module):
    """As a script of DeepSpeed's checkpoints: a function over several layers."""

    def __init__(self, call: Callable[..., Any] | None) -> None:
        super().__init__()
        self.first = nn.Linear(5, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.call = call or (lambda function, *inputs: function(*inputs))

    def forward(self, x: Tensor) -> Tensor:
        h, mask = self.first(x), (x[:, :1] > 0).float()
        for start in (0, 2):

            def these(
                h: Tensor, mask: Tensor, start: int = start
            ) -> tuple[Tensor, ...]:
                for layer in self.layers[start : start + 2]:
                    h = h + F.dropout(torch.tanh(layer(h)), 0.2) * mask
                return h, mask

            h, mask = self.call(these, h, mask)
        return h.square().mean()


def build(call: Callable[..., Any] | None) -> Model:
    torch.manual_seed(0)
    return Model(call)


def gradients(model: Model) -> list[Tensor]:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)  # of the dropout
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("cpu", [False, True])
def test_gradients_are_the_same_bits(cpu: bool) -> None:
    expected = gradients(build(None))
    checkpointing.configure(None, checkpoint_in_cpu=cpu)
    got = gradients(build(checkpointing.checkpoint))
    assert len(got) == len(expected) == 11
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def kept(call: Callable[..., Any] | None) -> tuple[int, int]:
    """Bytes that a forward leaves for backward: on the device, and in host memory."""
    gc.collect()
    model, x = build(call), torch.ones(50, 5)
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
    assert kept(None)[1] == 0
    whole, _ = kept(None)
    checkpointing.configure()
    left, moved = kept(checkpointing.checkpoint)
    # the arguments of two calls: h, of [50, HIDDEN], and the mask that both share;
    # and what the last operations keep, h again
    h, mask = 50 * HIDDEN * 4, 50 * 4
    assert moved == 0 and left < whole / 3
    checkpointing.configure(checkpoint_in_cpu=True)
    less, moved = kept(checkpointing.checkpoint)
    assert moved == 2 * h + mask
    assert left - less == 2 * h + mask


def test_it_is_configured_for_the_process() -> None:
    checkpointing.configure(None, deepspeed_config=None)
    config: dict[str, Any] = {"train_batch_size": 2}
    config["activation_checkpointing"] = {"cpu_checkpointing": True}
    checkpointing.configure(deepspeed_config=config)
    assert isinstance(CHECKPOINT.store, Offloaded)
    # arguments take precedence, and what is left out is at its default again
    checkpointing.configure(deepspeed_config=config, checkpoint_in_cpu=False)
    assert CHECKPOINT.store is None
    checkpointing.configure(checkpoint_in_cpu=True)
    minizero.initialize(model=nn.Linear(1, 1), config={"train_batch_size": 2})
    assert isinstance(CHECKPOINT.store, Offloaded)
    config["activation_checkpointing"] = {"cpu_checkpointing": False}
    minizero.initialize(model=nn.Linear(1, 1), config=config)
    assert CHECKPOINT.store is None


def test_options_without_effect() -> None:
    with pytest.warns(UserWarning, match="^profile without effect"):
        checkpointing.configure(profile=True, synchronize=False)
