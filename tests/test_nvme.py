"""State on disk: the same numbers, bounded host memory, and faults that are named."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from nasty import STATE, plans
from nasty import name_of as name
from test_offload import CONFIG, measure, padded

from minizero import NVMe, Plan, estimate, parallelize
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.memory.labels import aligned
from minizero.memory.plan import PRECISIONS as BYTES
from minizero.offload import DiskFault
from minizero.offload.staging import Slice
from minizero.offload.swap_file import ALIGN
from minizero.overlap import Overlap
from minizero.ranks import Pool
from minizero.zero import Muon

PLANS = plans("device", "cpu", "nvme")
ALL = Plan.stage(3, offload_optimizer="nvme", offload_param="nvme")


# --- bytes --------------------------------------------------------------------


def one_step(net: Any) -> None:
    tokens = net.model.config.sequence
    x = torch.randint(50, (1, tokens), generator=torch.Generator().manual_seed(1))
    net.backward(net(x, x))
    net.step()


def build(storage: NVMe, config: GPTConfig = CONFIG, **options: Any) -> Any:
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return parallelize(model, optimizer, storage.plan, storage=storage, **options)


def pages(elements: int, itemsize: int, slice_size: int = 1024) -> int:
    """Bytes on disk of a tensor that is cut into slices of whole pages."""
    starts = range(0, elements, slice_size)
    return sum(aligned(min(slice_size, elements - a) * itemsize, ALIGN) for a in starts)


@pytest.mark.parametrize(
    ("plan", "precision"),
    [*((plan, "fp32") for plan in PLANS[::3]), (ALL, "fp32"), (ALL, "bf16")],
    ids=lambda value: name(value) if isinstance(value, Plan) else value,
)
def test_bytes(two: Pool, tmp_path: Path, plan: Plan, precision: str) -> None:
    parameter, _, master = BYTES[precision]
    columns = [parameter] if plan.parameters.on == "nvme" else []
    if plan.optimizer.on == "nvme":
        columns += [4, 4] + ([master] if master else [])
    make = partial(NVMe, folder=tmp_path, buffer_size=1024)
    for seen in two.run(measure, plan, precision, make):
        formula = estimate(padded(seen, 2), 2, plan, precision)
        seen["cpu"]["optimizer"] -= 4 * seen["masters"]  # counters of steps
        places = {"device": formula, "cpu": formula.host, "nvme": formula.disk}
        for (where, expected), category in itertools.product(places.items(), STATE):
            assert seen[where][category] == getattr(expected, category), where
        # staging buffers, gradients that arrive, a NaN for each placeholder
        assert seen["fixed"] <= seen["cpu"]["buffers"] <= 3 * seen["fixed"]
        assert seen["cpu"]["activations"] == 0
        assert seen["file"] == sum(pages(n, c) for n in seen["sizes"] for c in columns)


# --- what runs at the same time -----------------------------------------------


def test_the_next_slice_is_read_and_the_last_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = NVMe(ALL, tmp_path, buffer_size=512, buffer_count=3)
    net = build(storage)
    one_step(net)
    events: list[str] = []
    numbers: dict[Slice, int] = {}

    def watch(what: str, method: str) -> None:
        call = getattr(Slice, method)

        def noted(part: Slice, *args: Any) -> Any:
            events.append(f"{what}{numbers.setdefault(part, len(numbers))}")
            return call(part, *args)

        monkeypatch.setattr(Slice, method, noted)

    for what, call in (("r", "launch_reads"), ("s", "expose"), ("w", "launch_writes")):
        watch(what, call)
    one_step(net)
    expected = ["r0"]
    for i in range(len(numbers)):
        expected += [f"r{i + 1}"] * (i + 1 < len(numbers)) + [f"s{i}", f"w{i}"]
    assert len(numbers) > 8 and events == expected
    storage.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_shards_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """A gather finds its read launched, if the schedule expected it."""
    storage = NVMe(ALL, tmp_path, buffer_size=1 << 20)
    schedule = Overlap(prefetch_bucket_size=0, param_persistence_threshold=0)
    net = build(storage, schedule=schedule if overlap else None)
    one_step(net)
    found: list[bool] = []
    load = NVMe.load

    def noted(storage: NVMe, shard: Any, into: Any) -> Any:
        found.append((storage._swapped[shard], 0) in storage._ahead)
        return load(storage, shard, into)

    monkeypatch.setattr(NVMe, "load", noted)
    one_step(net)
    # of a forward and of a backward only the first is not expected
    units = len(net.units)
    assert len(found) >= 2 * units - 1
    assert found.count(False) <= 2 if overlap else not any(found)
    storage.close()


def is_direct(fd: int) -> bool:
    """Whether a file bypasses the page cache, if its file system allows that."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except (AttributeError, OSError):
        return True
    return bool(flags & os.O_DIRECT)


