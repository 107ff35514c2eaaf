"""A config that more than one test file reads."""

from __future__ import annotations

from typing import Any

# What users of DeepSpeed have: fp16, ZeRO-3, both offloads.
EXAMPLE: dict[str, Any] = {
    "train_batch_size": 256,
    "gradient_accumulation_steps": 16,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500000000,
        "stage3_prefetch_bucket_size": 500000000,
        "stage3_param_persistence_threshold": 1000000,
    },
}
