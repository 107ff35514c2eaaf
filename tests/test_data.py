"""Batches of a rank: from a dataset, from a stream, and from a place that was saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from minizero.engine import data
from minizero.engine.data import Loader, ShardSampler


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this process rank r of n for the loader."""

    def become(r: int, n: int) -> None:
        monkeypatch.setattr(data, "rank", lambda: r)
        monkeypatch.setattr(data, "world_size", lambda: n)

    return become


def test_samples_are_distributed_as_by_torch(ranks: Callable[..., None]) -> None:
    from torch.utils.data import DistributedSampler

    for n, length, epoch in ((1, 7, 0), (2, 7, 1), (3, 10, 2), (4, 3, 0), (5, 2, 1)):
        samples = range(length)
        for r in range(n):
            ranks(r, n)
            mine, theirs = ShardSampler(samples), DistributedSampler(samples, n, r)
            mine.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(mine) == list(theirs) and len(mine) == len(theirs)


def test_epochs(ranks: Callable[..., None]) -> None:
    loaders = []
    for r in range(3):
        ranks(r, 3)
        loader = Loader(torch.arange(24), 4)
        assert len(loader) == 2
        loaders.append((list(loader), list(loader)))
        loader.data_sampler.set_epoch(1)
        assert not torch.equal(next(iter(loader)), loaders[-1][0][0])
    for epoch in (0, 1):
        seen = torch.cat([torch.cat(each[epoch]) for each in loaders])
        assert sorted(seen.tolist()) == list(range(24))
    # the same order, unless the script sets the epoch
    assert all(map(torch.equal, loaders[0][0], loaders[0][1]))


def test_the_last_batch(ranks: Callable[..., None]) -> None:
    ranks(0, 2)
    whole, dropped = Loader(range(14), 3), Loader(range(14), 3, drop_last=True)
    assert [len(b) for b in whole] == [3, 3, 1] and len(whole) == 3
    assert [len(b) for b in dropped] == [3, 3] and len(dropped) == 2
    named = Loader(range(14), 3, collate_fn=lambda samples: {"x": samples})
    assert [len(b["x"]) for b in named] == [3, 3, 1]


class Stream(IterableDataset[int]):
    """0, 1, ... in each epoch, from the epoch's number on."""

    epoch = 0

    def __init__(self, length: int) -> None:
        self.length = length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + self.length))


def split_epoch(
    become: Callable[..., None],
    make: Callable[[int], Any],
    batches: int,
    before: tuple[int, int],
    n: int,
) -> list[int]:
    """`batches` on `before` = ranks, batch size; the rest on n others."""
    seen: list[int] = []
    ranks, size = before
    states = []
    for r in range(ranks):
        become(r, ranks)
        loader = Loader(make(48), size)
        it = iter(loader)
        for _ in range(batches):
            seen += next(it).tolist()
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    for r in range(n):
        become(r, n)
        loader = Loader(make(48), 2)
        loader.load_state_dict(json.loads(json.dumps(states[0])))
        for batch in loader:
            seen += batch.tolist()
        # and then a new epoch
        assert len(list(loader)) == 48 // (2 * n)
    return seen


@pytest.mark.parametrize("make", [range, Stream])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_resumed_in_mid_epoch_on_any_number_of_ranks(
    ranks: Callable[..., None], make: Callable[[int], Any], n: int
) -> None:
    for taken, before in ((0, (2, 2)), (3, (2, 2)), (1, (4, 3)), (6, (4, 2))):
        seen = split_epoch(ranks, make, taken, before, n)
        assert sorted(seen) == list(range(48)), f"{taken} batches of {before}"


