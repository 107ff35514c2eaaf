"""Side by side: a step here, under torch's DDP and FSDP2, and under DeepSpeed.

All train one GPT on the same data, on ranks that torchrun starts and that call
`init_process_group` themselves, as a user's script does. A turn builds each library in
its turn on the same ranks, takes one step that does not count, and times the next ones,
whose median counts. Twice a turn each rank trains the model alone: what a step takes
longer than that is what a library costs. Torch and DeepSpeed have ranks of their own,
without the settings that the import of minizero makes. DeepSpeed 3 comes last there: it
replaces functions of torch for the whole process.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import minizero
from bench.runner import Comparison, interleaved
from minizero import comm
from minizero.lab.models.gpt import GPT, GPTConfig, count_parameters
from minizero.ranks import rank, world_size

Step = Callable[[], None]
Measured = dict[str, float]

RANKS, STEPS = 2, 5
ROWS, LENGTH = 1, 64
SIZES = GPTConfig(layers=6, hidden=528, heads=8, sequence=LENGTH)
LR = 1e-4
JOB = f"20M parameters, {RANKS} ranks"

# a block's parameters are there while it computes and while the one before it does, as
# FSDP2 has it; by default a small model is gathered once and kept until its backward
BUCKET = 25 * 2**20 // 4  # elements: DDP's default; of one block, but not of two
NO_MORE = {"prefetch_bucket_size": BUCKET, "max_reuse_distance": 0}
NO_MORE |= {"param_persistence_threshold": 0}
LEAST = [{}, {}, {}, {f"stage3_{name}": n for name, n in NO_MORE.items()}]
CONFIG = {  # for DeepSpeed and for minizero alike, but for the stage
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
    "zero_force_ds_cpu_optimizer": False,  # all have torch's own Adam
}


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(SIZES)


def _batch() -> tuple[Tensor, Tensor]:
    """This rank's tokens and targets, [rows, length]: the same for every library."""
    made = torch.Generator().manual_seed(rank())
    tokens = torch.randint(256, (ROWS, LENGTH + 1), generator=made)
    return tokens[:, :-1], tokens[:, 1:]


def _adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, LR, fused=True)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    x, y = _batch()

    def step() -> None:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def alone(precision: str) -> Step:
    """The model on each rank, and nothing sent; bf16 with masters in fp32."""
    model = _model()
    if precision == "fp32":
        return _loop(model, _adam(model.parameters()))
    model.bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = _adam(iter(masters))
    x, y = _batch()

    def step() -> None:
        model(x, y).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)

    return step


def ddp(precision: str) -> Step:
    """In bf16: the model in fp32 under autocast, which is DDP's own way."""
    model = nn.parallel.DistributedDataParallel(_model())
    step = _loop(model, _adam(model.parameters()))
    if precision == "fp32":
        return step

    def autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            step()

    return autocast


def fsdp2(precision: str) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = _model(), init_device_mesh("cpu", (world_size(),))
    half = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return _loop(model, _adam(model.parameters()))


def _engine(library: Any, precision: str, stage: int, offload: bool) -> Step:
    model, half = _model(), precision == "bf16"
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET} | LEAST[stage]
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    elif stage in (1, 2):  # DDP computes no norm; at other stages DeepSpeed always does
        zero["compute_grad_norm"] = False
    engine, *_ = library.initialize(
        model=model,
        optimizer=_adam(model.parameters()),
        config=CONFIG | {"zero_optimization": zero, "bf16": {"enabled": half}},
    )
    x, y = _batch()

    def step() -> None:
        engine.backward(engine(x, y))
        engine.step()

    return step


def ours(stage: int, precision: str, offload: bool = False) -> Step:
    return _engine(minizero, precision, stage, offload)


