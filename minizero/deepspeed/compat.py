"""DeepSpeed's names that need code. Importing it gives parameters `ds_id`, `ds_status`."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import kernels, zero
from ..activations import CHECKPOINT, Offloaded
from ..checkpoint import Folder, consolidate, export
from ..config import Source, read
from ..memory.placement import check
from ..ranks import init_distributed as find_ranks
from ..ranks import rank, world_size


def Init(
    module: nn.Module | None = None,
    *,
    config_dict_or_path: Source | None = None,
    config: Source | None = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    remote_device: str | None = None,
    mem_efficient_linear: bool = True,
    pin_memory: bool = False,
) -> zero.Init:
    """`minizero.zero.Init`; the ranks need not be connected yet.

    `module`: shard this model at once. The last four have no effect: parameters keep the
    dtype that they are made in, since masters are made of them, and the config says
    where they are stored.
    """
    if enabled:
        find_ranks()
    chosen = config_dict_or_path if config is None else config
    made = zero.Init(chosen, enabled=enabled)
    if module is not None and made.enabled:
        made._added(module, "", module)  # as if a module outside had just got it
        made._unshard_only([])
    return made


def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter | None],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[None]:
    """`minizero.zero.GatheredParameters`; None in `params` is left out."""
    if not enabled:
        return nullcontext()
    chosen = [params] if isinstance(params, nn.Parameter) else params
    return zero.GatheredParameters([p for p in chosen if p is not None], modifier_rank)


class ZeroParamStatus(Enum):
    """A sharded parameter's `ds_status`: whether it is unsharded now."""

    AVAILABLE, NOT_AVAILABLE, INFLIGHT = range(1, 4)


def _ds_status(p: Any) -> ZeroParamStatus:
    full = p.sharded_in.is_unsharded
    return ZeroParamStatus.AVAILABLE if full else ZeroParamStatus.NOT_AVAILABLE


# other parameters have no `sharded_in`, so `hasattr(p, "ds_id")` finds the sharded ones
nn.Parameter.ds_status = property(_ds_status)  # type: ignore[attr-defined]
nn.Parameter.ds_id = property(lambda p: id(p.sharded_in))  # type: ignore[attr-defined]


def init_distributed(
    dist_backend: str | None = None, *unused: Any, timeout: Any = None, **others: Any
) -> None:
    """`minizero.init_distributed`: torchrun says which rank this process is."""
    find_ranks(dist_backend, timeout)


def get_local_rank() -> int:
    """The number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", rank()))


class Accelerator:
    """For `get_accelerator`: names of torch.cuda or torch.cpu, else of torch. What both
    lack: "...memory..." gives 0, "...supported..." 1, `empty_cache` does nothing."""

    def __init__(self) -> None:
        self.kind = "cuda" if torch.cuda.is_available() else "cpu"

    def __getattr__(self, name: str) -> Any:
        for module in (torch.get_device_module(self.kind), torch):
            if hasattr(module, name):
                return getattr(module, name)
        if name == "empty_cache" or "memory" in name or "supported" in name:
            return lambda *_, **__: int("supported" in name)
        raise AttributeError(f"torch.{self.kind} has no {name}")

    def device_name(self, device_index: int | None = None) -> str:
        numbered = device_index is not None and self.kind != "cpu"
        return f"{self.kind}:{device_index}" if numbered else self.kind

    def current_device_name(self) -> str:
        return self.device_name(None if self.kind == "cpu" else self.current_device())

    def communication_backend_name(self) -> str:
        return "gloo" if self.kind == "cpu" else "nccl"


get_accelerator = cache(Accelerator)


class DeepSpeedCPUAdam(kernels.FusedAdam):
    """torch's fused Adam on the host, with DeepSpeed's names of its arguments."""

    def __init__(
        self, model_params: Any, lr: float = 1e-3, *, adamw_mode: bool = True, **kw: Any
    ) -> None:
        super().__init__(model_params, lr, adam_w_mode=adamw_mode, **kw)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
) -> None:
    """Write a checkpoint's weights in fp32, as `pytorch_model.bin` or safetensors."""
    if safe_serialization:
        units = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
        number, unit = max_shard_size[:-2], max_shard_size[-2:].upper()
        check("the unit of max_shard_size", unit, units)
        most = int(float(number) * units[unit])
        export(checkpoint_dir, output_dir, tag, torch.float32, most)
        return
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(consolidate(checkpoint_dir, tag), folder / "pytorch_model.bin")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Folder, tag: str | None = None
) -> nn.Module:
    """Load a checkpoint's weights into a model without engine, on the host."""
    model.cpu().load_state_dict(consolidate(checkpoint_dir, tag), strict=False)
    return model


def configure(
    mpu_: Any = None,
    deepspeed_config: Source | None = None,
    *,
    checkpoint_in_cpu: bool | None = None,
    **others: Any,
) -> None:
    """Set whether `checkpoint` keeps arguments in host memory, in the whole process."""
    if ignored := [name for name, value in others.items() if value]:
        warnings.warn(f"{', '.join(ignored)} without effect", stacklevel=2)
    if checkpoint_in_cpu is None and deepspeed_config is not None:
        config = read(deepspeed_config, world_size())
        checkpoint_in_cpu = config.activation_checkpointing.cpu_checkpointing
    CHECKPOINT.store = Offloaded() if checkpoint_in_cpu else None


logger = logging.getLogger("minizero")
if not logger.handlers:  # it prints without being set up, as DeepSpeed's does
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_dist(
    message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO
) -> None:
    """Log on these ranks; None and -1 stand for all."""
    chosen = [*(ranks or [-1])]
    if rank() in chosen or -1 in chosen:
        logger.log(level, "[Rank %d] %s", rank(), message)


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Let a script take `--deepspeed` and `--deepspeed_config FILE`.

    A `--local_rank` that it has already gets the default that torchrun gives.
    """
    if "LOCAL_RANK" in os.environ and parser.get_default("local_rank") is not None:
        parser.set_defaults(local_rank=int(os.environ["LOCAL_RANK"]))
    group = parser.add_argument_group("engine")
    group.add_argument("--deepspeed", action="store_true", help="for the script's use")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the config, as JSON")
    return parser


def RepeatingLoader(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a data loader, again and again.

    Call the `set_epoch` of the loader's sampler yourself.
    """
    is_empty = False  # once it may be: a `Loader` may go on at an epoch's end
    while True:
        was_empty, is_empty = is_empty, True
        for batch in loader:
            is_empty = False
            yield batch
        if was_empty and is_empty:
            raise RuntimeError(
                f"the {type(loader).__name__} gives no batch when it is restarted; pass "
                "a data loader, not an iterator"
            )
