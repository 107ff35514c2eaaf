"""Batches for this rank, and a place in the data that survives a resume."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..ranks.launch import world_size
from .sampling import StreamPart, sampler_of


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
