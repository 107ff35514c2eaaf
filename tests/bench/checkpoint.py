"""Checkpoints of a run of about 500 MB, against torch's own and DeepSpeed's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.runner import Comparison, interleaved
from minizero import Plan, checkpoint, comm, parallelize
from minizero.ranks.launch import device, launch
from minizero.zero import DataParallel

RANKS, LAYERS, WIDTH = 2, 8, 2240
PEERS = {"torch's": "torch.distributed.checkpoint", "deepspeed's": "DeepSpeed"}
MB = LAYERS * (WIDTH * WIDTH + WIDTH) * 12 // 10**6


def compare(repeats: int) -> list[Comparison]:
    """Seconds of a save, all bytes on the disk, and of a load into the same run."""
    where = os.environ.get("MINIZERO_NVME") or tempfile.gettempdir()
    with tempfile.TemporaryDirectory(dir=where) as folder:
        seconds = launch(_measure, RANKS, Path(folder), repeats)[0]
    return [
        Comparison(
            f"{verb}, {RANKS} ranks, {MB} MB",
            "s",
            "minizero",
            name,
            seconds[f"{verb}, ours"],
            seconds[f"{verb}, {theirs}"],
            at_most=1.0,
        )
        for verb in ("save", "load")
        for theirs, name in PEERS.items()
        if f"{verb}, {theirs}" in seconds
    ]


def _measure(folder: Path, repeats: int) -> dict[str, list[float]]:
    model = _model()
    net = parallelize(model, torch.optim.AdamW(model.parameters()), Plan.stage(3))
    _step(net)
    shards, theirs = _as_dtensors(net), folder / "torch"
    cases = {
        "save, ours": lambda: checkpoint.save(net, folder / "ours", "a"),
        "save, torch's": lambda: state_dict_saver.save(shards, checkpoint_id=theirs),
        "load, ours": lambda: checkpoint.load(net, folder / "ours"),
        "load, torch's": lambda: state_dict_loader.load(shards, checkpoint_id=theirs),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        engine, where = _deepspeed(), folder / "deepspeed"
        cases["save, deepspeed's"] = lambda: engine.save_checkpoint(where, "a")
        cases["load, deepspeed's"] = lambda: engine.load_checkpoint(where, "a")
    timed = {name: _timed(folder, name, case) for name, case in cases.items()}
    return interleaved(timed, repeats)


def _model() -> nn.Module:
    layers = (nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
    return nn.Sequential(*layers).to(device())


def _step(net: Any) -> None:
    net.backward(net(torch.ones(1, WIDTH, device=device())).sum())
    net.step()


def _deepspeed() -> Any:
    """An engine of DeepSpeed's at stage 3, after a step."""
    import deepspeed

    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    model = _model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "reduce_bucket_size": WIDTH * WIDTH},
        },
    )
    _step(engine)
    return engine


def _as_dtensors(net: DataParallel) -> dict[str, Tensor]:
    """The tensors that a checkpoint of ours has, in the form that torch's shards."""
    mesh = init_device_mesh(device().type, (RANKS,))
    found: dict[str, Tensor] = {}
    for unit in net.units:
        for number, flat in enumerate(unit.flats):
            state = net.optimizer.state[flat.master]
            parts = {"values": flat.master.detach(), **state}
            for key, part in parts.items():
                if part.shape == (flat.size,):
                    shard = DTensor.from_local(part, mesh, [Shard(0)])
                    found[f"{unit.name} {number} {key}"] = shard
    return found


def _timed(folder: Path, name: str, case: Callable[[], object]) -> Callable[[], float]:
    """Seconds until all ranks have done it; a save finds an empty folder."""

    def timed() -> float:
        if name.startswith("save"):
            comm.barrier()
            shutil.rmtree(folder / name.rpartition(" ")[2].removesuffix("'s"), True)
        comm.barrier()
        start = time.perf_counter()
        case()
        if name.startswith("save"):
            os.sync()  # DeepSpeed leaves what it wrote to the system
        comm.barrier()
        return time.perf_counter() - start

    return timed
