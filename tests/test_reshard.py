"""What one run has saved, any other loads: plan, ranks, storage, precision, units."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from nasty import Case, muon, on_cpu_only, same
from resumed import Run, Small, close, equal, near, resumed, steps, unbroken
from safetensors.torch import load_file
from torch import Tensor, nn

from minizero import Plan
from minizero.checkpoint import load, save
from minizero.memory.tracker import Tracker
from minizero.precision import LossScale
from minizero.ranks import Pool, rank, world_size
from minizero.zero import DataParallel

RANKS = (1, 2, 3)
at = Plan.stage
KINDS: dict[str, Case] = {
    "0": Case(at(0)),
    "1 cpu": Case(at(1, "cpu")),
    "3": Case(at(3)),
    "2 nvme": Case(at(2, "nvme")),
    "1": Case(at(1)),
    "3 cpu": Case(at(3, "cpu", "cpu")),
    "2": Case(at(2)),
    "3 nvme": Case(at(3, "nvme", "nvme")),
}
NAMES = list(KINDS)
BEFORE, AFTER = 2, 2


class Alone:
    """One rank: this process."""

    def run(self, function: Callable[..., Any], *args: Any, **kind: Any) -> list[Any]:
        return [function(*args, **kind)]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Any]]:
    with ExitStack() as stack:
        yield {n: stack.enter_context(Pool(n)) if n > 1 else Alone() for n in RANKS}


def save_all(folder: Path, kinds: list[str]) -> dict[str, Run]:
    return {
        kind: unbroken(KINDS[kind], BEFORE, AFTER, folder, f"{world_size()} {kind}")
        for kind in kinds
    }


def load_all(folder: Path, tags: dict[str, str]) -> dict[str, Run]:
    return {
        kind: resumed(KINDS[kind], BEFORE, AFTER, folder, tag)
        for kind, tag in tags.items()
    }


def contents(path: Path) -> list[dict[str, Tensor]]:
    """Every file's tensors, but for the bytes of random states."""
    files = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
    return [{k: v for k, v in f.items() if k[:7] != "values/"} for f in files]


@on_cpu_only
@pytest.mark.thorough  # chapter 12 does it with nine kinds
def test_every_kind_loads_what_every_other_has_saved(
    pools: dict[int, Any], tmp_path: Path
) -> None:
    """What is saved does not depend on the kind: all are equal, tensor by tensor. So
    each kind, on each number of ranks, need load one of each number of ranks."""
    expected: dict[int, list[Run]] = {}
    for ranks, pool in pools.items():
        kinds = NAMES if ranks == 2 else NAMES[:4]
        runs = pool.run(save_all, tmp_path, kinds)
        expected[ranks] = pool.run(unbroken, KINDS["0"], BEFORE, AFTER)
        files = contents(tmp_path / f"{ranks} 0")
        for kind in kinds:
            # saving did not change the run
            assert equal([run[kind] for run in runs], expected[ranks]), kind
            others = contents(tmp_path / f"{ranks} {kind}")
            assert all(map(same, files, others)) and len(files) == len(others), kind
    for ranks, pool in pools.items():
        for saved_on in pools:
            first = 3 * (saved_on - 1) + ranks  # other kinds for each pair
            kinds = [NAMES[(first + i) % 8] for i in range(3)]
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


sgd = partial(torch.optim.SGD, lr=0.1)
nadam = partial(torch.optim.NAdam, lr=1e-2)
fused = partial(torch.optim.AdamW, lr=1e-2, fused=True)
high = {"precision": "fp16", "scale_power": 22}  # so that steps are skipped

