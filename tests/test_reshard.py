"""What one run has saved, any other loads: plan, ranks, home, precision, units."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed import Run, close, equal, make, near, resumed, steps, unbroken, whole
from torch import Tensor, nn

from minizero import Delayed, NVMe, Offload, Plan, parallelize
from minizero.checkpoint.api import load, save
from minizero.checkpoint.directory import read_index
from minizero.checkpoint.export import consolidate, export
from minizero.checkpoint.manifest import parse_index
from minizero.checkpoint.reader import SavedRun
from minizero.checkpoint.run_state import flats_of
from minizero.checkpoint.tensor_file import CheckpointError, TensorFile
from minizero.memory.tracker import Tracker
from minizero.precision import LossScale, MixedPrecision
from minizero.ranks.launch import Pool, rank, world_size
from minizero.zero.data_parallel import DataParallel
from minizero.zero.interfaces import Home

RANKS = (1, 2, 3, 4)
KINDS = {
    "0": {"stage": 0},
    "1 cpu": {"stage": 1, "where": "cpu"},
    "3": {"stage": 3},
    "2 nvme": {"stage": 2, "where": "nvme"},
    "1": {"stage": 1},
    "3 cpu": {"stage": 3, "where": "cpu"},
    "2": {"stage": 2},
    "3 nvme": {"stage": 3, "where": "nvme"},
}
NAMES = list(KINDS)
# every kind from every number of ranks to every other, or some of each
ALL = "MINIZERO_RESHARD_ALL" in os.environ
BEFORE, AFTER = 2, 2


class Alone:
    """One rank: this process."""

    def run(
        self, function: Callable[..., Any], *args: Any, **options: Any
    ) -> list[Any]:
        return [function(*args, **options)]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Any]]:
    with ExitStack() as stack:
        yield {n: stack.enter_context(Pool(n)) if n > 1 else Alone() for n in RANKS}


def save_all(folder: Path, kinds: list[str]) -> dict[str, Run]:
    return {
        kind: unbroken(BEFORE, AFTER, folder, f"{world_size()} {kind}", **KINDS[kind])
        for kind in kinds
    }


def load_all(folder: Path, tags: dict[str, str]) -> dict[str, Run]:
    return {
        kind: resumed(BEFORE, AFTER, folder, tag, **KINDS[kind])
        for kind, tag in tags.items()
    }


def contents(folder: Path, tag: str) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """What the index says but for names of files, and every file's tensors."""
    index = parse_index(*read_index(folder, tag))
    with SavedRun(folder / tag, index) as run:
        files = [
            {name: run.file(r).tensor(name) for name in run.file(r).entries}
            for r in range(index.world_size)
        ]
    facts = {
        k: v for k, v in vars(index).items() if k not in ("tag", "number", "files")
    }
    return facts, files


def test_every_kind_loads_what_every_other_has_saved(
    pools: dict[int, Any], tmp_path: Path
) -> None:
    """What is saved does not depend on the kind: all are equal, tensor by tensor. So
    each kind, on each number of ranks, need load one of each number of ranks."""
    expected: dict[int, list[Run]] = {}
    for ranks, pool in pools.items():
        kinds = NAMES if ALL or ranks == 2 else NAMES[:4]
        runs = pool.run(save_all, tmp_path, kinds)
        expected[ranks] = pool.run(unbroken, BEFORE, AFTER)
        facts, files = contents(tmp_path, f"{ranks} 0")
        for kind in kinds:
            # saving did not change the run
            assert equal([run[kind] for run in runs], expected[ranks]), kind
            others, theirs = contents(tmp_path, f"{ranks} {kind}")
            assert others == facts, kind
            for mine, its in zip(files, theirs, strict=True):
                assert mine.keys() == its.keys()
                assert all(torch.equal(mine[k], its[k]) for k in mine), kind
    for ranks, pool in pools.items():
        for saved_on in RANKS:
            # other kinds for each pair, all for each `ranks`
            first = 2 * (saved_on - 1) + ranks
            kinds = [NAMES[(first + i) % 8] for i in range(8 if ALL else 2)]
            tags = {
                k: f"{saved_on} {NAMES[(first + i) % 4]}" for i, k in enumerate(kinds)
            }
            runs = pool.run(load_all, tmp_path, tags)
            for kind in kinds:
                got = [run[kind] for run in runs]
                if ranks == saved_on:
                    assert equal(got, expected[ranks]), (ranks, kind)
                else:
                    near(got, expected[saved_on])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision(pools: dict[int, Any], tmp_path: Path, precision: str) -> None:
    """Masters, loss scale and skipped steps; a row is its master's rounding."""
    kinds = ({"stage": 0}, {"stage": 3, "where": "nvme"}, {"stage": 2, "where": "cpu"})
    pool = pools[2]
    for n, kind in enumerate(kinds):
        saved = pool.run(unbroken, 4, 3, tmp_path, f"{n}", precision=precision, **kind)
        other = kinds[(n + 1) % 3]
        got = pool.run(resumed, 4, 3, tmp_path, f"{n}", precision=precision, **other)
        assert equal(got, saved), (kind, other)
    three = pools[3].run(resumed, 4, 3, tmp_path, "1", precision=precision, stage=1)
    assert all(loss.isfinite() for loss in three[0][0])


