"""Batches of a rank: from a dataset, and from a place that was saved."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from minizero.engine import data
from minizero.engine.data import Loader, ShardSampler


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this process rank r of n for the loader."""

    def become(r: int, n: int) -> None:
        monkeypatch.setattr(data, "rank", lambda: r)
        monkeypatch.setattr(data, "world_size", lambda: n)

    return become


def test_samples_are_distributed_as_by_torch(become: Callable[..., None]) -> None:
    from torch.utils.data import DistributedSampler

    for n, length, epoch in ((1, 7, 0), (2, 7, 1), (3, 10, 2), (4, 3, 0), (5, 2, 1)):
        samples = range(length)
        for r in range(n):
            become(r, n)
            mine, theirs = ShardSampler(samples), DistributedSampler(samples, n, r)
            mine.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(mine) == list(theirs) and len(mine) == len(theirs)


def test_epochs(become: Callable[..., None]) -> None:
    """Each has every sample once, in one order unless the script sets the epoch."""
    loaders = []
    for r in range(3):
        become(r, 3)
        loader = Loader(torch.arange(24), 4)
        assert len(loader) == 2
        loaders.append((list(loader), list(loader)))
        loader.data_sampler.set_epoch(1)
        assert not torch.equal(next(iter(loader)), loaders[-1][0][0])
    for epoch in (0, 1):
        seen = torch.cat([torch.cat(each[epoch]) for each in loaders])
        assert sorted(seen.tolist()) == list(range(24))
    assert all(map(torch.equal, loaders[0][0], loaders[0][1]))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_resumed_in_mid_epoch_on_any_number_of_ranks(
    become: Callable[..., None], n: int
) -> None:
    """Some batches on other ranks, the rest on n: each sample once."""
    for batches, ranks, size in ((0, 2, 2), (3, 2, 2), (1, 4, 3), (6, 4, 2)):
        seen, states = [], []
        for r in range(ranks):
            become(r, ranks)
            loader = Loader(range(48), size)
            it = iter(loader)
            for _ in range(batches):
                seen += next(it).tolist()
            states.append(loader.state_dict())
        assert all(state == states[0] for state in states)
        for r in range(n):
            become(r, n)
            loader = Loader(range(48), 2)
            loader.load_state_dict(json.loads(json.dumps(states[0])))
            for batch in loader:
                seen += batch.tolist()
            assert len(list(loader)) == 48 // (2 * n)  # and then a whole epoch
        assert sorted(seen) == list(range(48)), (batches, ranks, size)


@pytest.mark.parametrize("begun", [0, 2])
def test_a_resumed_loader_is_the_same_run(
    become: Callable[..., None], begun: int
) -> None:
    """Batches and random numbers, by an iterator that was there before the load."""
    become(1, 2)
    torch.manual_seed(0)
    loader = Loader(range(21), 2)
    loader.data_sampler.set_epoch(3)
    rest = []
    for i, batch in enumerate(loader):
        if i == 2:
            state, random = loader.state_dict(), torch.get_rng_state()
        if i > 2:
            rest.append((batch.tolist(), torch.rand(1).item()))
    resumed = Loader(range(21), 2)
    iterator = iter(resumed)
    for _ in range(begun):
        next(iterator)
    torch.set_rng_state(random)
    resumed.load_state_dict(state)
    assert [(batch.tolist(), torch.rand(1).item()) for batch in iterator] == rest
    assert len(rest) > 2 and resumed.state_dict()["seen"] is None


def test_bad_data() -> None:
    for samples, drops in (([], False), (range(2), True)):
        with pytest.raises(ValueError, match=f"has {len(samples)} samples, too"):
            Loader(samples, 3, drop_last=drops)
    for stream in ((x for x in range(3)), 5):
        with pytest.raises(TypeError, match="for a stream, make a torch DataLoader"):
            Loader(stream, 2)
    loader = Loader(range(5), 2)
    with pytest.raises(ValueError, match="of 4 samples, and this has 5"):
        loader.load_state_dict(Loader(range(4), 2).state_dict())
