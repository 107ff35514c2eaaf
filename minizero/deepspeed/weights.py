"""`deepspeed.utils.zero_to_fp32`: the whole model out of a sharded checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import Folder, consolidate, export


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """`minizero.consolidate`: fp32 weights and buffers, in host memory."""
    if exclude_frozen_parameters:
        raise ValueError(
            "a checkpoint does not say which parameters are frozen; call "
            "engine.save_16bit_model(folder, exclude_frozen_parameters=True)"
        )
    return consolidate(checkpoint_dir, tag)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: str | float | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write it to `output_dir`: as `pytorch_model.bin`, or as safetensors files.

    `max_shard_size`: of a safetensors file, bytes or such as "5GB".
    """
    if safe_serialization:
        export(checkpoint_dir, output_dir, tag, torch.float32, _bytes(max_shard_size))
        return
    whole = get_fp32_state_dict_from_zero_checkpoint(
        checkpoint_dir, tag, exclude_frozen_parameters
    )
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(whole, folder / "pytorch_model.bin")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Folder, tag: str | None = None
) -> nn.Module:
    """Put it into a model that no engine has; that is on the host then."""
    whole: dict[str, Any] = consolidate(checkpoint_dir, tag)
    model.cpu().load_state_dict(whole, strict=False)
    return model


def _bytes(size: str | float | None) -> int:
    """5 * 10**9 of "5GB"; no bound of None."""
    if not isinstance(size, str):
        return int(size) if size else 2**62
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number, unit = size[:-2], size[-2:].upper()
    if unit not in units or not number.strip().isdigit():
        raise ValueError(f'max_shard_size is such as "5GB" or "500MB", not {size!r}')
    return int(number) * units[unit]
