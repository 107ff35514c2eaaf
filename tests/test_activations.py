"""What is saved for backward equals the formula; less of it gives the same bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nasty import on_each_rank, on_two_ranks
from torch import Tensor, nn

from minizero import comm
from minizero.activations.recompute import Recompute, recompute_units
from minizero.activations.saved_tensors import SavedTensors
from minizero.activations.stores import Offloaded, Sharded, Store
from minizero.lab.models.activations import Activations
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.lab.models.tensor_parallel import tensor_parallel
from minizero.memory.labels import label, on_host
from minizero.memory.tracker import Tracker
from minizero.ranks import Pool, rank, world_size

RANKS = (1, 2, 3)  # of `pool`; the plans are compared on 4 in test_exact

CONFIG = GPTConfig(layers=3, hidden=48, heads=12, sequence=16, vocabulary=40)
BATCH = 3
MODES = ("none", "selective", "full")

HOW: dict[str, Callable[[], Recompute]] = {
    "full": lambda: Recompute("full"),
    "selective": lambda: Recompute("selective"),
    "none, offloaded": lambda: Recompute("none", Offloaded()),
    "selective, offloaded": lambda: Recompute("selective", Offloaded()),
    "full, offloaded": lambda: Recompute("full", Offloaded()),
    "full, a plain store": lambda: Recompute("full", Store()),
}
SHARDED: dict[str, Callable[[], Recompute]] = {
    "full, sharded": lambda: Recompute("full", Sharded()),
    "selective, sharded": lambda: Recompute("selective", Sharded()),
    "full, sharded and offloaded": lambda: Recompute("full", Sharded(Offloaded())),
}


def tokens(seed: int = 1, rows: int = BATCH, config: GPTConfig = CONFIG) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (rows, config.sequence)
    return torch.randint(config.vocabulary, size, generator=generator)


def build(how: Recompute | str, **options: Any) -> GPT:
    torch.manual_seed(0)
    gc.collect()  # models of tests before, which hang in reference cycles
    model = GPT(CONFIG)
    recompute_units(model, how, **options)
    return model


def gradients(model: nn.Module, *inputs: Any) -> list[Tensor]:
    """The loss and all gradients of one backward."""
    model.zero_grad()
    loss = model(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# what is saved


def test_a_view_keeps_its_whole_storage_and_counts_once() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.exp()  # saved by exp
            return (wide[:, :1] * wide[:, :1]).sum()  # and two windows of it

    x = torch.randn(8, 100, requires_grad=True)
    model = Views()
    with SavedTensors(model) as saved:
        out = model(x)
        one = saved.activations()
        del out
        assert not saved.activations()
    assert [(s.op, s.nbytes) for s in one] == [("exp", 3200)]


# the same bits


class Odd(nn.Module):
    """Dropout, keyword arguments, a tuple, something that is no tensor, an in-place
    operator, an integer tensor, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.scale = nn.Parameter(torch.randn(12), requires_grad=False)

    def forward(
        self, pair: tuple[Tensor, Tensor], *, gain: float, mask: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, y = pair
        up = (2 * self.up(x[:, places] * self.scale)).add_(mask).sigmoid()
        up = torch.dropout(up, 0.5, self.training)
        return x + gain * self.down(up), y.exp() * y


class Odds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Odd() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        pair = (x, x.tanh())
        mask = (x.detach().sum(1, keepdim=True) > 0).float().expand(-1, 20)
        for layer in self.layers:
            pair = layer(pair, gain=0.5, mask=mask, places=torch.arange(12).flip(0))
        return pair[0].sum() + pair[1].sum()


def odd(how: Recompute | str) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = Odds(), torch.randn(6, 12, requires_grad=True)
    recompute_units(model, how)
    model(x).backward()
    after = torch.rand(3)  # recomputing has not moved the generator
    return [x.grad, after, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("name", [*HOW, "full, sharded"])
def test_an_odd_model_with_dropout(name: str) -> None:
    how = (HOW | SHARDED)[name]()
    assert equal(odd(how), odd("none"))


def test_a_parameter_changed_before_backward_is_told() -> None:
    """As without hooks, which keep autograd from looking at versions."""
    model, x = build(Recompute("none", Offloaded())), tokens()
    loss = model(x, x)
    with torch.no_grad():
        model.blocks[0].mlp.up.weight.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place"):
        loss.backward()
    recompute_units(layers := nn.Sequential(nn.Linear(2, 2)), "full")
    hidden = torch.ones(2, requires_grad=True) * 1
    y = layers(hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place"):
        y.sum().backward()


def test_only_the_first_units() -> None:
    model, x = build("none"), tokens()
    reference = gradients(model, x, x)
    one, full = (
        sum(Activations(CONFIG, BATCH, mode=m).block().values())
        for m in ("none", "full")
    )
    whole = sum(Activations(CONFIG, BATCH).model().values())
    for number in range(CONFIG.layers + 1):
        names = [f"blocks.{i}" for i in range(number)]
        assert recompute_units(model, "full", number=number) == names
        with SavedTensors(model) as saved:
            loss = model(x, x)
            assert saved.nbytes == whole - number * (one - full)
        del loss
        assert equal(gradients(model, x, x), reference)


# sharded


def parallel(
    how: Callable[[], Recompute] | None,
) -> tuple[list[Tensor], dict[str, int], list[tuple[str, str, int]]]:
    """A backward of the tensor-parallel GPT, and what its blocks' inputs take."""
    torch.manual_seed(0)
    model = tensor_parallel(GPT(CONFIG))
    if how is not None:
        recompute_units(model, how())
    x = tokens()
    gradients(model, x, x)  # the first time, the inputs are compared
    model.zero_grad()
    with comm.ledger() as calls, SavedTensors(model) as saved:
        loss = model(x, x)
        inputs = sum(s.nbytes for s in saved.activations() if s.op == "recompute")
        loss.backward()
    made = [(c.op, c.unit, c.elements) for c in calls]
    out = [loss.detach(), *(p.grad for p in model.parameters())]
    return out, {"inputs": inputs}, made


def test_sharded_inputs_of_a_tensor_parallel_model(pool: Pool) -> None:
    size = BATCH * CONFIG.sequence * CONFIG.hidden
    x = tokens()
    alone = build("none")
    alone_loss = gradients(alone, x, x)[0]
    reference, full = pool.run(parallel, None), pool.run(parallel, HOW["full"])
    for name in SHARDED:
        got = pool.run(parallel, SHARDED[name])
        for r, (out, kept, made) in enumerate(got):
            assert equal(out, reference[r][0]), name
            extra = [c for c in made if c[1] == "activations"]
            assert extra == [("all_gather", "activations", size)] * 3
            if "offloaded" not in name:
                assert kept["inputs"] == CONFIG.layers * 4 * size // len(got)
                assert full[r][1]["inputs"] == CONFIG.layers * 4 * size
    torch.testing.assert_close(reference[0][0][0], alone_loss)
    norm = list(dict(alone.named_parameters())).index("tokens.weight") + 1
    torch.testing.assert_close(
        reference[0][0][norm], alone.tokens.weight.grad, rtol=1e-4, atol=1e-6
    )


@on_two_ranks
@pytest.mark.parametrize("mode", ["full", "none"])
def test_other_activations_on_each_rank_are_refused(mode: str) -> None:
    """With "none", inside a unit too, here where only its input is identical."""
    model = build(Recompute(mode, Sharded()))
    x = tokens(rank() if mode == "full" else 1)
    with torch.no_grad():
        model.blocks[0].mlp.up.weight.add_(rank() if mode == "none" else 0)
    for _ in range(2):  # a caller that tries again is refused again
        with pytest.raises(ValueError, match="hold different .* in unit 'blocks.0'"):
            model(x, x)


@on_each_rank
@pytest.mark.parametrize("shape", [(5, 7, 3), (1,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_any_shape_comes_back(
    shape: tuple[int, ...], dtype: torch.dtype, turned: bool
) -> None:
    store = Sharded(Offloaded())
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator).to(dtype)
    x = x.transpose(0, -1) if turned else x
    held = store.pack(x, store.begin("a unit"))
    back = store.unpack(held)
    shard = held[0][1].host
    size = -(-x.numel() // world_size())
    assert shard.nbytes == size * x.itemsize and on_host(shard) and not on_host(back)
    assert torch.equal(back, x) and back.stride() == x.stride()


# offloaded


def test_offloaded_bytes_leave_the_device_and_are_freed() -> None:
    x = tokens()
    for mode in MODES:
        block = Activations(CONFIG, BATCH, mode=mode).block()
        moved = block if mode == "none" else {("", "recompute"): block["", "recompute"]}
        expected = CONFIG.layers * sum(moved.values())
        store = Offloaded()
        model = build(Recompute(mode, store))
        with Tracker(model) as tracker:
            label(x, "activations")
            before = tracker.live["activations"]
            loss = model(x, x)
            whole = sum(Activations(CONFIG, BATCH, mode=mode).model().values())
            assert tracker.host["activations"] == expected
            assert tracker.live["activations"] - before == whole - expected + 4
            loss.backward()
            assert sum(tracker.host.values()) == 0
            assert tracker.live["activations"] == before + 4
            assert store._last() is None  # no chain of calls is left
        # parameters stay where they are
        assert tracker.host_peak == expected


def test_a_small_window_does_not_carry_its_storage() -> None:
    store = Offloaded()
    large = torch.randn(1000, 8)
    call = store.begin("a unit")
    held = store.pack(large[10:12], call)
    assert held[1].host.nbytes == 2 * 8 * 4
    assert torch.equal(store.unpack(held), large[10:12])


def test_a_storage_is_copied_once_and_again_when_changed() -> None:
    store = Offloaded()
    call = store.begin("a unit")
    x = torch.arange(12.0).view(3, 4)
    a, b = store.pack(x[0], call), store.pack(x.t(), call)
    assert a[1] is b[1]
    x.add_(1)
    c = store.pack(x, call)
    assert c[1] is not a[1]
    assert torch.equal(store.unpack(b), (x - 1).t())
    assert torch.equal(store.unpack(c), x)


# wrong use


def test_what_is_wrong_is_told() -> None:
    with pytest.raises(ValueError, match="mode must be one of none, selective, full"):
        Recompute("half")
    with pytest.raises(ValueError, match="Linear has no units to recompute"):
        recompute_units(nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match="unit '0' has a forward of its own"):
        recompute_units(model)
