"""Batches for this rank, and a place in the data that survives a resume."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from .launch import rank, world_size


class ShardSampler(Sampler[int]):
    """Which samples this rank sees, in which order: a part of a permutation.

    That of torch's `DistributedSampler`: all ranks draw one permutation from
    `seed + epoch`, and rank r of N takes every N-th index from r on. What is
    missing to a multiple of N is filled up from the permutation's start.

    `start`: how many indices of the permutation are left out, for they have
    been seen. What follows does not depend on the number of ranks that saw
    them.
    """

    def __init__(self, data: Sized, seed: int = 0) -> None:
        if not len(data):
            raise ValueError("the training data is empty; give some samples")
        self.data, self.seed = data, seed
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Another epoch is another permutation, from the next iterator on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-(len(self.data) - self.start) // world_size())

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.data), generator=generator).tolist()
        left, missing = order[self.start :], len(self) * world_size()
        while len(left) < missing:
            left += order[: missing - len(left)]
        return iter(left[rank() : missing : world_size()])


class Loader:
    """Batches of one rank, [batch_size, ...], in the order of the sampler.

    It is its own iterator: `iter` begins the epoch anew, or goes on where
    `load_state_dict` has put it. The permutation is the same in each epoch
    unless `data_sampler.set_epoch` says otherwise, as with DeepSpeed.

    `data`: a map-style dataset (`len` and `[index]`). `drop_last`: whether
    the last batch is left out if it is smaller. `workers`: processes that
    load; 0 loads in this one.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        workers: int = 0,
    ) -> None:
        indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if isinstance(data, IterableDataset) or not indexed:
            raise TypeError(
                "training_data takes a map-style dataset, with len() and "
                f"[index], not a {type(data).__name__}; give each rank its "
                "own part of a stream with a torch DataLoader of your own"
            )
        self.dataset, self.batch_size = data, batch_size
        self.collate_fn, self.drop_last = collate_fn, drop_last
        self.workers = workers
        self.data_sampler = ShardSampler(data)
        self._batches: Iterator[Any] | None = None
        self._seen = 0  # samples of all ranks, in this epoch
        self._moved = False  # by `load_state_dict`; not yet read on

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        each = -(-len(self.dataset) // world_size())
        if self.drop_last:
            return each // self.batch_size
        return -(-each // self.batch_size)

    def __iter__(self) -> Loader:
        if not self._moved:
            self._seen = 0
        self._batches = None
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._open()
        self._moved = False
        try:
            batch = next(self._batches)
        except StopIteration:
            self._seen, self._batches = 0, iter(())
            raise
        step = self.batch_size * world_size()
        self._seen = min(self._seen + step, len(self.dataset))
        return batch

    def _open(self) -> Iterator[Any]:
        """The batches from here to the end of the epoch."""
        sampler = copy.copy(self.data_sampler)
        sampler.start = self._seen
        # An iterator draws one number. One that goes on in mid-epoch may not:
        # the run that it continues drew it before its random state was saved.
        resumed = self._moved and self._seen > 0
        generator = torch.Generator() if resumed else None
        loader = DataLoader(
            self.dataset,
            self.batch_size,
            sampler=sampler,
            collate_fn=self.collate_fn,
            drop_last=self.drop_last,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            generator=generator,
        )
        return iter(loader)

    def state_dict(self) -> dict[str, int]:
        """The place, which is the same on every rank; JSON can hold it."""
        return {
            "samples": len(self.dataset),
            "seed": self.data_sampler.seed,
            "epoch": self.data_sampler.epoch,
            "seen": self._seen,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at that place, with the next batch or the next `iter`.

        Raises ValueError if the data has another length.
        """
        if state["samples"] != len(self.dataset):
            raise ValueError(
                f"the saved place is in data of {state['samples']:,} "
                f"samples, and this has {len(self.dataset):,}; give the same "
                "data, or load without it"
            )
        self.data_sampler.seed = state["seed"]
        self.data_sampler.epoch = state["epoch"]
        self._seen, self._batches = state["seen"], None
        self._moved = True
