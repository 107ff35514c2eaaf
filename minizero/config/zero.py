"""What is sharded, where it rests, and in what portions it moves."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from .keys import Anyway, Elements, Section, Share

Place = Literal["none", "cpu", "nvme"]


class OffloadParam(Section):
    """Where sharded parameters rest between uses (stage 3)."""

    device: Place = "none"
    """Rest on the device, in host memory, or in files. Done: `offload_param` of
    `Plan.stage`."""
    nvme_path: str | None = None
    """The folder of the files; needed with `nvme`. Unset: none. Done: `folder` of
    `NVMe`."""
    buffer_count: Annotated[int, "buffers", Ge(1)] = 5
    """Host buffers that files are read into and written from. Done: `buffer_count` of
    `NVMe`, the larger one of both blocks."""
    buffer_size: Annotated[int, "elements", Ge(1)] = 100_000_000
    """Size of each of these buffers. Done: `buffer_size` of `NVMe`."""
    max_in_cpu: Annotated[Elements, Anyway(0)] = 1_000_000_000
    """Parameters that stay in host memory although they have files. No effect: host
    memory is bounded by the buffers alone."""
    pin_memory: bool = True
    """Page-locked host memory, from which a GPU copies at full speed. No effect: host
    memory is page-locked wherever there is a GPU."""


class OffloadOptimizer(Section):
    """Where optimizer state rests, and with it the update (stages 1 to 3)."""

    device: Place = "none"
    """Rest on the device, in host memory, or in files. Done: `offload_optimizer` of
    `Plan.stage`."""
    nvme_path: str | None = None
    """The folder of the files; needed with `nvme`. Unset: none. Done: `folder` of
    `NVMe`."""
    buffer_count: Annotated[int, "buffers", Ge(1)] = 4
    """Host buffers that files are read into and written from. Done: `buffer_count` of
    `NVMe`, the larger one of both blocks."""
    pin_memory: bool = True
    """Page-locked host memory, from which a GPU copies at full speed. No effect: host
    memory is page-locked wherever there is a GPU."""
    pipeline_read: Annotated[bool, Anyway(True)] = False
    """Read what the next update needs during this one. No effect: reading, updating and
    writing always overlap."""
    pipeline_write: Annotated[bool, Anyway(True)] = False
    """Write what the last update made during this one. No effect: reading, updating and
    writing always overlap."""
    delayed_update: bool = False
    """Update while the device computes the next step, so that parameters are one step
    late; a key of minizero's, which DeepSpeed has not. Done: `Delayed`."""
    fast_init: bool = False
    """Make the files faster at the start. No effect: there is one way to make the
    files."""
    cpuadam_cores_perc: Share = 0.8
    """Part of the cores that SuperOffload updates on. No effect: it belongs to
    super_offload; set OMP_NUM_THREADS."""


class Aio(Section):
    """How files are read and written, with nvme."""

    block_size: Annotated[int, "bytes", Ge(1)] = 1_048_576
    """Size of one request. Done: `block_size` of `NVMe`."""
    queue_depth: Annotated[int, "requests", Ge(1)] = 8
    """Most requests in flight. Done: `queue_depth` of `NVMe`."""
    intra_op_parallelism: Annotated[int, "threads", Ge(1)] = 1
    """Threads that share one read or write. No effect: queue_depth alone says how many
    requests are in flight."""
    single_submit: bool = False
    """Hand requests over one by one, not as a group. No effect: requests are handed
    over as they come."""
    overlap_events: bool = True
    """Hand over new requests while others are in flight. No effect: the queue is always
    kept full."""