def test_resumed_on_the_same_ranks_it_is_the_same_run(
    ranks: Callable[..., None],
) -> None:
    ranks(1, 2)
    torch.manual_seed(0)
    loader = Loader(range(21), 2)
    loader.data_sampler.set_epoch(3)
    rest, numbers = [], torch.empty(0)
    for i, batch in enumerate(loader):
        if i == 2:
            state, random = loader.state_dict(), torch.get_rng_state()
        if i > 2:
            rest.append(batch)
            numbers = torch.cat([numbers, torch.rand(1)])
    resumed = Loader(range(21), 2)
    iterator = iter(resumed)  # as a RepeatingLoader has done, before the load
    torch.set_rng_state(random)
    resumed.load_state_dict(state)
    got, drawn = [], torch.empty(0)
    for batch in iterator:
        got.append(batch)
        drawn = torch.cat([drawn, torch.rand(1)])
    assert len(got) == len(rest) and all(map(torch.equal, got, rest))
    assert torch.equal(drawn, numbers)


def test_bad_data() -> None:
    with pytest.raises(ValueError, match="training data is empty"):
        Loader([], 2)
    with pytest.raises(ValueError, match="has 2 samples, fewer than a micro"):
        Loader(range(2), 3, drop_last=True)
    once = (x for x in range(3))
    for nothing in (once, 5):
        with pytest.raises(TypeError, match="iterated over again .* not a (gen|int)"):
            Loader(nothing, 2)
    with pytest.raises(ValueError, match="2 processes would each read the whole"):
        Loader(Stream(4), 2, workers=2)
    with pytest.raises(TypeError, match="no len"):
        len(Loader(Stream(4), 2))
    loader = Loader(range(5), 2)
    for other, said in ((range(4), "of 4 samples"), (Stream(4), "of a stream")):
        with pytest.raises(ValueError, match=f"{said}, and this is of 5 samples"):
            loader.load_state_dict(Loader(other, 2).state_dict())


def test_streams(ranks: Callable[..., None]) -> None:
    """Sample r of each N; no rank has a batch more than the others."""
    for n, length in ((1, 5), (2, 11), (3, 14), (4, 3)):
        loaders = []
        for r in range(n):
            ranks(r, n)
            loaders.append(Loader(Stream(length), 2))
            loaders[-1].data_sampler.set_epoch(7)  # which the stream is told
            whole = length // n
            batches = [batch.tolist() for batch in loaders[-1]]
            assert sum(batches, []) == list(range(7 + r, 7 + n * whole, n))
            assert len(batches) == -(-whole // 2)
            short = Loader(Stream(length), 2, drop_last=True, workers=length % 2)
            assert [len(b) for b in short] == [2] * (whole // 2)
    ranks(0, 2)
    counted = [[3], [5], [7]]  # a list is indexed, a set is not
    assert Loader(counted, 1).samples == 3
    assert Loader({3: 0, 5: 0}.keys(), 1).samples is None
    assert len(Loader({3: 0, 5: 0, 7: 0}.keys(), 1)) == 1


def test_a_stream_is_resumed_in_its_epoch() -> None:
    loader = Loader(Stream(9), 2)
    loader.data_sampler.set_epoch(4)
    it = iter(loader)
    assert next(it).tolist() == [4, 5]
    state = json.loads(json.dumps(loader.state_dict()))
    assert state == {"samples": None, "seed": 0, "epoch": 4, "seen": 2}
    other = Loader(Stream(9), 2)
    other.load_state_dict(state)
    assert torch.cat(list(other)).tolist() == list(range(6, 13))
    assert other.state_dict()["seen"] is None


def test_without_shuffling(ranks: Callable[..., None]) -> None:
    ranks(1, 2)
    loader = Loader(range(7), 2, shuffle=False)
    assert [b.tolist() for b in loader] == [[1, 3], [5, 0]]


def test_another_batch_size_counts_from_the_next_iterator(
    ranks: Callable[..., None],
) -> None:
    ranks(0, 2)
    loader = Loader(range(24), 2)
    it = iter(loader)
    next(it)
    loader.batch_size = 3
    assert len(next(it)) == 2 and loader.seen == 8
    assert len(next(iter(loader))) == 3 and loader.seen == 6
