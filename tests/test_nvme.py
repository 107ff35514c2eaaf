"""State in files: the same numbers, a bounded pool, and faults that are named."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nasty
import pytest
import torch
from nasty import Run, same

from minizero import Tracker, estimate, parallelize, zero
from minizero.lab.hardware import efficiency, intensity
from minizero.lab.models.gpt import GPT, GPTConfig, count_parameters
from minizero.lab.plots.offload import (
    LANES,
    depth_figure,
    efficiency_figure,
    lanes_figure,
    point_figure,
    throughput,
)
from minizero.lab.toygpu import ToyGPU
from minizero.memory.labels import aligned
from minizero.memory.plan import PRECISIONS, Placement, Plan
from minizero.offload.async_io import ALIGN, DiskFault, aligned_buffer
from minizero.offload.nvme import Activity, NVMe, StagedSlice
from minizero.offload.read_ahead import ReadAhead
from minizero.offload.staging import StagingBuffers
from minizero.offload.swap_file import SwapFile, SwappedShard
from minizero.precision import DynamicLossScale, MixedPrecision
from minizero.ranks.launch import Pool, RankError, world_size

STATE = ("parameters", "gradients", "optimizer")
CONFIG = GPTConfig(layers=3, hidden=24, heads=2, sequence=16, vocabulary=50)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plans() -> Iterator[Plan]:
    """Every plan that keeps something in files, ZeRO-1 to 3."""
    places = {"parameters": "device cpu nvme", "gradients": "device cpu"}
    choices = [places.get(c, "device cpu nvme").split() for c in STATE]
    for stage, on in itertools.product((1, 2, 3), itertools.product(*choices)):
        sharded = (stage == 3, stage >= 2, True)
        placements = list(zip(sharded, on, strict=True))
        if "nvme" in on and all(s or o == "device" for s, o in placements):
            yield Plan(*(Placement(s, o) for s, o in placements))


PLANS = list(plans())
ALL = Plan.stage(3, offload_optimizer="nvme", offload_param="nvme")
ON_DEVICE = Plan(Placement(True, "nvme"), Placement(True), Placement(True, "nvme"))


def name(plan: Plan) -> str:
    stage = sum(getattr(plan, c).sharded for c in STATE)
    return f"zero{stage} " + " ".join(getattr(plan, c).on for c in STATE)


@pytest.fixture(scope="module", params=[1, 2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(request.param) as pool:
        yield pool


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


# --- the same numbers ---------------------------------------------------------


def train(
    plan: Plan | None,
    folder: Path | None = None,
    steps: int = 6,
    buffer_size: int = 128,
    buffer_count: int = 4,
    precision: str | None = None,
    **options: Any,
) -> Run:
    """A few steps of the nasty model, with its state in files or not at all."""
    plan = plan or Plan.stage(0)
    if folder is not None:
        options["home"] = NVMe(
            plan, folder, buffer_size=buffer_size, buffer_count=buffer_count
        )
    if precision:
        scale = DynamicLossScale(initial_scale_power=17, hysteresis=1)
        options["precision"] = MixedPrecision(
            DTYPES[precision], loss_scale=scale if precision == "fp16" else None
        )
    try:
        run = nasty.train(plan, steps=steps, **options)
        run.norms.nan_to_num_()  # of skipped steps: a NaN equals nothing
        return run
    finally:
        if folder is not None:
            options["home"].close()


def test_every_plan_is_equal(ranks: Pool, tmp_path: Path) -> None:
    """All of them on two ranks; on one and on three a part."""
    reference = ranks.run(train, None, steps=4)
    assert reference[0].norms.max() > 0.5  # clipping took part
    for plan in PLANS if len(reference) == 2 else PLANS[len(reference) % 2 :: 3]:
        assert same(ranks.run(train, plan, tmp_path, 4), reference), name(plan)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(two: Pool, tmp_path: Path, precision: str) -> None:
    """fp16 starts with a loss scale so high that steps are skipped."""
    reference = two.run(train, Plan.stage(1), precision=precision)
    for plan in PLANS if precision == "fp16" else PLANS[::4]:
        got = two.run(train, plan, tmp_path, precision=precision)
        assert same(got, reference), name(plan)


@pytest.mark.parametrize(("count", "size"), [(1, 192), (2, 64), (3, 1 << 20)])
def test_any_pool_is_equal(two: Pool, tmp_path: Path, count: int, size: int) -> None:
    reference = two.run(train, Plan.stage(3), steps=3)
    options = {"buffer_count": count, "buffer_size": size, "steps": 3}
    assert same(two.run(train, ALL, tmp_path, **options), reference)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "fused adamw": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, foreach=False, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer(two: Pool, tmp_path: Path, optimizer: str) -> None:
    options = {"make_optimizer": OPTIMIZERS[optimizer], "steps": 4}
    reference = two.run(train, Plan.stage(1), **options)
    for plan in (ALL, Plan.stage(3, offload_param="nvme")):
        assert same(two.run(train, plan, tmp_path, **options), reference)


def test_pieces_round_as_the_whole() -> None:
    """Fused AdamW, cut at multiples of 64 elements, on one thread and on all."""
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(300_001))
    grad = torch.randn(300_001)
    for cut in (64, 192, 65_536):
        pieces = [torch.nn.Parameter(t.clone()) for t in whole.detach().split(cut)]
        for piece, part in zip(pieces, grad.split(cut), strict=True):
            piece.grad = part.clone()
        one = torch.nn.Parameter(whole.detach().clone())
        one.grad = grad.clone()
        for params in ([one], pieces):
            optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
            for _ in range(3):
                optimizer.step()
        assert torch.equal(one, torch.cat([*pieces]))


def stepped(plan: Plan, folder: Path | None) -> dict[str, torch.Tensor]:
    """An optimizer that has made a step before it is handed over."""
    torch.manual_seed(0)
    model = nasty.Nasty()
    optimizer = nasty.adamw(nasty.groups(model))
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    home = NVMe(plan, folder, buffer_size=64) if folder else None
    net = parallelize(model, optimizer, plan, home=home)
    for x, y in nasty.batches(2, 1, rows=2):
        net.backward(net(nasty.own(x, 2), nasty.own(y, 2)))
        net.step()
    return net.state_dict()


def test_state_from_before_is_kept(two: Pool, tmp_path: Path) -> None:
    reference = two.run(stepped, Plan.stage(3), None)[0]
    got = two.run(stepped, ALL, tmp_path)[0]
    assert all(torch.equal(reference[key], got[key]) for key in reference)


def by_hand(
    plan: Plan, folder: Path | None, precision: bool = False
) -> dict[str, torch.Tensor]:
    """A model built inside zero.Init, with weights that are set by hand."""
    torch.manual_seed(0)
    home = NVMe(plan, folder, buffer_size=64) if folder else None
    config = {"zero_optimization": {"stage": 3}}
    with zero.Init(config, home=home):
        model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mixed = MixedPrecision() if precision else None
    net = parallelize(model, optimizer, plan, home=home, precision=mixed)
    x = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        with zero.GatheredParameters(model.parameters(), modifier_rank=0):
            next(model.parameters()).data.fill_(0.5)
        net.refresh()
        net.backward(net(x, x))
        net.step()
    return net.state_dict()


@pytest.mark.parametrize("precision", [False, True])
def test_weights_set_by_hand(two: Pool, tmp_path: Path, precision: bool) -> None:
    reference = two.run(by_hand, Plan.stage(3), None, precision)[0]
    got = two.run(by_hand, ALL, tmp_path, precision)[0]
    assert all(torch.equal(reference[key], got[key]) for key in reference)


# --- bytes --------------------------------------------------------------------


def one_step(net: Any) -> None:
    tokens = net.model.config.sequence
    x = torch.randint(50, (1, tokens), generator=torch.Generator().manual_seed(1))
    net.backward(net(x, x))
    net.step()


def build(home: NVMe, config: GPTConfig = CONFIG, **options: Any) -> Any:
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return parallelize(model, optimizer, home.plan, home=home, **options)


def measure(plan: Plan, folder: Path, precision: str) -> dict[str, Any]:
    gc.collect()  # models of tests before, which hang in reference cycles
    home = NVMe(plan, folder, buffer_size=1024)
    dtype = DTYPES.get(precision)
    with Tracker() as tracker:
        net = build(home, precision=MixedPrecision(dtype) if dtype else None)
        for _ in range(2):
            one_step(net)
        live, host = dict(tracker.live), dict(tracker.host)
    disk, shards = home.on_disk, home._swapped.values()
    masters = sum(len(g["params"]) for g in net.optimizer.param_groups)
    sizes = [(s.payload, s.dtype.itemsize) for s in shards]
    seen = {
        "live": {c: live[c] for c in STATE},
        "host": host,
        "disk": {c: getattr(disk, c) for c in STATE},
        "padded": sum(f.padded for u in net.units for f in u.flats),
        "counters": 4 * masters,
        "staging": home.buffers.nbytes,
        "arriving": 2 * home.arriving.blocks.nbytes,
        "files": home.file_bytes,
        "found": os.fstat(home.swap.fd).st_size,
        "sizes": sizes,
        "ranks": world_size(),
    }
    home.close()
    return seen


@pytest.mark.parametrize(
    ("plan", "precision"),
    [*((plan, "fp32") for plan in PLANS), (PLANS[0], "bf16"), (ALL, "bf16")],
    ids=lambda value: name(value) if isinstance(value, Plan) else value,
)
def test_bytes(two: Pool, tmp_path: Path, plan: Plan, precision: str) -> None:
    for seen in two.run(measure, plan, tmp_path, precision):
        formula = estimate(seen["padded"], seen["ranks"], plan, precision)
        at = "live" if plan.optimizer.on == "device" else "host"
        seen[at]["optimizer"] -= seen["counters"]
        for category in STATE:
            assert seen["live"][category] == getattr(formula, category)
            assert seen["host"][category] == getattr(formula.host, category)
            assert seen["disk"][category] == getattr(formula.disk, category)
        # a NaN a dtype stands for what is in files
        nans = seen["host"]["buffers"] - seen["staging"] - seen["arriving"]
        assert 0 <= nans <= 8 and seen["host"]["activations"] == 0
        # each record of 1,024 elements is whole pages
        whole = sum(
            sum(
                aligned(min(1024 * item, payload - start), ALIGN)
                for start in range(0, payload, 1024 * item)
            )
            for payload, item in seen["sizes"]
        )
        assert seen["files"] == seen["found"] == whole


def staging_formula(count: int, size: int, precision: str = "fp32") -> int:
    """`count` buffers: parameter, gradient and states of `size` elements in pages."""
    parameter, _, master = PRECISIONS[precision]
    columns = [parameter, 4] + [4, 4] + ([master] if master else [])
    record = sum(aligned(size * item, ALIGN) for item in columns)
    return count * (ALIGN + record)


def peak_on_host(folder: Path, config: GPTConfig, precision: str) -> tuple[int, ...]:
    """Bytes of the host, at most; of the staging buffers; and of the disk."""
    gc.collect()
    home = NVMe(ON_DEVICE, folder, buffer_size=1024, buffer_count=3)
    dtype = DTYPES.get(precision)
    mixed = MixedPrecision(dtype) if dtype else None
    with Tracker() as tracker:
        net = build(home, config, precision=mixed)
        for _ in range(2):
            one_step(net)
        counters = 4 * len(net.units)
    found = tracker.host_peak - counters, home.buffers.nbytes, home.on_disk.total
    home.close()
    return tuple(int(n) for n in found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_host_memory_is_the_staging_buffers(tmp_path: Path, precision: str) -> None:
    """With gradients on the device: at both sizes the same, at all times."""
    sizes = [GPTConfig(n, h, 2, 16, 50) for n, h in ((1, 24), (4, 40))]
    small, large = (peak_on_host(tmp_path, size, precision) for size in sizes)
    formula = staging_formula(3, 1024, precision)
    assert small[1] == large[1] == formula
    for peak, staging, _ in (small, large):
        # a NaN for a dtype, and step counters that are being copied
        assert 0 <= peak - staging <= 32
    assert large[2] > 5 * small[2]


def test_states_ten_times_the_budget(tmp_path: Path) -> None:
    config = GPTConfig(24, 48, 2, 8, 50, checkpoint=True)
    home = NVMe(ALL, tmp_path, buffer_size=4096)
    with zero.Init({"zero_optimization": {"stage": 3}}, home=home):
        model = GPT(config)
    n_params = count_parameters(config)
    budget = 16 * n_params // 10
    gc.collect()
    with ToyGPU(budget) as gpu:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        net = parallelize(model, optimizer, ALL, home=home)
        for _ in range(2):
            one_step(net)
    assert gpu.peak < budget
    home.close()


# --- the pipeline -------------------------------------------------------------


def test_the_next_slice_is_read_and_the_last_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    home = NVMe(ALL, tmp_path, buffer_size=512, buffer_count=3)
    net = build(home)
    one_step(net)
    numbers: dict[int, int] = {}

    def noted(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(part: StagedSlice, *args: Any) -> Any:
            events.append(f"{what}{numbers.setdefault(id(part), len(numbers))}")
            return method(part, *args)

        return call

    for what, method in (("r", "bring"), ("s", "arrive"), ("w", "leave")):
        monkeypatch.setattr(
            StagedSlice, method, noted(what, getattr(StagedSlice, method))
        )
    one_step(net)
    count = len(numbers)
    expected = ["r0"]
    for i in range(count):
        expected += [f"r{i + 1}"] if i + 1 < count else []
        expected += [f"s{i}", f"w{i}"]
    assert count > 20 and events == expected
    lanes = [activity.lane for activity in home.timeline]
    assert [lanes.count(lane) for lane in ("read", "step", "write")] == [count] * 3
    assert all(a.started <= a.finished for a in home.timeline)
    home.close()


def test_shards_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the step before; a gather finds its read launched."""
    home = NVMe(ALL, tmp_path, buffer_size=1 << 20)
    net = build(home)
    late: list[SwappedShard] = []
    take = ReadAhead.take

    def noted(ahead: ReadAhead, shard: SwappedShard, record: int) -> Any:
        found = ahead._under_way and ahead._under_way[0].shard is shard
        late.extend([] if found else [shard])
        return take(ahead, shard, record)

    monkeypatch.setattr(ReadAhead, "take", noted)
    one_step(net)
    first = len(late)
    late.clear()
    one_step(net)
    assert first > 4 and len(late) == 1  # but for the first after an update
    home.close()