class ZeroOptimization(Section):
    """What is sharded, where it rests, and in what portions it moves."""

    stage: Annotated[int, Ge(0), Le(3)] = 0
    """0 replicates all; 1 shards optimizer state, 2 gradients as well, 3 parameters as
    well. Done: `Plan.stage`."""
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    """Optimizer state off the device (stages 1 to 3). Done: `Plan`, `Offload`,
    `NVMe`."""
    offload_param: OffloadParam = OffloadParam()
    """Parameters off the device (stage 3). Done: `Plan`, `Offload`, `NVMe`."""
    overlap_comm: bool | None = None
    """Communicate while the device computes. Unset: true at stage 3, else false. Done:
    `Overlap`, else `Schedule`."""
    zero_hpz_partition_size: Annotated[int, "ranks", Ge(1)] = 1
    """Neighbours that share a copy of the parameters (stage 3; hpZ); the rest is sharded
    over all ranks. 1: no copies. Done: `group` of the parameters' `Placement`."""
    mics_shard_size: Annotated[int, "ranks", Ge(-1)] = -1
    """Neighbours that share a copy of all that the stage shards (MiCS). -1: all ranks
    share one. Done: `group` of `Plan.stage`."""
    zero_quantized_weights: bool = False
    """Parameters are gathered in 8 bits (stage 3; qwZ). Done: `weight_bits` of
    `parallelize`."""
    zero_quantized_gradients: bool = False
    """Gradients are reduced in 4 bits (stages 1 to 3; qgZ). Done: `gradient_bits` of
    `parallelize`."""
    reduce_bucket_size: Annotated[int, "elements", Ge(1)] = 500_000_000
    """Most gradients in one reduction. Done: `bucket_size` of `parallelize`."""
    stage3_prefetch_bucket_size: Elements = 50_000_000
    """Most parameters gathered ahead of their use. Done: `Overlap`, without
    `stage3_`."""
    stage3_param_persistence_threshold: Elements = 100_000
    """Smaller units stay whole (in DeepSpeed: smaller parameters). Done: `Overlap`,
    without `stage3_`."""
    stage3_max_live_parameters: Elements = 1_000_000_000
    """Most parameters whole at once, but for the units in use: 0 frees each at once.
    Done: `Overlap`, without `stage3_`."""
    stage3_max_reuse_distance: Annotated[Elements, Anyway(0)] = 1_000_000_000
    """Keep parameters that are used again within so many. No effect: a unit is freed
    after each use, as at a distance of 0."""
    stage3_model_persistence_threshold: Elements = sys.maxsize
    """Most parameters that may stay whole for being small. No effect:
    stage3_max_live_parameters bounds these too."""
    stage3_gather_16bit_weights_on_model_save: bool = False
    """Let `save_16bit_model` gather sharded parameters. Done:
    `engine.save_16bit_model`."""
    stage3_module_granularity_threshold: Elements = 0
    """Gather modules of many small parts as one. No effect: a unit is always gathered
    as one."""
    stage3_use_all_reduce_for_fetch_params: bool = False
    """Gather by an all-reduce. No effect: an all-gather into the flat buffer copies
    nothing."""
    stage3_allgather_sequential: bool = False
    """Gather parameter by parameter, without a buffer to copy from. No effect:
    parameters are views of the buffer they are gathered into."""
    allgather_bucket_size: Elements = 500_000_000
    """Most updated parameters in one all-gather. No effect: a unit is gathered as one;
    choose smaller units."""
    sub_group_size: Elements = 1_000_000_000
    """Parameters updated at a time. No effect: the update goes unit by unit."""
    contiguous_gradients: bool = True
    """Gradients in one contiguous buffer. No effect: the gradients of a unit are always
    views of one buffer."""
    reduce_scatter: bool = True
    """Reduce-scatter instead of all-reduce. No effect: what is sharded is always
    reduce-scattered."""
    allgather_partitions: bool = True
    """All-gather instead of one broadcast a rank. No effect: updated parameters are
    always all-gathered."""
    use_multi_rank_bucket_allreduce: bool = True
    """One collective for a bucket, not one a rank. No effect: a bucket is always one
    collective."""
    round_robin_gradients: Annotated[bool, Anyway(True)] = False
    """Spread copies of gradients to the host over the ranks. No effect: each rank owns
    a part of each unit, so they are spread."""
    ignore_unused_parameters: bool = True
    """Train on when a parameter took no part in a loss. No effect: unused parameters
    always join with zeros."""
    compute_grad_norm: bool = True
    """Compute the norm of all gradients at each step; clipping does so anyway. Done:
    `engine.get_global_grad_norm`."""
    parameter_alignment: bool = False
    """Let each parameter start at a multiple of 16 bytes. No effect: the parameters of
    a buffer stand one after the other."""
    load_from_fp32_weights: bool = True
    """Resume from fp32 master weights, not from 16-bit parameters. No effect: a
    checkpoint's master weights are always loaded."""
    elastic_checkpoint: Annotated[bool, Anyway(True)] = False
    """Checkpoints that load on another number of ranks. No effect: every checkpoint
    does."""
    pipeline_loading_checkpoint: bool = False
    """Load a checkpoint in a pipeline of ranks. No effect: each rank reads its own
    part."""
    memory_efficient_linear: Annotated[bool, Anyway(False)] = True
    """Replace `F.linear` by a version that saves less for backward. No effect:
    `F.linear` stays as it is."""
    override_module_apply: bool = True
    """Make `Module.apply` gather what it visits, in `zero.Init`. No effect: `zero.Init`
    shards a unit after it was initialised."""
    leaf_module: dict[str, Any] | None = None
    """Modules to be gathered as one. Unset: none. No effect: a unit is always gathered
    as one."""
    cpu_offload_use_pin_memory: bool | None = None
    """Page-locked host memory. Unset: true. No effect: host memory is page-locked
    wherever there is a GPU."""
    log_trace_cache_warnings: bool = False
    """Log when the recorded order of modules was wrong. No effect: the tracker's trace
    shows it."""
    enable_sanity_checks: bool = False
    """Check the internal state while training. No effect: the checks that there are
    always run."""
