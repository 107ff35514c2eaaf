"""DeepSpeed's names that need code: its arguments and defaults around minizero's parts."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import kernels, zero
from ..activations import CHECKPOINT, Offloaded
from ..checkpoint import Folder, consolidate, export
from ..config import Source, read
from ..memory.plan import Plan
from ..ranks import rank, world_size
from ..ranks import init_distributed as find_ranks
from ..zero import Storage, is_sharded


class Init(zero.Init):
    """`minizero.zero.Init`; the ranks need not be connected yet.

    `module`: shard this model at once. `remote_device`: "cpu" keeps shards in host
    memory until `initialize`. `dtype`: in which floating-point parameters are made
    (default: as they are, since the config's dtype is made of fp32 masters).
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        remote_device: str | None = None,
        dtype: torch.dtype | None = None,
        config_dict_or_path: Source | None = None,
        mem_efficient_linear: bool = True,
        pin_memory: bool = False,
        **options: Any,
    ) -> None:
        options.setdefault("config", config_dict_or_path)
        if options.get("enabled", True):
            find_ranks()
        if remote_device == "cpu":
            options["storage"] = Storage(Plan.stage(3, offload_param="cpu"))
        super().__init__(**options)
        self.dtype = dtype
        if module is not None and self.enabled:
            self._added(module, "", module)
            self._hold([])

    def _registered(self, module: nn.Module, name: str, p: Any) -> None:
        if self.dtype and p is not None and p.is_floating_point() and not is_sharded(p):
            p.data = p.data.to(self.dtype)
        super()._registered(module, name, p)


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
    """Whether a sharded parameter, which has `ds_id` and `ds_status`, has its values."""

    AVAILABLE, NOT_AVAILABLE, INFLIGHT = range(1, 4)


def _ds_status(p: Any) -> ZeroParamStatus:
    there = p.sharded_in.is_unsharded  # AttributeError: it is not sharded
    return ZeroParamStatus.AVAILABLE if there else ZeroParamStatus.NOT_AVAILABLE


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


def get_rank(group: Any = None) -> int:
    """The number of this process in a group; 0 if it is alone."""
    return rank() if group is None else dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """The number of ranks in a group; 1 if this process is alone."""
    return world_size() if group is None else dist.get_world_size(group)


def get_world_group() -> Any:
    """The group of all ranks, which are all data-parallel."""
    return dist.group.WORLD


class Accelerator:
    """torch's module of the ranks' device; what torch.cpu lacks of memory is 0."""

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


@cache
def get_accelerator() -> Accelerator:
    """That of the device that ranks compute on."""
    return Accelerator()


@contextmanager
def OnDevice(
    dtype: torch.dtype, device: str = "meta", enabled: bool = True
) -> Iterator[None]:
    """New tensors are on a device, floating-point ones in a dtype."""
    before = torch.get_default_dtype()
    try:
        if enabled:
            torch.set_default_dtype(dtype)
        with torch.device(device) if enabled else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


class DeepSpeedCPUAdam(kernels.FusedAdam):
    """torch's fused Adam on the host, with DeepSpeed's names of its arguments."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        *,
        adamw_mode: bool = True,
        **more: Any,
    ) -> None:
        super().__init__(model_params, lr, adam_w_mode=adamw_mode, **more)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
) -> None:
    """Write it to `output_dir`: as `pytorch_model.bin`, or as safetensors files."""
    if safe_serialization:
        units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
        most = int(max_shard_size[:-2]) * units[max_shard_size[-2:].upper()]
        export(checkpoint_dir, output_dir, tag, torch.float32, most)
        return
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(consolidate(checkpoint_dir, tag), folder / "pytorch_model.bin")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Folder, tag: str | None = None
) -> nn.Module:
    """Load it into a model that no engine has; the model is moved to the host."""
    model.cpu().load_state_dict(consolidate(checkpoint_dir, tag), strict=False)
    return model


_configured: list[bool] = []


def configure(
    mpu_: Any = None,
    deepspeed_config: Source | None = None,
    checkpoint_in_cpu: bool | None = None,
    **others: Any,
) -> None:
    """Set whether `checkpoint` keeps arguments in host memory, in the whole process."""
    if any(others.values()):
        warnings.warn(f"{', '.join(others)} without effect", stacklevel=2)
    if checkpoint_in_cpu is None and deepspeed_config is not None:
        config = read(deepspeed_config, world_size())
        checkpoint_in_cpu = config.activation_checkpointing.cpu_checkpointing
    CHECKPOINT.store = Offloaded() if checkpoint_in_cpu else None
    _configured.append(True)


def is_configured() -> bool:
    """Whether `configure` was called."""
    return bool(_configured)


def reset() -> None:
    """Nothing: there are no buffers to free."""


logger = logging.getLogger("minizero")
if not logger.handlers:  # as DeepSpeed's, it prints by itself
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
    while True:
        count = -1
        for count, batch in enumerate(loader):  # noqa: B007
            yield batch
        if count < 0:
            raise RuntimeError(
                f"the {type(loader).__name__} gives no batch when it is restarted; pass "
                "a data loader, not an iterator"
            )
