"""Which samples are this rank's: a part of a permutation, or of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from ..ranks.launch import rank, world_size


class ShardSampler(Sampler[int]):
    """Which samples this rank sees, in which order: a part of a permutation.

    That of torch's `DistributedSampler`: all ranks draw one permutation from
    `seed + epoch`, and rank r of N takes every N-th index from r on. What is
    missing to a multiple of N is filled up from the permutation's start.
    Without `shuffle` the permutation is 0, 1, 2, ...

    `start`: how many indices of the permutation are left out, for they have
    been seen. What follows does not depend on the number of ranks that saw
    them.
    """

    def __init__(self, data: Sized, seed: int = 0, shuffle: bool = True) -> None:
        if not len(data):
            raise ValueError("the training data is empty; give some samples")
        self.data, self.seed, self.shuffle = data, seed, shuffle
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Another epoch is another permutation, from the next iterator on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-(len(self.data) - self.start) // world_size())

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(self.data)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        left, missing = order[self.start :], len(self) * world_size()
        while len(left) < missing:
            left += order[: missing - len(left)]
        return iter(left[rank() : missing : world_size()])


class StreamPart(IterableDataset[Any]):
    """Which samples of a stream this rank sees: sample r of each N.

    The stream is the same on every rank, and does not split itself. What is
    left at its end, and is not enough for all ranks, is left out: a rank with
    one batch more than the others would wait for them.

    `start`: how many samples are read over, for they have been seen.
    `set_epoch` is the stream's own, if it has one.
    """

    def __init__(self, stream: Iterable[Any]) -> None:
        self.stream = stream
        self.seed = self.epoch = self.start = 0
        # a process that loads for this rank does not know its number
        self.rank, self.ranks = rank(), world_size()

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream, which may shuffle by it."""
        self.epoch = epoch
        tell = getattr(self.stream, "set_epoch", None)
        if tell is not None:
            tell(epoch)

    def __iter__(self) -> Iterator[Any]:
        left = islice(iter(self.stream), self.start, None)
        while len(each := list(islice(left, self.ranks))) == self.ranks:
            yield each[self.rank]


def sampler_of(data: Any, shuffle: bool) -> ShardSampler | StreamPart:
    """What says which samples are this rank's."""
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if indexed and not isinstance(data, IterableDataset):
        return ShardSampler(data, shuffle=shuffle)
    if isinstance(data, Iterable) and not isinstance(data, Iterator):
        return StreamPart(data)
    raise TypeError(
        "training_data takes a dataset with len() and [index], or one that "
        "can be iterated over again and again, such as an IterableDataset; "
        f"not a {type(data).__name__}"
    )