# steps before the save, the run that saves, the one that loads
RESUMES: dict[str, tuple[int, Case, Case]] = {
    "fp16": (4, Case(at(3, "nvme", "nvme"), **high), Case(at(2, "cpu"), **high)),
    "no states": (4, Case(at(1), optimizer=sgd), Case(at(3), optimizer=sgd)),
    # states that the loading run has made are dropped
    "at the start": (0, Case(at(2), "bf16"), Case(at(3), "bf16")),
    # with states that are numbers
    "nadam": (4, Case(at(1), optimizer=nadam), Case(at(3), optimizer=nadam)),
    "muon": (4, Case(at(1), optimizer=muon), Case(at(3), optimizer=muon)),
    "dropout": (4, Case(at(1), optimizer=fused), Case(at(3), optimizer=fused)),
    # an update that is under way arrives when the run is saved
    "late": (
        4, Case(at(2, "cpu"), storage="Delayed"),
        Case(at(3, "cpu", "cpu"), storage="Delayed"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMES)
def test_a_resumed_run_goes_on_to_the_bit(
    pools: dict[int, Any], tmp_path: Path, name: str
) -> None:
    before, saves, loads = RESUMES[name]
    how = before, 3, tmp_path, "t", 0.3 * (name == "dropout")
    expected = pools[2].run(unbroken, saves, *how)
    assert equal(pools[2].run(resumed, loads, *how), expected)


def test_units_may_differ(pools: dict[int, Any], tmp_path: Path) -> None:
    """The loader looks for names and elements, not for buffers."""

    def is_norm(module: nn.Module) -> bool:
        return isinstance(module, nn.LayerNorm)

    saved = pools[2].run(unbroken, Case(at(3)), 2, 2, tmp_path)
    got = pools[2].run(resumed, Case(at(1)), 2, 2, tmp_path, units=is_norm)
    near(got, saved)  # the gradient's norm is summed over other shards


def masters(net: DataParallel) -> list[Tensor]:
    """All that an optimizer updates, and its states, of one rank alone."""
    states = [(flat.master, net.optimizer.state[flat.master]) for flat in net.trained]
    kept = [[master, *dict(sorted(s.items())).values()] for master, s in states]
    return [tensor.clone() for each in kept for tensor in each]


def test_from_precision_to_precision(tmp_path: Path) -> None:
    """Masters and states are what is saved, and they come back bit for bit."""
    net = Case(at(3), **high).build(Small)
    steps(net, 0, 5)
    skipped, expected = net.precision.skipped_steps, masters(net)
    scales = net.precision.state_dict()["loss_scale"]
    assert skipped > 0 and scales["scale"] < 2**22
    for stage, precision in enumerate(("fp16", "fp32", "bf16", "fp16")):
        save(net, tmp_path, precision)
        net = Case(at(stage), precision, scale_power=22).build(Small)
        load(net, tmp_path)
        assert net.precision.skipped_steps == skipped
        got = masters(net)
        assert {t.dtype for t in got} == {torch.float32}
        assert all(map(torch.equal, got, expected)) and len(got) == len(expected)
        if stage == 0:
            assert net.precision.state_dict()["loss_scale"] == scales
    # a precision without a loss scale was in between
    assert net.precision.loss_scale == 2.0**22
    other = Case(at(1), "fp16").build(Small)
    other.precision.scaler = LossScale(8.0)
    load(other, tmp_path, "fp32")
    assert other.precision.loss_scale == 8.0  # it is of another kind


def drawn(folder: Path, load_it: bool) -> list[float]:
    """What generators draw, and what a scheduler and a rank's buffer say."""
    net = Case(at(3)).build(Small)
    schedule = torch.optim.lr_scheduler.OneCycleLR(net.optimizer, [0.1, 0.01], 20)
    buffer = net.model.get_buffer("mean")
    buffer.fill_(rank() + 1.0)
    if load_it:
        torch.rand(7), random.random(), numpy.random.rand(), buffer.fill_(99.0)
        schedule.load_state_dict(load(net, folder).extra["schedule"])
    else:
        torch.manual_seed(rank())
        schedule.step()
        save(net, folder, "t", extra={"schedule": schedule.state_dict()})
    draws = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
    return [*draws, float(buffer[0]), *schedule.get_last_lr()]


def test_random_states_buffers_and_schedules(
    pools: dict[int, Any], tmp_path: Path
) -> None:
    """Each rank's own; on another number of ranks, rank 0's buffers."""
    saved = pools[2].run(drawn, tmp_path, False)
    assert pools[2].run(drawn, tmp_path, True) == saved
    assert saved[0][0] != saved[1][0] and saved[1][3] == 2.0
    for found in pools[3].run(drawn, tmp_path, True):
        assert found[3:] == saved[0][3:]


# Memory: nothing but chunks is read or copied, wherever the shards are stored

WIDTH, UNIT = 128, 128 * 128 * 4
OWN = 30_000  # bytes of packed states of generators, and of buffers for the disk


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))


def peaks(folder: Path, plan: Plan) -> list[int]:
    """Most bytes of tensors beside those before, in a save and in a load."""
    case = Case(plan, optimizer=fused, buffers=(5, 1024))
    net = case.build(wide, bucket_size=10**9)
    net.backward(net(torch.ones(1, WIDTH)).sum())
    net.step()
    found = []
    # with NVMe a save in the background is written at once
    options = {"background": plan.optimizer.on == "nvme"}
    for work in (lambda: save(net, folder, "t", **options), lambda: load(net, folder)):
        with Tracker() as seen:
            net.module_state()  # to have seen what placeholders are
            before = seen.total + sum(seen.host.values())
            seen.peak, seen.host_peak = seen.total, sum(seen.host.values())
            work()
        found.append(seen.peak + seen.host_peak - before)
    close(net)
    return found


@pytest.mark.parametrize("on", [None, "cpu", "nvme"])
def test_memory(pools: dict[int, Any], tmp_path: Path, on: str | None) -> None:
    for found in pools[2].run(peaks, tmp_path, at(3, on, on)):
        most = OWN + UNIT  # two chunks: half a unit is a shard, which fits into one
        assert max(found) <= most, (found, most)
