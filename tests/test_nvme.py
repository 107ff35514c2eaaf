"""State on disk: the same numbers, bounded host memory, and faults that are named."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_offload import CONFIG, PRECISIONS, STATE, name, plans

from minizero import NVMe, Plan, Tracker, estimate, parallelize
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.lab.plots.offload import (
    DISK_LANES,
    efficiency_figure,
    watched_step,
)
from minizero.memory import Placement
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
ON_DEVICE = Plan(Placement(True, "nvme"), Placement(True), Placement(True, "nvme"))


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


def measure(plan: Plan, folder: Path, precision: str) -> dict[str, Any]:
    gc.collect()  # models of tests before, which hang in reference cycles
    storage = NVMe(plan, folder, buffer_size=1024)
    with Tracker() as tracker:
        net = build(storage, precision=PRECISIONS[precision]())
        for _ in range(2):
            one_step(net)
        gc.collect()
        live, host = dict(tracker.live), dict(tracker.host)
    parameter, _, master = BYTES[precision]
    columns = [parameter] if plan.parameters.on == "nvme" else []
    if plan.optimizer.on == "nvme":
        columns += [4, 4] + ([master] if master else [])
    seen = {
        "device": live,
        "cpu": host,
        "nvme": {c: getattr(storage.on_disk, c) for c in STATE},
        "padded": sum(flat.padded for flat in net.flats),
        "counters": 4 * len(net.trained),
        "fixed": storage.buffers.nbytes,
        "file": os.fstat(storage.swap.fd).st_size,
        "whole": sum(pages(flat.size, c) for flat in net.flats for c in columns),
    }
    storage.close()
    return seen


@pytest.mark.parametrize(
    ("plan", "precision"),
    [*((plan, "fp32") for plan in PLANS), (PLANS[0], "bf16"), (ALL, "bf16")],
    ids=lambda value: name(value) if isinstance(value, Plan) else value,
)
def test_bytes(two: Pool, tmp_path: Path, plan: Plan, precision: str) -> None:
    for seen in two.run(measure, plan, tmp_path, precision):
        formula = estimate(seen["padded"], 2, plan, precision)
        seen["cpu"]["optimizer"] -= seen["counters"]
        places = {"device": formula, "cpu": formula.host, "nvme": formula.disk}
        for (where, expected), category in itertools.product(places.items(), STATE):
            assert seen[where][category] == getattr(expected, category), where
        # staging buffers, gradients that arrive, a NaN for each placeholder
        assert seen["fixed"] <= seen["cpu"]["buffers"] <= 3 * seen["fixed"]
        assert seen["cpu"]["activations"] == 0
        assert seen["file"] == seen["whole"]


def peak_on_host(folder: Path, config: GPTConfig, precision: str) -> tuple[int, ...]:
    """Host bytes at most, beside the NaNs; of the staging buffers; of the disk."""
    gc.collect()
    storage = NVMe(ON_DEVICE, folder, buffer_size=1024, buffer_count=3)
    with Tracker() as tracker:
        net = build(storage, config, precision=PRECISIONS[precision]())
        for _ in range(2):
            one_step(net)
        # placeholders of shard, master, copy and states, and step counters
        small = 4 * 6 * len(net.units)
    found = tracker.host_peak - small, storage.buffers.nbytes, storage.on_disk.total
    storage.close()
    return tuple(int(n) for n in found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_host_memory_is_the_staging_buffers(tmp_path: Path, precision: str) -> None:
    """With gradients on the device: the same for a large model, at all times."""
    sizes = [GPTConfig(n, h, 2, 16, 50) for n, h in ((1, 24), (4, 40))]
    small, large = (peak_on_host(tmp_path, size, precision) for size in sizes)
    parameter, gradient, master = BYTES[precision]
    columns = [parameter, gradient, 4, 4] + ([master] if master else [])
    formula = 3 * (ALIGN + sum(aligned(1024 * item, ALIGN) for item in columns))
    for peak, staging, _ in (small, large):
        assert staging == formula
        # and one slice of what the optimizer makes first, and of a wide gradient
        assert peak - staging <= (8 + 4 * bool(master)) * 1024 + 64
    assert large[2] > 5 * small[2]


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

    for what, method in (("r", "launch_reads"), ("s", "show"), ("w", "launch_writes")):
        watch(what, method)
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


@pytest.mark.parametrize(
    ("direct", "dtype"), [(True, torch.float32), (False, torch.bfloat16)]
)
def test_what_is_stored_comes_back(
    tmp_path: Path, direct: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A placeholder stands for it."""
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    options = {"buffer_size": 4_032, "block_size": ALIGN, "queue_depth": 3}
    storage = NVMe(ALL, tmp_path, **options)
    assert direct or not storage.swap.direct
    values = torch.randn(10_001).to(dtype)
    shard = storage.store(values, "parameters")
    assert shard.isnan().all() and shard.untyped_storage().nbytes() <= 4
    part = values[4_000:8_100] = torch.arange(4_100).to(dtype)
    storage.write_shard(shard, part, 4_000)
    assert torch.equal(storage.load(shard, torch.empty_like(values)), values)
    assert torch.equal(storage.read_shard(shard, 3_000, 9_000), values[3_000:9_000])
    assert storage.on_disk.parameters == values.nbytes
    size = os.fstat(storage.swap.fd).st_size
    assert size == storage.swap.size == pages(10_001, dtype.itemsize, 4_032)
    # a file without a name: no kill leaves it behind
    assert not list(tmp_path.iterdir())
    storage.close()
    storage.close()


