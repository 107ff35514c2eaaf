"""What an engine is fed with: loaders, and the sizes of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from ..config.batch import MICRO, STEPS, TOTAL, batch_sizes
from ..ranks.launch import world_size
from .data import Loader
from .step_loop import Accumulation, StepLoop

ROUTES = ("train", "eval", "predict")


class BatchFeeder:
    """Knows where batches come from, and how large they are.

    `loader`: whose place in the data is saved, if there is one.
    `collate_fn`: of loaders for which none is given.
    """

    def __init__(
        self,
        loop: StepLoop,
        loader: Loader | None,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.loop, self.steps = loop, loop.steps
        self.loader, self.collate_fn = loader, collate_fn

    def loader_of(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Loader | DataLoader[Any]:
        """A loader of this rank's part of a dataset, such as one to evaluate.

        `batch_size`: of one rank; default: a micro-batch. `route`: "train"
        shuffles, "eval" and "predict" do not. With a `data_sampler`, which
        says what this rank sees, it is torch's own `DataLoader`.
        `num_local_io_workers`: processes that load; default: this one.
        `pin_memory`: of those loaders that are torch's; others do, for a GPU.
        """
        if route not in ROUTES:
            raise ValueError(f"route must be one of {', '.join(ROUTES)}, not {route!r}")
        config = self.steps.config
        if batch_size is None:
            batch_size = config.train_micro_batch_size_per_gpu
        collate_fn = collate_fn or self.collate_fn
        drop_last = config.dataloader_drop_last
        workers = num_local_io_workers or 0
        if data_sampler is not None:
            return DataLoader(
                dataset,
                batch_size,
                sampler=data_sampler,
                collate_fn=collate_fn,
                drop_last=drop_last,
                num_workers=workers,
                pin_memory=pin_memory and torch.cuda.is_available(),
            )
        shuffle = route == "train"
        return Loader(dataset, batch_size, collate_fn, drop_last, workers, shuffle)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Other samples in a step: more or fewer micro-batches, of one size.

        Between steps only: else RuntimeError. ValueError if it is no
        multiple of a micro-batch on all ranks.
        """
        _check_size(train_batch_size)
        micro = self.steps.config.train_micro_batch_size_per_gpu
        self._resize(train_batch_size, micro, None)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Other samples in a forward of one rank; as many micro-batches.

        Between steps only: else RuntimeError. `training_dataloader` gives
        such batches from its next iterator on.
        """
        _check_size(micro_batch_size)
        micro_batches = self.steps.config.gradient_accumulation_steps
        self._resize(None, micro_batch_size, micro_batches)
        if self.loader is not None:
            self.loader.batch_size = micro_batch_size

    def _resize(self, total: int | None, micro: int, steps: int | None) -> None:
        if self.steps.position() or self.loop.net.has_gradients:
            raise RuntimeError(
                f"a step is under way, at {place(self.steps)}; change its size "
                "after the step() at the boundary"
            )
        sizes = batch_sizes(world_size(), total, micro, steps)
        new: Any = dict(zip((TOTAL, MICRO, STEPS), sizes, strict=True))
        self.steps.resize(self.steps.config.model_copy(update=new))


def place(steps: Accumulation) -> str:
    """Where a step that is under way has come to."""
    of = steps.config.gradient_accumulation_steps
    return f"micro-batch {steps.position() + 1} of {of}"


def _check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f"a batch is a whole number of samples, at least 1, not {size!r}"
        )