@pytest.mark.parametrize(
    ("direct", "dtype"), [(True, torch.float32), (False, torch.bfloat16)]
)
def test_what_is_stored_comes_back(
    tmp_path: Path, direct: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A placeholder stands for it."""
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    storage = NVMe(ALL, tmp_path, buffer_size=4_032, block_size=ALIGN, queue_depth=3)
    values = torch.randn(10_001).to(dtype)
    shard = storage.store(values, "parameters")
    assert shard.isnan().all() and shard.untyped_storage().nbytes() <= 4
    part = values[4_000:8_100] = torch.arange(4_100).to(dtype)
    storage.write_shard(shard, part, 4_000)
    assert torch.equal(storage.load(shard, torch.empty_like(values)), values)
    assert torch.equal(storage.read_shard(shard, 3_000, 9_000), values[3_000:9_000])
    assert storage.on_disk.parameters == values.nbytes
    assert is_direct(storage.swap.fd)
    size = os.fstat(storage.swap.fd).st_size
    assert size == storage.swap.size == pages(10_001, dtype.itemsize, 4_032)
    # a file without a name: no kill leaves it behind
    assert not list(tmp_path.iterdir())
    storage.close()
    storage.close()


# --- faults -------------------------------------------------------------------


@pytest.mark.parametrize("plan", [ALL, Plan.stage(1, "nvme")], ids=name)
@pytest.mark.parametrize(
    "fault", ["the file ends at byte", "Input/output error", "step", "_updated"]
)
def test_a_fault_is_named_and_nothing_half_done_is_used(
    tmp_path: Path, fault: str, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of reading parameters or states, of the optimizer, or of a publication."""
    storage = NVMe(plan, tmp_path, buffer_size=1024)
    net = build(storage)
    one_step(net)
    one_step(net)
    owner = {"step": net.optimizer, "_updated": net}.get(fault)
    calls = itertools.count(-3 if fault == "step" else 0)

    def preadv(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if fault == "the file ends at byte":
        os.ftruncate(storage.swap.fd, 0)
    elif owner:
        monkeypatch.setattr(owner, fault, lambda *_: 1 / next(calls))
    else:
        monkeypatch.setattr(os, "preadv", preadv)
    text = "division by zero" if owner else f"{tmp_path}.*{fault}"
    with pytest.raises(ZeroDivisionError if owner else DiskFault, match=text) as error:
        one_step(net)
    assert not list(tmp_path.iterdir())
    for use in (lambda: one_step(net), net.step if plan is not ALL else net.state_dict):
        with pytest.raises(RuntimeError, match=f"is lost since this: {error.typename}"):
            use()


# --- bad input ----------------------------------------------------------------


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, options, kind, text in (
        (tmp_path, {"buffer_size": 100}, ValueError, "a multiple of 64 elements"),
        (tmp_path, {"block_size": 1000}, ValueError, "of 4096 bytes, not 1000"),
        (Path("/proc"), {}, DiskFault, "/proc: .*; choose another folder"),
        (tmp_path / "file", {}, DiskFault, "file: File exists"),
    ):
        with pytest.raises(kind, match=text):
            NVMe(ALL, folder, **options)
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = Muon([{"params": model.parameters(), "use_muon": True}])
    with pytest.raises(ValueError, match=r"Muon needs whole matrices.*use Offload"):
        parallelize(model, optimizer, ALL, storage=NVMe(ALL, tmp_path))
