"""Shards in files, against fio on the same folder with the same requests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.runner import Comparison, interleaved
from minizero.offload.swap_file import SwapFile, SwappedTensor, aligned_buffer

BLOCK_SIZE, QUEUE_DEPTH = 1 << 20, 8  # DeepSpeed's defaults
RECORDS, WIDTH = 4, 1 << 24  # 4 records of 64 MiB
# One thread that keeps so many requests in flight, and so many threads with one each.
FIO = {
    "fio libaio": ["--ioengine=libaio", f"--iodepth={QUEUE_DEPTH}"],
    "fio threads": ["--ioengine=psync", "--thread", f"--numjobs={QUEUE_DEPTH}"],
}


def compare(repeats: int) -> list[Comparison]:
    """Bytes a second of 256 MiB; direct if possible."""
    if shutil.which("fio") is None:
        print("no fio: install it (apt install fio) to compare", file=sys.stderr)
        return []
    where = Path(os.environ.get("MINIZERO_NVME") or tempfile.gettempdir())
    swap = SwapFile(where, BLOCK_SIZE, QUEUE_DEPTH)
    try:
        with tempfile.TemporaryDirectory(dir=where) as folder:
            return _compare(swap, Path(folder, "fio"), 3 * repeats)
    finally:
        swap.close()


def _compare(swap: SwapFile, path: Path, turns: int) -> list[Comparison]:
    how = "direct" if swap.direct else "through the page cache"
    starts = range(0, RECORDS * WIDTH, WIDTH)
    shard = SwappedTensor(swap, "optimizer", starts.stop, torch.float32, starts)
    buffers = [aligned_buffer(shard.largest).random_() for _ in range(RECORDS)]
    results = []
    for verb in ("write", "read"):
        cases = {"minizero": _ours(shard, buffers, verb)}
        for name, options in FIO.items():
            cases[name] = _fio(path, swap.direct, verb, options)
        got = interleaved(cases, turns)
        ours = got.pop("minizero")
        results += [
            Comparison(
                f"{verb}, {how}, {BLOCK_SIZE >> 10} KiB x {QUEUE_DEPTH}",
                "bytes/s",
                "minizero",
                other,
                ours,
                values,
                at_least=0.8,
            )
            for other, values in got.items()
        ]
    return results


def _ours(
    shard: SwappedTensor, buffers: list[torch.Tensor], verb: str
) -> Callable[[], float]:
    launch = shard.write if verb == "write" else shard.read

    def case() -> float:
        start = time.perf_counter()
        under_way = [launch(index, buffer) for index, buffer in enumerate(buffers)]
        for transfer in under_way:
            transfer.wait()
        return shard.payload / (time.perf_counter() - start)

    return case


def _fio(
    path: Path, direct: bool, verb: str, options: list[str]
) -> Callable[[], float]:
    nbytes = RECORDS * WIDTH * 4
    if "--thread" in options:  # each thread has a part of the file
        part = nbytes // QUEUE_DEPTH
        options = [*options, f"--size={part}", f"--offset_increment={part}"]
    else:
        options = [*options, f"--size={nbytes}"]
    command = [
        "fio",
        "--name=shards",
        f"--filename={path}",
        f"--rw={verb}",
        f"--bs={BLOCK_SIZE}",
        f"--direct={int(direct)}",
        "--group_reporting",
        "--output-format=json",
        *options,
    ]

    def case() -> float:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        report = json.loads(done.stdout[done.stdout.index("{") :])
        return float(report["jobs"][0][verb]["bw_bytes"])

    return case