def scale(folder: Path, skipped: int | None) -> tuple[int, dict[str, Any]]:
    net = make(1, precision="fp16")
    if skipped is None:
        steps(net, 0, 5)
        save(net, folder, "t")
    else:
        load(net, folder)
    return net.precision.skipped_steps, net.precision.state_dict()


def test_loss_scale_and_counts(tmp_path: Path) -> None:
    saved = scale(tmp_path, None)
    assert saved[0] > 0 and saved[1]["loss_scale"]["scale"] < 2**22
    assert scale(tmp_path, 0) == saved


def masters(net: DataParallel) -> list[Tensor]:
    """All that an optimizer updates, and its states, of one rank alone."""
    found = []
    for *_, flat in (found for found in flats_of(net) if found[2].trainable):
        [owned] = net.owned_states(flat)
        kept = [v for _, v in sorted(owned.state.items())]
        found += [t.clone() for t in (owned.master, *kept)]
    return found


CHAIN = ["fp16", "fp32", "bf16", "fp16"]


def test_between_precisions(tmp_path: Path) -> None:
    """Masters and states are what is saved, and they come back bit for bit."""
    net = make(3, precision=CHAIN[0])
    steps(net, 0, 5)
    skipped, expected = net.precision.skipped_steps, masters(net)
    assert skipped > 0
    for stage, precision in enumerate(CHAIN[1:]):
        save(net, tmp_path, precision, extra={"step": 5})
        dropped = pytest.warns(UserWarning, match="loss scale .* has none")
        with dropped if stage == 0 else nullcontext():
            net = make(stage, precision=precision)
            load(net, tmp_path)
        assert net.precision.skipped_steps == skipped
        got = masters(net)
        assert {t.dtype for t in got} == {torch.float32}
        assert all(map(torch.equal, got, expected)) and len(got) == len(expected)
    assert net.precision.loss_scale == 2.0**22  # as this run configured it
    assert all(loss.isfinite() for loss in steps(net, 5, 8))


