"""A step of every place that the engine can store state in, on a GPU that is not there.

Nothing races, and the host waits for nothing that it need not. The steps are made by a
process of its own, since `fakegpu` changes torch for good: this file, run as a program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from contextlib import ExitStack
from itertools import product
from typing import Any

import pytest

pytestmark = pytest.mark.thorough

Place = tuple[int, str, str]  # stage, where optimizer state is, where parameters are
Case = tuple[Place, str]
Found = dict[str, list[str]]

STATES, PARAMETERS = ("none", "cpu", "nvme", "late"), ("none", "cpu", "nvme")
PLACES: list[Place] = [
    (0, "none", "none"),
    *product((1, 2), STATES, ("none",)),
    *(p for p in product((3,), STATES, PARAMETERS) if p[1:] != ("late", "nvme")),
]
HOW: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, overlap": {"bf16": {"enabled": True, "check_grad_overflow": False}},
    "fp16, overlap": {"fp16": {"enabled": True}},
}
CASES: list[Case] = [
    *product(PLACES, ("fp32", "fp16, overlap")),
    *product([(1, "late", "none"), (3, "cpu", "cpu")], ["bf16, overlap"]),
]


def config(place: Place, how: str) -> dict[str, Any]:
    (stage, optimizer, param), overlap = place, "overlap" in how
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": overlap}
    zero |= {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 64}
    if optimizer != "none":
        device = "cpu" if optimizer == "late" else optimizer
        options = {"device": device, "delayed_update": optimizer == "late"}
        zero["offload_optimizer"] = options | {"nvme_path": "/nowhere"}
    if param != "none":
        options = {"device": param, "nvme_path": "/nowhere", "buffer_size": 64}
        zero["offload_param"] = options
    return HOW[how] | {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1 + overlap,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }


# In a process with the GPU.


def steps(case: Case) -> Found:
    """What two steps of the engine were found to do wrong."""
    import fakegpu
    import torch
    from torch import nn

    import minizero

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.up(x))

    waits = []
    settings = config(*case)
    with fakegpu.recording() as gpu, ExitStack() as stack:
        stack.enter_context(torch.device(fakegpu.NAME))
        stage, _, param = case[0]
        if param != "none" or (stage == 3 and "overlap" in case[1]):
            # takes away the default device, and gives its own
            stack.enter_context(torch.device("cpu"))
            with minizero.zero.Init(config=settings):
                net = nn.Sequential(nn.Embedding(8, 8), Block(), Block())
        else:
            net = nn.Sequential(nn.Embedding(8, 8), Block(), Block())
        engine, *_ = minizero.initialize(model=net, config=settings)
        batch = torch.zeros(2, 4, dtype=torch.long, device=fakegpu.NAME)
        for _ in range(2):
            waits.clear()
            for _ in range(engine.gradient_accumulation_steps()):
                gpu.syncs.clear()
                loss = engine(batch).float().sum()
                engine.backward(loss)
                waits += [f"pass: {what}" for what in gpu.syncs]
                gpu.syncs.clear()
                engine.step()
            waits += [f"step: {what}" for what in gpu.syncs]
        engine.net.synchronize()
        del engine, net, loss
    return {"faults": gpu.faults, "waits": waits}


def activations() -> Found:
    """Saved tensors that wait in host memory; copies each way on a stream."""
    import fakegpu
    import torch
    from torch import nn

    from minizero import Plan, parallelize
    from minizero.activations import Offloaded, Recompute, recompute_units

    with fakegpu.recording() as gpu, torch.device(fakegpu.NAME):
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
        model = nn.Sequential(*blocks)
        recompute_units(model, Recompute("none", Offloaded()))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        net = parallelize(model, optimizer, Plan.stage(2))
        for _ in range(2):
            gpu.syncs.clear()
            net.backward(net(torch.zeros(2, 8)).sum())
            net.step()
        del net, model, blocks
    return {"faults": gpu.faults, "waits": gpu.syncs}


def main() -> None:
    import fakegpu

    fakegpu.install(0, 2)
    found: dict[str, Found] = {}
    for case in CASES:
        try:
            found[str(case)] = steps(case)
        except Exception:
            found[str(case)] = {"raised": [traceback.format_exc()]}
    found["activations"] = activations()
    print(json.dumps(found), flush=True)


# In the tests.


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    command = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=500)
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_races_or_waits(found: dict[str, Found], case: Case) -> None:
    """A forward and a backward wait for no copy. A step in 16 bit reads a flag; one on
    the host waits for gradients, and takes over one number."""
    this, ((stage, states, _), how) = found[str(case)], case
    assert not this.get("raised"), this["raised"][0]
    assert not this["faults"], this["faults"][:5]
    waits, most = this["waits"], {}  # of each, how often; None: no matter
    if stage < 3 and (how != "fp32" or states != "none"):
        most["step: equal"] = 1  # whether the script has written to parameters
    if "fp16" in how:
        most["step: _local_scalar_dense"] = 1  # overflow
    if states in ("cpu", "late") or "nvme" in case[0]:
        # of copy streams only
        most |= {"pass: synchronize event": None, "step: synchronize event": None}
    if "nvme" in case[0]:
        most |= {wait: None for wait in waits if wait.startswith("step: copy")}
    elif states in ("cpu", "late") and how != "fp32":
        # overflow, or clipping's factor: one of them is on the other side
        most["step: copy of 1 elements"] = 1
    assert set(waits) <= set(most)
    for wait, times in most.items():
        assert times is None or waits.count(wait) <= times, wait


def test_offloaded_activations_race_and_wait_for_nothing(
    found: dict[str, Found],
) -> None:
    this = found["activations"]
    assert (this["faults"], this["waits"]) == ([], [])


if __name__ == "__main__":
    main()
