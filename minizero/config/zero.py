"""What is sharded, and in what portions it moves."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from .offload import OffloadOptimizer, OffloadParam
from .schema import key


@dataclass(frozen=True, kw_only=True)
class ZeroOptimization:
    """What is sharded, where it rests, and in what portions it moves."""

    stage: int = key(
        0,
        "0 replicates all; 1 shards optimizer state, 2 gradients as well, "
        "3 parameters as well.",
        "`Plan.stage`",
        least=0,
        most=3,
    )
    offload_optimizer: OffloadOptimizer = key(
        OffloadOptimizer(),
        "Optimizer state off the device (stages 1 to 3).",
        "`Plan`, `Offload`, `NVMe`",
    )
    offload_param: OffloadParam = key(
        OffloadParam(),
        "Parameters off the device (stage 3).",
        "`Plan`, `Offload`, `NVMe`",
    )
    overlap_comm: bool | None = key(
        None,
        "Communicate while the device computes.",
        "`Overlap`, else `Schedule`",
        unset="true at stage 3, else false",
    )
    reduce_bucket_size: int = key(
        500_000_000,
        "Most gradients in one reduction.",
        "`bucket_size` of `parallelize`",
        unit="elements",
        least=1,
    )
    stage3_prefetch_bucket_size: int = key(
        50_000_000,
        "Most parameters gathered ahead of their use.",
        "`Overlap`, without `stage3_`",
        unit="elements",
        least=0,
    )
    stage3_param_persistence_threshold: int = key(
        100_000,
        "Smaller units stay whole (in DeepSpeed: smaller parameters).",
        "`Overlap`, without `stage3_`",
        unit="elements",
        least=0,
    )
    stage3_max_live_parameters: int = key(
        1_000_000_000,
        "Most parameters whole at once.",
        "`Overlap`, without `stage3_`",
        unit="elements",
        least=1,
    )
    stage3_max_reuse_distance: int = key(
        1_000_000_000,
        "Keep parameters that are used again within so many.",
        ignored="a unit is freed after each use, as at a distance of 0",
        unit="elements",
        least=0,
        honours=0,
    )
    stage3_model_persistence_threshold: int = key(
        sys.maxsize,
        "Most parameters that may stay whole for being small.",
        ignored="stage3_max_live_parameters bounds these too",
        unit="elements",
        least=0,
    )
    stage3_gather_16bit_weights_on_model_save: bool = key(
        False,
        "Let `save_16bit_model` gather sharded parameters.",
        "`engine.save_16bit_model`",
    )
    stage3_module_granularity_threshold: int = key(
        0,
        "Gather modules of many small parts as one.",
        ignored="a unit is always gathered as one",
        unit="elements",
        least=0,
    )
    stage3_use_all_reduce_for_fetch_params: bool = key(
        False,
        "Gather by an all-reduce.",
        ignored="an all-gather into the flat buffer copies nothing",
    )
    stage3_allgather_sequential: bool = key(
        False,
        "Gather parameter by parameter, without a buffer to copy from.",
        ignored="parameters are views of the buffer they are gathered into",
    )
    allgather_bucket_size: int = key(
        500_000_000,
        "Most updated parameters in one all-gather.",
        ignored="a unit is gathered as one; choose smaller units",
        unit="elements",
        least=0,
    )
    sub_group_size: int = key(
        1_000_000_000,
        "Parameters updated at a time.",
        ignored="the update goes unit by unit",
        unit="elements",
        least=0,
    )
    contiguous_gradients: bool = key(
        True,
        "Gradients in one contiguous buffer.",
        ignored="the gradients of a unit are always views of one buffer",
    )
    reduce_scatter: bool = key(
        True,
        "Reduce-scatter instead of all-reduce.",
        ignored="what is sharded is always reduce-scattered",
    )
    allgather_partitions: bool = key(
        True,
        "All-gather instead of one broadcast a rank.",
        ignored="updated parameters are always all-gathered",
    )
    use_multi_rank_bucket_allreduce: bool = key(
        True,
        "One collective for a bucket, not one a rank.",
        ignored="a bucket is always one collective",
    )
    round_robin_gradients: bool = key(
        False,
        "Spread copies of gradients to the host over the ranks.",
        ignored="each rank owns a part of each unit, so they are spread",
        honours=True,
    )
    ignore_unused_parameters: bool = key(
        True,
        "Train on when a parameter took no part in a loss.",
        ignored="unused parameters always join with zeros",
    )
    compute_grad_norm: bool = key(
        True,
        "Compute the norm of all gradients at each step; clipping does so "
        "anyway.",
        "`engine.get_global_grad_norm`",
    )
    parameter_alignment: bool = key(
        False,
        "Let each parameter start at a multiple of 16 bytes.",
        ignored="the parameters of a buffer stand one after the other",
    )
    load_from_fp32_weights: bool = key(
        True,
        "Resume from fp32 master weights, not from 16-bit parameters.",
        ignored="a checkpoint's master weights are always loaded",
    )
    elastic_checkpoint: bool = key(
        False,
        "Checkpoints that load on another number of ranks.",
        ignored="every checkpoint does",
        honours=True,
    )
    pipeline_loading_checkpoint: bool = key(
        False,
        "Load a checkpoint in a pipeline of ranks.",
        ignored="each rank reads its own part",
    )
    memory_efficient_linear: bool = key(
        True,
        "Replace `F.linear` by a version that saves less for backward.",
        ignored="`F.linear` stays as it is",
        honours=False,
    )
    override_module_apply: bool = key(
        True,
        "Make `Module.apply` gather what it visits, in `zero.Init`.",
        ignored="`zero.Init` shards a unit after it was initialised",
    )
    leaf_module: dict[str, Any] | None = key(
        None,
        "Modules to be gathered as one.",
        ignored="a unit is always gathered as one",
        unset="none",
    )
    log_trace_cache_warnings: bool = key(
        False,
        "Log when the recorded order of modules was wrong.",
        ignored="the tracker's trace shows it",
    )
    enable_sanity_checks: bool = key(
        False,
        "Check the internal state while training.",
        ignored="the checks that there are always run",
    )
