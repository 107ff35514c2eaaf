"""Batches for this rank, and a place in the data that survives a resume."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

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


class Loader:
    """Batches of one rank, [batch_size, ...], in the order of the sampler.

    `iter` begins the epoch anew; after `load_state_dict`, what is read next
    goes on where that says. The permutation is the same in each epoch unless
    `data_sampler.set_epoch` says otherwise, as with DeepSpeed.

    `data`: a map-style dataset (`len` and `[index]`), or one that is only
    iterated over (see `StreamPart`). `drop_last`: whether the last batch is
    left out if it is smaller. `workers`: processes that load; 0 loads in
    this one. `shuffle`: of a map-style dataset.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        workers: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.dataset, self.batch_size = data, batch_size
        self.collate_fn, self.drop_last = collate_fn, drop_last
        self.workers = workers
        self.data_sampler = sampler_of(data, shuffle)
        streams = isinstance(self.data_sampler, StreamPart)
        self.samples: int | None = None if streams else len(data)
        if streams and workers > 1:
            raise ValueError(
                f"{workers} processes would each read the whole stream; let "
                "one of them load, or none"
            )
        if not streams and not len(self):
            each = -(-len(data) // world_size())
            raise ValueError(
                f"each rank has {each} samples, fewer than a micro-batch of "
                f"{batch_size}, and dataloader_drop_last drops smaller ones; "
                "set it to false, or give more samples"
            )
        self.seen: int | None = None  # by the iterator that was read last
        self.resumed = False  # whether `seen` is loaded, and not yet read on

    def __len__(self) -> int:
        """Batches of a whole epoch; TypeError for a stream without length."""
        extra = 0 if self.samples is None else world_size() - 1
        each = (len(self.dataset) + extra) // world_size()
        if self.drop_last:
            return each // self.batch_size
        return -(-each // self.batch_size)

    def __iter__(self) -> Epoch:
        return Epoch(self)

    def open(self, seen: int, generator: torch.Generator | None) -> Any:
        """The batches from a place on; `generator`: seeds the workers."""
        part = copy.copy(self.data_sampler)
        part.start = seen
        streams = self.samples is None
        dataset: Any = part if streams else self.dataset
        loader = DataLoader(
            dataset,
            self.batch_size,
            sampler=None if streams else part,
            collate_fn=self.collate_fn,
            drop_last=self.drop_last,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            generator=generator,
        )
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """The place, which is the same on every rank; JSON can hold it.

        `seen`: samples of all ranks in this epoch; None between epochs.
        `samples`: of the whole data; None for a stream.
        """
        return {
            "samples": self.samples,
            "seed": self.data_sampler.seed,
            "epoch": self.data_sampler.epoch,
            "seen": self.seen,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if the data has another length."""

        def said(samples: int | None) -> str:
            return "a stream" if samples is None else f"{samples:,} samples"

        if state["samples"] != self.samples:
            raise ValueError(
                f"the saved place is in data of {said(state['samples'])}, "
                f"and this is of {said(self.samples)}; give the same data"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at that place, with the next batch that is read.

        Raises ValueError if the data has another length.
        """
        self.check_state(state)
        self.data_sampler.seed = state["seed"]
        self.data_sampler.set_epoch(state["epoch"])
        self.seen = state["seen"]
        self.resumed = self.seen is not None


class Epoch(Iterator[Any]):
    """An iterator over a loader, from the start or from a loaded place."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._batches: Iterator[Any] | None = None
        if not loader.resumed:
            self._open(0, None)

    def _open(self, seen: int, generator: torch.Generator | None) -> None:
        self._seen = self.loader.seen = seen
        self._each = self.loader.batch_size * world_size()
        self._batches = self.loader.open(seen, generator)

    def __next__(self) -> Any:
        loader = self.loader
        if loader.resumed:
            loader.resumed = False
            # An iterator draws a seed. This one may not: the run that it
            # continues drew it before its random state was saved.
            self._open(loader.seen or 0, torch.Generator())
        elif self._batches is None:
            self._open(0, None)
        assert self._batches is not None
        try:
            batch = next(self._batches)
        except StopIteration:
            loader.seen = None
            raise
        self._seen += self._each
        most = loader.samples
        loader.seen = self._seen if most is None else min(self._seen, most)
        return batch
