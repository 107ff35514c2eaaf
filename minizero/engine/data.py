"""Batches for this rank, and a place in the data that survives a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from ..ranks import rank, world_size

Collate = Callable[[list[Any]], Any]


class ShardSampler(DistributedSampler[Any]):
    """The samples of this rank, in the order of torch's `DistributedSampler`.

    `start`: how many indices of the permutation are left out, because they have been
    seen. What follows does not depend on the number of ranks that saw them.
    """

    def __init__(self, data: Any) -> None:
        super().__init__(data, world_size(), rank())
        self.permutation = DistributedSampler[Any](data, 1, 0)
        self.start = 0

    def __len__(self) -> int:
        return -(-(len(self.permutation) - self.start) // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        self.permutation.epoch, self.permutation.seed = self.epoch, self.seed
        order, total = [*self.permutation], len(self) * self.num_replicas
        left = order[self.start :]
        while len(left) < total:  # repeat the first samples, as torch does
            left += order[: total - len(left)]
        return iter(left[self.rank : total : self.num_replicas])


class Loader(DataLoader[Any]):
    """Batches of one rank, [batch_size, ...], in the order of its `data_sampler`.

    An iterator begins the epoch anew; after `load_state_dict` the next batch is the one
    after the saved place, and until then `len` counts what is left. The permutation is
    the same in each epoch unless `data_sampler.set_epoch` changes it, as in DeepSpeed.

    `dataset`: with `len` and `[index]`. `drop_last`: leave out a smaller last batch.
    `seen`: samples of all ranks that the last iterator has given; None between epochs.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        collate_fn: Collate | None = None,
        drop_last: bool = False,
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(
                "training_data takes a dataset with len() and [index], not a "
                f"{type(dataset).__name__}; for a stream, make a torch DataLoader of "
                "this rank's samples yourself, and leave training_data out"
            )
        self.data_sampler = ShardSampler(dataset)
        self.seen: int | None = None
        self._has_moved = False  # `load_state_dict` was called, perhaps in mid-epoch
        super().__init__(
            dataset,
            batch_size,
            sampler=self.data_sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=torch.cuda.is_available(),
        )
        if not len(self):
            raise ValueError(
                f"each rank has {len(self.data_sampler)} samples, too few for one "
                f"micro-batch of {batch_size} with drop_last={drop_last}"
            )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler, each = self.data_sampler, world_size() * (self.batch_size or 1)
        while True:  # again for each place that `load_state_dict` has set
            start, batches = sampler.start, super().__iter__()
            self.generator, self._has_moved = None, False
            for number, batch in enumerate(batches, 1):
                sampler.start = 0  # the next iterator begins the epoch anew
                self.seen = min(start + number * each, len(sampler.permutation))
                yield batch
                if self._has_moved:
                    break
            else:  # the epoch has ended
                sampler.start, self.seen = 0, None
                return

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, the same on every rank."""
        sampler = self.data_sampler
        place = {"seed": sampler.seed, "epoch": sampler.epoch, "seen": self.seen}
        return place | {"samples": len(self.dataset)}  # type: ignore[arg-type]

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if the saved place is in data of another length."""
        if state["samples"] != len(self.dataset):  # type: ignore[arg-type]
            raise ValueError(
                f"the saved place is in data of {state['samples']:,} samples, and this "
                f"has {len(self.dataset):,}"  # type: ignore[arg-type]
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a saved place, with the next batch that is read."""
        self.check_state(state)
        self.data_sampler.seed = state["seed"]
        self.data_sampler.set_epoch(state["epoch"])
        self.seen = state["seen"]
        self.data_sampler.start, self._has_moved = self.seen or 0, True
        # A new iterator draws a seed. The saved run drew it from torch's generator before
        # that generator's state was saved, so this one must not draw from it again.
        self.generator = torch.Generator() if self.seen is not None else None
