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

    `iter` begins the epoch anew; after `load_state_dict`, what is read next
    goes on where that says. The permutation is the same in each epoch unless
    `data_sampler.set_epoch` says otherwise, as with DeepSpeed.

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
        self.seen: int | None = None  # by the iterator that was read last
        self.resumed = False  # whether `seen` is loaded, and not yet read on

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        each = -(-len(self.dataset) // world_size())
        if self.drop_last:
            return each // self.batch_size
        return -(-each // self.batch_size)

    def __iter__(self) -> Epoch:
        return Epoch(self)

    def open(self, seen: int, generator: torch.Generator | None) -> Any:
        """The batches from a place on; `generator`: seeds the workers."""
        sampler = copy.copy(self.data_sampler)
        sampler.start = seen
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

    def state_dict(self) -> dict[str, Any]:
        """The place, which is the same on every rank; JSON can hold it.

        `seen`: samples of all ranks in this epoch; None between epochs.
        """
        return {
            "samples": len(self.dataset),
            "seed": self.data_sampler.seed,
            "epoch": self.data_sampler.epoch,
            "seen": self.seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at that place, with the next batch that is read.

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
        self._seen += loader.batch_size * world_size()
        loader.seen = min(self._seen, len(loader.dataset))
        return batch