def deepspeed(stage: int, precision: str, offload: bool = False) -> Step:
    import deepspeed as library

    for name in {"ds_id", "ds_status"} & vars(nn.Parameter).keys():
        delattr(nn.Parameter, name)  # minizero's, in whose place DeepSpeed has its own
    library.init_distributed(dist_backend="gloo", verbose=False)
    return _engine(library, precision, stage, offload)


ALONE = ("alone", "alone again")  # as a turn begins and as it ends
CASES: dict[str, dict[str, Callable[[str], Step]]] = {
    "torch": {ALONE[0]: alone, "DDP": ddp, "FSDP2": fsdp2, ALONE[1]: alone},
    "here": {
        ALONE[0]: alone,
        "FSDP2, as here": fsdp2,
        **{f"minizero {stage}": partial(ours, stage) for stage in range(4)},
        "minizero 2, offloaded": partial(ours, 2, offload=True),
        ALONE[1]: alone,
    },
    "there": {
        ALONE[0]: alone,
        **{f"DeepSpeed {stage}": partial(deepspeed, stage) for stage in range(3)},
        "DeepSpeed 2, offloaded": partial(deepspeed, 2, offload=True),
        ALONE[1]: alone,
        "DeepSpeed 3": partial(deepspeed, 3),
    },
}


def _on_the_wire() -> int:
    """Bytes that this machine has sent to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    [fields] = [line.split() for line in lines if line.split()[0] == "lo:"]
    return int(fields[9])


def _resident(word: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since the peak was forgotten."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{word}:")[2].split()[0]) * 1024


def speed(cases: str, precision: str) -> dict[str, Measured]:
    """Of every case of "here" or "there", in its turn: seconds, and bytes sent."""
    return {name: _timed(build(precision)) for name, build in CASES[cases].items()}


def _timed(step: Step) -> Measured:
    step()
    gc.collect()
    seconds = []
    for _ in range(STEPS):
        comm.barrier()
        start = perf_counter()
        step()
        seconds.append(perf_counter() - start)
    return {"seconds": median(seconds), "sent": _sent(step) / world_size()}


def _sent(step: Step) -> int:
    """Bytes that all ranks send in a step."""
    comm.barrier()
    sent = _on_the_wire()
    step()
    comm.barrier()
    return _on_the_wire() - sent


def tensors(cases: str, name: str, precision: str) -> Measured:
    """Most bytes of tensors in the second step, by torch's own allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step = CASES[cases][name](precision)
        step()
        with torch.profiler.record_function("second"):
            step()
    events = sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    start = next(e.start_ns() for e in events if e.name() == "second")
    live = most = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live) if event.start_ns() >= start else most
    return {"bytes": most}


def resident(cases: str, name: str, precision: str) -> Measured:
    """Most bytes of the process then, beyond those before; no profiler adds to it."""
    before, step = _resident("VmRSS"), CASES[cases][name](precision)
    step()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    step()
    return {"bytes": _resident("VmHWM") - before}


# seconds beyond the model alone, as a part of the other's: the goal
GOALS = {
    ("minizero 0", "DDP"): None,
    ("minizero 1", "DDP"): 0.9,
    ("minizero 2", "DDP"): 0.9,
    ("minizero 3", "FSDP2"): 0.45,
    ("minizero 3", "FSDP2, as here"): None,
    ("minizero 0", "DeepSpeed 0"): None,
    ("minizero 1", "DeepSpeed 1"): 0.3,
    ("minizero 2", "DeepSpeed 2"): 0.3,
    ("minizero 3", "DeepSpeed 3"): 0.3,
    ("minizero 2, offloaded", "DeepSpeed 2, offloaded"): None,
}
# elements that a rank sends in a step, in parameters * (N-1)/N: 2, and 3 at stage 3
GATHERED_TWICE = ("minizero 3", "FSDP2", "FSDP2, as here", "DeepSpeed 3")