def from_precision(folder: Path, precision: str, saved: str) -> list[Tensor]:
    net = make(2, precision=precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(net, folder, saved)
    return steps(net, 3, 5)


def test_every_precision_loads_every_other(
    pools: dict[int, Any], tmp_path: Path
) -> None:
    for saved in ("fp32", "bf16", "fp16"):
        pools[3].run(unbroken, 3, 0, tmp_path, saved, precision=saved)
        for precision in ("fp32", "bf16", "fp16"):
            losses = pools[2].run(from_precision, tmp_path, precision, saved)
            assert all(loss.isfinite() for loss in losses[0]), (saved, precision)


def test_a_loss_scale_of_another_kind_keeps_its_start(tmp_path: Path) -> None:
    net = make(1, precision="fp16")
    steps(net, 0, 3)
    save(net, tmp_path, "t")
    other = make(1, precision="fp16")
    other.precision.scaler = LossScale(8.0)
    with pytest.warns(UserWarning, match="has one of another kind"):
        load(other, tmp_path)
    assert other.precision.loss_scale == 8.0


@pytest.mark.parametrize("optimizer", ["fused", "sgd", "momentum", "adagrad", "nadam"])
def test_optimizers(pools: dict[int, Any], tmp_path: Path, optimizer: str) -> None:
    kind = {"optimizer": optimizer}
    saved = pools[2].run(unbroken, 2, 2, tmp_path, stage=1, **kind)
    for other in ({"stage": 0}, {"stage": 3, "where": "nvme"}):
        got = pools[2].run(resumed, 2, 2, tmp_path, **other, **kind)
        assert equal(got, saved), other
    # states that the run has made are no state of the one that is loaded
    early = pools[2].run(unbroken, 0, 2, tmp_path, "early", stage=3, **kind)
    assert equal(pools[2].run(resumed, 0, 2, tmp_path, "early", stage=2, **kind), early)


def test_schedules(pools: dict[int, Any], tmp_path: Path) -> None:
    """Units that `Overlap` keeps whole are gathered anew."""
    saved = pools[2].run(unbroken, 2, 2, tmp_path, stage=3, overlap=True)
    for stage in (1, 3):
        got = pools[2].run(resumed, 2, 2, tmp_path, stage=stage, overlap=True)
        assert equal(got, saved)


def late(folder: Path, load_it: bool) -> Run:
    """An update that is under way arrives when the run is saved."""
    net = make(1, "delayed")
    assert isinstance(net.home, Delayed)
    steps(net, 0, 3)
    if load_it:
        load(net, folder)
    else:
        save(net, folder, "t")
    return steps(net, 3, 6), whole(net)


def test_a_delayed_update(pools: dict[int, Any], tmp_path: Path) -> None:
    saved = pools[2].run(late, tmp_path, False)
    assert equal(pools[2].run(late, tmp_path, True), saved)


def test_units_may_differ(pools: dict[int, Any], tmp_path: Path) -> None:
    """The loader looks for names and elements, not for buffers."""
    saved = pools[2].run(unbroken, 2, 2, tmp_path, stage=3)
    got = pools[2].run(resumed, 2, 2, tmp_path, stage=1, units=is_linear)
    # a norm is summed over other rows, so it rounds otherwise
    near(got, saved)


class Hollow(nn.Module):
    """Parameters and buffers without elements: one alone in its buffer, as its group
    is, one frozen alone, one beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.alone = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.empty(2, 0), requires_grad=False)
        self.layers[1].beside = nn.Parameter(torch.empty(0))
        self.register_buffer("none", torch.empty(0, 2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x @ self.alone.T).sum() + x.square().sum()


def hollow(
    folder: Path, load_it: bool, one_unit: bool, **kind: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(load_it)
    model = Hollow()
    first, *others = (p for p in model.parameters() if p.requires_grad)
    groups = [{"params": others}, {"params": [first], "lr": 0.05}]
    assert first is model.alone
    net = of_kind(model, torch.optim.AdamW(groups, lr=0.1), one_unit, **kind)
    if load_it:
        load(net, folder)
    losses = []
    for n in range(2 * load_it, 2 + 2 * load_it):
        loss = net(torch.full((2, 3), n / 3))
        net.backward(loss)
        net.step()
        losses.append(loss.detach())
    if not load_it:
        save(net, folder, "a")
    return losses, net.state_dict()


def of_kind(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    one_unit: bool,
    stage: int,
    where: str = "device",
    precision: bool = False,
) -> DataParallel:
    on = None if where == "device" else where
    plan = Plan.stage(stage, on, on if stage == 3 else None)
    return parallelize(
        model,
        optimizer,
        plan,
        units=(lambda m: False) if one_unit else None,
        precision=MixedPrecision(torch.bfloat16) if precision else None,
        home=Offload(plan) if on else None,
    )


@pytest.mark.parametrize("kind", ["0", "3", "3 cpu", "1 bf16"])
def test_parameters_without_elements(
    pools: dict[int, Any], tmp_path: Path, kind: str
) -> None:
    """Saved, found missing, loaded, consolidated and exported as others are."""
    options = KINDS.get(kind, {"stage": 1, "precision": True})
    weights = pools[2].run(hollow, tmp_path, False, False, **options)[0][1]
    names = ["alone", "frozen", "layers.1.beside", "none"]
    whole = consolidate(tmp_path)
    assert whole.keys() == weights.keys() and {*names} <= whole.keys()
    for name in names:
        assert whole[name].shape == weights[name].shape and not whole[name].numel()
    export(tmp_path, tmp_path / "out")
    with TensorFile(tmp_path / "out" / "model.safetensors") as file:
        assert all(file.entries[n].shape == weights[n].shape for n in names)
    for ranks in (1, 2):
        for one_unit in (False, True):
            pools[ranks].run(hollow, tmp_path, True, one_unit, **options)
    model = Hollow()
    model.further = nn.Parameter(torch.empty(0))
    trained = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(CheckpointError, match="'further' is not in the checkpoint"):
        load(parallelize(model, torch.optim.AdamW(trained)), tmp_path, optimizer=False)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm)


def with_dropout(folder: Path, load_it: bool) -> tuple[list[Tensor], list[float]]:
    import random

    import numpy

    net = make(2, dropout=0.3)
    steps(net, 0, 2)
    if load_it:
        torch.rand(7), random.random(), numpy.random.rand()
        load(net, folder)
    else:
        save(net, folder, "t")
    return steps(net, 2, 4), [random.random(), float(numpy.random.rand())]


def test_random_states_of_every_rank(pools: dict[int, Any], tmp_path: Path) -> None:
    saved = pools[2].run(with_dropout, tmp_path, False)
    got = pools[2].run(with_dropout, tmp_path, True)
    assert got == saved
    assert saved[0][0] != saved[1][0]


def scheduled(folder: Path, load_it: bool) -> tuple[list[Tensor], list[float]]:
    net = make(3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        net.optimizer, [0.1, 0.01], total_steps=20
    )
    if load_it:
        schedule.load_state_dict(load(net, folder).extra["schedule"])
    else:
        for step in range(3):
            steps(net, step, step + 1)
            schedule.step()
        save(net, folder, "t", extra={"schedule": schedule.state_dict()})
    losses = []
    for step in range(3, 6):
        losses += steps(net, step, step + 1)
        schedule.step()
    return losses, schedule.get_last_lr()


def test_a_scheduler_goes_on(tmp_path: Path) -> None:
    saved = scheduled(tmp_path, False)
    assert scheduled(tmp_path, True) == saved


def own_buffers(folder: Path, load_it: bool) -> list[Tensor]:
    net = make(1)
    buffer = net.model.get_buffer("mean")
    buffer.fill_(rank() + 1.0)
    if load_it:
        buffer.fill_(99.0)
        load(net, folder)
    else:
        save(net, folder, "t")
    return [buffer.clone(), net.model.get_buffer("calls")]


def test_each_rank_s_buffers(pools: dict[int, Any], tmp_path: Path) -> None:
    saved = pools[2].run(own_buffers, tmp_path, False)
    assert pools[2].run(own_buffers, tmp_path, True)[1][0][0] == 2.0 == saved[1][0][0]
    for found in pools[3].run(own_buffers, tmp_path, True):
        assert found[0][0] == 1.0  # rank 0's


# Memory. A unit is large against the states of generators, which are 13 KB.

WIDTH, UNIT = 128, 128 * 128 * 4
OWN = 20_000


def wide(stage: int = 3, where: str = "device", bf16: bool = False) -> DataParallel:
    plan = Plan.stage(stage)
    if where != "device":
        plan = Plan.stage(stage, where, where)
    home = {"cpu": Offload, "nvme": partial(NVMe, buffer_size=1024)}.get(where, Home)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    precision = MixedPrecision(torch.bfloat16) if bf16 else None
    net = parallelize(model, optimizer, plan, home=home(plan), precision=precision)
    net.backward(net(torch.ones(1, WIDTH)).sum())
    net.step()
    return net


def saved_wide(folder: Path) -> None:
    save(wide(0), folder, "wide")


def peaks_of_load(folder: Path, kind: dict[str, Any]) -> tuple[int, int]:
    """Most bytes beside what was there before and after, on device and host."""
    net = wide(**kind)
    gc.collect()  # models of tests before
    with Tracker() as seen:
        net.module_state()  # to have seen what absent parameters read as
        before = seen.total, sum(seen.host.values())
        seen.peak, seen.host_peak = before
        load(net, folder)
        assert before == (seen.total, sum(seen.host.values()))
    close(net)
    return seen.peak - before[0], seen.host_peak - before[1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_memory_of_loading(pools: dict[int, Any], tmp_path: Path, ranks: int) -> None:
    """Shards in host memory are read in place; others, a row of a unit at a time."""
    pools[2].run(saved_wide, tmp_path)
    kinds: tuple[dict[str, Any], ...] = (
        {"stage": 0},
        {},
        {"where": "cpu"},
        {"where": "nvme"},
        {"bf16": True},
    )
    for kind in kinds:
        row = -(-UNIT // ranks)
        for device, host in pools[ranks].run(peaks_of_load, tmp_path, kind):
            assert device <= OWN, kind
            most = row if kind.get("where") == "nvme" else 0
            assert most <= host <= most + 4, kind


CHUNK = 1 << 12


def peaks_of_save(
    folder: Path, where: str, background: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    net = wide(3, where)
    save(net, folder, "first")
    gc.collect()
    with monkeypatch.context() as patch, Tracker() as seen:
        patch.setattr("minizero.checkpoint.tensor_file.CHUNK", CHUNK)
        before = seen.total, sum(seen.host.values())
        seen.peak, seen.host_peak = before
        save(net, folder, "second", background=background).wait()
    close(net)
    return seen.peak - before[0], seen.host_peak - before[1]


@pytest.mark.parametrize("where", ["device", "cpu", "nvme"])
def test_memory_of_saving(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of what rests in files, and copies within the budget."""
    for background in (0, 3 * UNIT):
        device, host = peaks_of_save(tmp_path, where, background, monkeypatch)
        assert device <= OWN
        assert host <= CHUNK + background
        if background and where != "nvme":
            assert host > background - UNIT  # it was used
