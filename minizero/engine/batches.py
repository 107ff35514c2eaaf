"""What an engine is fed with: loaders, and the sizes of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from ..config import Config
from ..config.batch import batch_sizes
from .data import Loader
from .step_loop import Loop

ROUTES = ("train", "eval", "predict")


class Feeding(Loop):
    """A loop that knows where its batches come from.

    `training_dataloader`: whose place in the data is saved, if there is one.
    `collate_fn`: of loaders for which none is given.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
        training_dataloader: Loader | None,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        super().__init__(config, model, optimizer, lr_scheduler)
        self.training_dataloader = training_dataloader
        self.collate_fn = collate_fn

    def deepspeed_io(
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
        if batch_size is None:
            batch_size = self.train_micro_batch_size_per_gpu()
        collate_fn = collate_fn or self.collate_fn
        drop_last = self.config.dataloader_drop_last
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
        micro = self.train_micro_batch_size_per_gpu()
        self._resize(train_batch_size, micro, None)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Other samples in a forward of one rank; as many micro-batches.

        Between steps only: else RuntimeError. `training_dataloader` gives
        such batches from its next iterator on.
        """
        _check_size(micro_batch_size)
        steps = self.gradient_accumulation_steps()
        self._resize(None, micro_batch_size, steps)
        if self.training_dataloader is not None:
            self.training_dataloader.batch_size = micro_batch_size

    def _resize(self, total: int | None, micro: int, steps: int | None) -> None:
        if self.position() or self.net.has_gradients:
            of = self.gradient_accumulation_steps()
            raise RuntimeError(
                f"a step is under way, at micro-batch {self.position() + 1} "
                f"of {of}; change its size after the step() at the boundary"
            )
        sizes = batch_sizes(self.world_size, total, micro, steps)
        total, micro, steps = sizes
        self.config = self.config.model_copy(
            update={
                "train_batch_size": total,
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": steps,
            }
        )
        self._first = self.micro_steps


def _check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f"a batch is a whole number of samples, at least 1, not {size!r}"
        )