def compare(repeats: int) -> list[Comparison]:
    """Seconds beyond the model alone, in fp32; traffic in each precision; imports.

    A processor without units for bf16 computes in it for so long that all else drowns.
    """
    steps = _compared("fp32", [_turn("fp32") for _ in range(repeats)])
    steps += _compared("bf16", [_turn("bf16")])
    names = ["torch", "minizero", "deepspeed"][: len(_groups())]
    seconds = interleaved({name: partial(_imported, name) for name in names}, repeats)
    ours = seconds.pop("minizero")
    return steps + [
        Comparison("import", "s", "minizero", name, ours, values, at_most=most)
        for (name, values), most in zip(seconds.items(), (1.3, 1.0), strict=False)
    ]


def compare_memory() -> list[Comparison]:
    """Most bytes of tensors, and of the process, in each precision."""
    found = []
    for precision, what in product(("fp32", "bf16"), ("tensors", "resident")):
        most = {
            name: [_worst(_on_ranks(what, precision, group, name))["bytes"]]
            for group in _groups()
            for name in CASES[group].keys() - ALONE
        }
        name = f"{what} at the peak: {JOB}, {precision}"
        for a, b in GOALS:
            if b in most:
                found.append(Comparison(name, "B", a, b, most[a], most[b], at_most=1.0))
    return found


def _groups() -> list[str]:
    return [*CASES][: 3 if importlib.util.find_spec("deepspeed") else 2]


def _imported(name: str) -> float:
    start = perf_counter()
    subprocess.check_output([sys.executable, "-c", f"import {name}"])
    return perf_counter() - start


def _turn(precision: str) -> dict[str, Measured]:
    """Of each library the worst of its ranks."""
    found: dict[str, Measured] = {}
    for group in _groups():
        ranks = _on_ranks("speed", precision, group)
        worst = {name: _worst([of[name] for of in ranks]) for name in ranks[0]}
        least = fmean(worst.pop(name)["seconds"] for name in ALONE)
        for name, values in worst.items():
            found[name] = values | {"beyond": values["seconds"] - least}
    return found


def _on_ranks(what: str, precision: str, *args: str) -> Any:
    """Of each rank what `speed` or another measures: this file, under torchrun."""
    with tempfile.NamedTemporaryFile("r") as out:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS), "-m", __spec__.name]
        command += [what, out.name, precision, *args]
        # unchecked: DeepSpeed's threads may abort a rank that has given its result
        subprocess.run(command, check=False, cwd=Path(__file__).parents[1])
        return json.load(out)


def _worst(ranks: list[Measured]) -> Measured:
    return {what: max(of[what] for of in ranks) for what in ranks[0]}


def _compared(precision: str, turns: list[dict[str, Measured]]) -> list[Comparison]:
    what, found = f"beyond the model alone: {JOB}, {precision}", []
    for (a, b), goal in GOALS.items():
        if b in turns[0] and precision == "fp32":
            ours, theirs = ([turn[name]["beyond"] for turn in turns] for name in (a, b))
            found.append(Comparison(what, "s", a, b, ours, theirs, at_most=goal))
    what = f"sent by a rank in a step: {JOB}, {precision}"
    held = count_parameters(SIZES) * (2 if precision == "bf16" else 4)
    for name in turns[0]:
        theory = (3 if name in GATHERED_TWICE else 2) * held * (RANKS - 1) / RANKS
        sent = [turn[name]["sent"] for turn in turns]
        most = 1.02 if name.startswith("minizero") else None
        against = [theory] * len(sent)
        found.append(Comparison(what, "B", name, "theory", sent, against, at_most=most))
    return found


def script(what: str, out: str, precision: str, *args: str) -> None:
    """One rank's part, with what the import of minizero sets only where it is used."""
    if args[0] != "here":
        del os.environ["THP_MEM_ALLOC_ENABLE"]
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    measure: Any = {"speed": speed, "tensors": tensors, "resident": resident}[what]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, measure(*args, precision))
    if rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    script(*sys.argv[1:])