# --- faults -------------------------------------------------------------------


@pytest.mark.parametrize("plan", [ALL, Plan.stage(1, "nvme")], ids=name)
@pytest.mark.parametrize(
    "fault", ["the file ends at byte", "Input/output error", "ArithmeticError"]
)
def test_a_fault_is_named_and_nothing_half_done_is_used(
    tmp_path: Path, fault: str, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of reading parameters, of reading states, or of the optimizer."""
    storage = NVMe(plan, tmp_path, buffer_size=1024)
    net = build(storage)
    one_step(net)
    one_step(net)
    steps = itertools.count()

    def preadv(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fails_in_the_middle() -> None:
        if next(steps) == 3:
            raise ArithmeticError("ArithmeticError on purpose")

    if fault == "the file ends at byte":
        os.ftruncate(storage.swap.fd, 0)
    elif fault == "ArithmeticError":
        monkeypatch.setattr(net.optimizer, "step", fails_in_the_middle)
    else:
        monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises((DiskFault, ArithmeticError), match=fault) as error:
        one_step(net)
    is_fault = error.type is DiskFault
    assert is_fault == (fault != "ArithmeticError")
    assert not is_fault or str(tmp_path) in str(error.value)
    assert not list(tmp_path.iterdir())
    for use in (lambda: one_step(net), net.step if plan is not ALL else net.state_dict):
        with pytest.raises(RuntimeError, match=f"is lost since this: {error.typename}"):
            use()


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond a page."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ALIGN, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """Found when space is allocated, and when an allocated place is written to."""
    net = build(NVMe(ALL, tmp_path, buffer_size=1024))
    one_step(net)
    for work in (lambda: one_step(net), lambda: build(NVMe(ALL, tmp_path))):
        text = "the file may not grow so large"
        with small_files(), pytest.raises(DiskFault, match=text):
            work()
    assert not list(tmp_path.iterdir())


# --- bad input ----------------------------------------------------------------


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, options, kind, text in (
        (tmp_path, {"buffer_count": 0}, ValueError, "must be at least 1, not 0"),
        (tmp_path, {"buffer_size": 100}, ValueError, "a multiple of 64 elements"),
        (tmp_path, {"block_size": 1000}, ValueError, "of 4096 bytes, not 1000"),
        (Path("/proc"), {}, DiskFault, "/proc.*cannot be written to .*choose another"),
        (tmp_path / "file", {}, DiskFault, "file.*cannot be written to"),
    ):
        with pytest.raises(kind, match=text):
            NVMe(ALL, folder, **options)
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = Muon([{"params": model.parameters(), "use_muon": True}])
    with pytest.raises(ValueError, match=r"Muon needs whole matrices.*use Offload"):
        parallelize(model, optimizer, ALL, storage=NVMe(ALL, tmp_path))


# --- the figures ---------------------------------------------------------------


def test_what_the_figures_show(tmp_path: Path) -> None:
    storage = NVMe(ALL, tmp_path, buffer_size=1024)
    net = build(storage)
    one_step(net)
    net.backward(net(*[torch.zeros(1, 16, dtype=torch.long)] * 2))
    bars = watched_step(net)
    storage.close()
    counts = [sum(bar.lane == lane for bar in bars) for lane in DISK_LANES]
    slices = sum(-(-flat.size // 1024) for flat in net.flats)
    # parameter and two states are read and written
    assert counts == [3 * slices, slices, 3 * slices]
    assert all(bar.begin <= bar.end for bar in bars)
    curves = efficiency_figure(70e12).axes
    # half of the time is computing where ait x bandwidth is the peak
    x, y = curves[0].lines[0].get_data()
    half = min(range(len(y)), key=lambda i: abs(y[i] - 50))
    assert x[half] == pytest.approx(70e12 / 1024 / 1e9, rel=0.1)