def test_requests_have_the_block_size_and_so_many_are_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    together = threading.Barrier(4)
    pwrite = os.pwrite

    def noted(fd: int, part: memoryview, at: int) -> int:
        sizes.append(len(part))
        together.wait(timeout=30)  # passes only if four requests are under way
        return pwrite(fd, part, at)

    swap = SwapFile(tmp_path, block_size=2 * ALIGN, queue_depth=4)
    monkeypatch.setattr(os, "pwrite", noted)
    swap.write(0, aligned_buffer(16 * ALIGN)).wait()
    assert sizes == [2 * ALIGN] * 8
    swap.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_come_back(
    tmp_path: Path, direct: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    swap = SwapFile(tmp_path, block_size=ALIGN, queue_depth=3)
    if not direct:
        assert not swap.direct
    shard = SwappedShard(swap, "optimizer", 10_001, dtype, (0, 4_000, 8_000))
    values = torch.randn(10_001).to(dtype)
    for _ in range(2):
        buffers = [aligned_buffer(shard.largest) for _ in range(shard.records)]
        writes = []
        for record, (a, b) in enumerate(shard.ranges):
            shard.elements(record, buffers[record]).copy_(values[a:b])
            writes.append(shard.write(record, buffers[record]))
        for write in writes:
            write.wait()
        for record, (a, b) in enumerate(shard.ranges):
            buffer = aligned_buffer(shard.largest)
            shard.read(record, buffer).wait()
            assert torch.equal(shard.elements(record, buffer), values[a:b])
    assert os.fstat(swap.fd).st_size == swap.size == shard.nbytes
    assert not list(tmp_path.iterdir())
    swap.close()


def test_what_a_shard_leaves_is_used_again(tmp_path: Path) -> None:
    swap = SwapFile(tmp_path)
    size = 5_000, torch.float32, range(0, 5_000, 1024)
    shards = [SwappedShard(swap, "optimizer", *size) for _ in "ab"]
    assert shards[0].offset != shards[1].offset
    shards[0].free()
    again = SwappedShard(swap, "parameters", *size)
    assert again.offset == shards[0].offset and swap.size == 2 * again.nbytes
    swap.close()


# --- faults -------------------------------------------------------------------


FAULTS = {
    "cut short": "the file ends at byte",
    "input/output error": "Input/output error",
}


def broken(home: NVMe, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reads fail from now on."""

    def preadv(fd: int, buffers: Any, at: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if fault == "cut short":
        os.ftruncate(home.swap.fd, 0)
    else:
        monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("plan", [ALL, Plan.stage(1, "nvme")], ids=name)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(
    tmp_path: Path, fault: str, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of reading parameters, and of reading the optimizer's states."""
    home = NVMe(plan, tmp_path, buffer_size=1024)
    net = build(home)
    one_step(net)
    one_step(net)
    broken(home, fault, monkeypatch)
    with pytest.raises(DiskFault, match=FAULTS[fault]) as error:
        one_step(net)
    assert str(tmp_path) in str(error.value) and error.value.path == tmp_path
    # nothing is left, and nothing half done can be used
    assert not list(tmp_path.iterdir())
    for use in (net.step, lambda: one_step(net)):
        with pytest.raises(RuntimeError, match="is lost since this: DiskFault"):
            use()
    if plan is ALL:
        with pytest.raises(RuntimeError, match="is lost since this: DiskFault"):
            net.state_dict()


def test_an_error_of_the_optimizer_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some slices are updated and others not: that cannot go on."""
    home = NVMe(ALL, tmp_path, buffer_size=1024)
    net = build(home)
    one_step(net)
    steps = itertools.count()

    def fails() -> None:
        if next(steps) == 3:
            raise ArithmeticError("no")

    monkeypatch.setattr(net.optimizer, "step", fails)
    with pytest.raises(ArithmeticError):
        one_step(net)
    with pytest.raises(RuntimeError, match="is lost since this: ArithmeticError"):
        one_step(net)


def limited(plan: Plan, folder: Path) -> list[str]:
    """Files may not grow beyond what the first step needed: writing fails."""
    home = NVMe(plan, folder, buffer_size=1024)
    net = build(home)
    one_step(net)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ALIGN, hard))
    try:
        one_step(net)
    except DiskFault as fault:
        return [str(fault), *os.listdir(folder)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return []


def test_a_write_that_fails(tmp_path: Path) -> None:
    text, *left = limited(ALL, tmp_path)
    assert "the file may not grow so large" in text and not left


def test_a_full_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", tmp_path],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        home = NVMe(ALL, tmp_path, buffer_size=1024)
        with pytest.raises(DiskFault, match=r": the disk is full; free space"):
            build(home)
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("where", ["/proc", "file"])
def test_a_folder_that_is_not_writable(tmp_path: Path, where: str) -> None:
    folder = Path(where)
    if where == "file":
        folder = tmp_path / "file"
        folder.touch()
    with pytest.raises(DiskFault, match="cannot be written to .*choose another") as e:
        NVMe(ALL, folder)
    assert str(folder) in str(e.value)


SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import minizero
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.ranks.launch import rank
from minizero.offload.nvme import NVMe

CONFIG = GPTConfig(layers=2, hidden=24, heads=2, sequence=16, vocabulary=50)
PLAN = minizero.Plan.stage(3, "nvme", "nvme")

def train(folder, fault):
    home = NVMe(PLAN, folder)
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    net = minizero.parallelize(model, optimizer, PLAN, home=home)
    x = torch.randint(50, (1, 16))
    for step in range(3):
        loss = net(x, x)
        net.backward(loss)
        net.step()
        if step == 1 and fault == "cut" and rank() == 1:
            os.ftruncate(home.swap.fd, 0)
        if step == 1 and fault == "wait":
            Path(folder).with_name(f"rank{rank()}").write_text(str(os.getpid()))
            print("ready", flush=True)
            time.sleep(600)

if __name__ == "__main__":
    minizero.launch(train, 2, sys.argv[1], sys.argv[2])
    print("trained")
"""


def script(tmp_path: Path, fault: str) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return [sys.executable, str(path), str(tmp_path / "state"), fault]


def test_a_script_ends_with_an_error_and_runs_again(tmp_path: Path) -> None:
    run = partial(subprocess.run, capture_output=True, text=True, timeout=120)
    failed = run(script(tmp_path, "cut"))
    assert failed.returncode == 1 and "trained" not in failed.stdout
    assert "DiskFault" in failed.stderr and "the file ends at byte" in failed.stderr
    again = run(script(tmp_path, "none"))
    assert again.returncode == 0 and "trained" in again.stdout, again.stderr
    assert not list((tmp_path / "state").iterdir())


def test_a_kill_leaves_nothing_behind(tmp_path: Path) -> None:
    """While ranks train, too: their files have no names."""
    process = subprocess.Popen(
        script(tmp_path, "wait"), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    folder, notes = tmp_path / "state", [tmp_path / f"rank{r}" for r in range(2)]
    deadline = time.monotonic() + 60
    while not all(note.exists() for note in notes) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.1)  # a file is there before it is written
    assert folder.is_dir() and not list(folder.iterdir())
    for pid in (int(note.read_text()) for note in notes):
        files = Path(f"/proc/{pid}/fd").iterdir()
        assert any(os.readlink(f).startswith(str(folder)) for f in files)
        os.kill(pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert not list(folder.iterdir())


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    """It ends without closing its parent's file, and without taking it along."""
    code = f"""
    import os
    from pathlib import Path
    from minizero.offload.async_io import ALIGN, aligned_buffer
    from minizero.offload.swap_file import SwapFile
    swap = SwapFile(Path({str(tmp_path)!r}))
    buffer = aligned_buffer(ALIGN).fill_(7)
    swap.write(swap.allocate(ALIGN), buffer).wait()
    if os.fork() == 0:
        raise SystemExit
    os.wait()
    swap.read(0, buffer.zero_()).wait()
    assert buffer.eq(7).all()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)])
    assert done.returncode == 0 and not list(tmp_path.iterdir())


def test_places_go_with_their_shards(tmp_path: Path) -> None:
    home = NVMe(ALL, tmp_path)
    values = torch.randn(100)
    shard = home.store(values, "parameters")
    assert home.file_bytes == ALIGN and shard.isnan().all()
    assert torch.equal(home.load(shard, torch.empty(100)), values)
    del shard
    gc.collect()
    assert home.file_bytes == 0
    home.store(values, "optimizer")
    assert home.swap.size == ALIGN
    home.close()
    home.close()


# --- bad input ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"buffer_count": 0}, "buffer_count must be at least 1, not 0"),
        ({"buffer_size": 0}, "buffer_size must be a multiple of 64 elements, not 0"),
        ({"buffer_size": 100}, "buffer_size must be a multiple of 64"),
        ({"block_size": 1000}, "block_size must be a multiple of 4096 bytes, not 1000"),
        ({"queue_depth": 0}, "queue_depth must be at least 1, not 0"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NVMe(ALL, tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_the_plan_without_its_home() -> None:
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="'nvme'"):
        parallelize(model, optimizer, ALL)


def test_a_rank_s_fault_reaches_the_parent(two: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="cannot be written to"):
        two.run(NVMe, ALL, "/proc")


def test_there_are_so_many_buffers() -> None:
    buffers = StagingBuffers(2)
    buffers.reserve(5000)
    assert buffers.size == 2 * ALIGN and buffers.nbytes == 2 * (2 * ALIGN + ALIGN)
    one, two = buffers.take(), buffers.take()
    assert one.data_ptr() % ALIGN == two.data_ptr() % ALIGN == 0
    buffers.give(one)
    assert buffers.take() is one


# --- theory -------------------------------------------------------------------


def test_intensity_and_efficiency() -> None:
    """The paper's formulas, and its two examples for a peak of 70 TFLOP/s."""
    assert intensity("parameters", 1024, 4) == 1024 * 4
    assert intensity("optimizer", 1024, 4) == 1024 * 4 / 4
    assert intensity("activations", 1024, 4, hidden=8192, interval=2) == 24 * 8192 * 2
    assert efficiency(intensity("parameters", 1024, 1), 70e9, 70e12) > 0.5
    assert efficiency(intensity("optimizer", 1024, 2), 1.5e12, 70e12) > 0.9
    assert efficiency(10.0, 5.0, 50.0) == 0.5
    with pytest.raises(ValueError, match="what must be one of"):
        intensity("states", 1, 1)
    with pytest.raises(ValueError, match="hidden and interval"):
        intensity("activations", 1024, 1)
    with pytest.raises(ValueError, match="bandwidth must be above 0"):
        efficiency(1.0, 0.0, 1.0)


def test_records_are_whole_pages(tmp_path: Path) -> None:
    swap = SwapFile(tmp_path)
    for size, pages in ((1, 1), (1024, 1), (1025, 2)):
        shard = SwappedShard(swap, "optimizer", size, torch.float32, [0])
        assert shard.largest == shard.nbytes == pages * ALIGN
    swap.close()


# --- the laboratory -------------------------------------------------------------


def test_figures(tmp_path: Path) -> None:
    rates = {depth: throughput(tmp_path, 1 << 16, ALIGN, depth) for depth in (1, 2)}
    assert all(rate > 0 for pair in rates.values() for rate in pair)
    axes = depth_figure(rates).axes[0]
    assert [line.get_label() for line in axes.lines] == ["write", "read"]
    bars = [Activity(lane, "root", i, i + 1.0) for i, lane in enumerate(LANES)]
    lanes = lanes_figure({"one": bars, "two": bars})
    assert [len(a.patches) for a in lanes.axes] == [3, 3]
    assert lanes.axes[0].get_title(loc="left") == "one: 3000 ms"
    curves = efficiency_figure(70e12).axes
    assert [len(a.lines) for a in curves] == [4, 4]
    # half of the time is computing where ait x bandwidth is the peak
    x, y = curves[0].lines[0].get_data()
    half = min(range(len(y)), key=lambda i: abs(y[i] - 50))
    assert x[half] == pytest.approx(70e12 / 1024 / 1e9, rel=0.1)
    point = point_figure(1.0, 1.0, {8: (1.0, 0.5)}, {8: 0.25}).axes[0]
    assert list(point.lines[1].get_data()[1]) == [25]
